"""Who does what when, and under which lock: store, retrieve, read, write back, evict, recover, and the I/O threads.

A flow takes the store's lock for the length of one transition of ``tiers.state``, and does I/O, copies and calls into
LMCache between them. ``core`` has the lock and says what it guards.
"""
