"""``lmcache-hs-inspect``: look into a cold path, keep it in order, and check a configuration.

- ``browse``: list, show, tree. No torch but for ``show``'s figures.
- ``figures``: stats and report.
- ``care``: verify, rm and gc.
Below them: ``selection`` (which cold path, which chunks), ``stream`` (reading it), ``nodes`` (chunks as a forest).
"""

from lmcache_hs_backend.cli.inspect.app import COMMANDS, main

__all__ = ["COMMANDS", "main"]
