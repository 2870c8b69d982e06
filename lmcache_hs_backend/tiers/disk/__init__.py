"""The disk under the cold tier: bytes, names and errno. Knows no chunk state.

Whether a chunk should be read, written or deleted is decided in ``tiers.flows``; what that means for the chunk is
recorded by ``tiers.state``. Here is what the system says to it.
"""
