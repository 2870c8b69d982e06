"""The functional core of the tiers: the only code that changes a chunk's state or an account.

Pure bookkeeping: no I/O, no threads, no logging, no copies of rows. Every function here runs under the store's
lock, takes time proportional to the chunks it is given, and returns what the caller has to do next instead of
calling it. Transitions that have to wait for I/O or a copy come in pairs: ``prepare_…`` takes what the work needs
(slots, pins, busy names, reserved bytes), and exactly one of ``commit_…`` and ``abort_…`` gives it back.

==================  ==================================================================================
module              what it holds
==================  ==================================================================================
``entries``         one chunk: its file state, its KV state, its slots
``orders``          in which order chunks are written, leave RAM and leave the disk
``slots``           which bytes of the hot tier are free
``accounts``        which bytes on disk count against the limit
``jobs``            operations on chunk files: one at a time per name, in order
``tier_state``      all of these together, and what every transition is made of: pin, drop, confirm
``storing``         rows come in                        ``reading``     rows go out, cold rows come back
``making_room``     chunks leave RAM, files leave disk   ``writing``     dirty chunks become files
``recovering``      files found at start become chunks   ``checking``    every invariant, in words
==================  ==================================================================================
"""
