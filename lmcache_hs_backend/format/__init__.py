"""The cold path as it is on disk: names, namespaces, chunk files, request records, and a reader over them.

Everything that reads or writes these files goes through this package: the tiers, the data sets and the command line.
It imports no torch and nothing of the tiers, so a listing starts in a fraction of a second. It keeps no state, takes
no lock and starts no thread; which file is read, written or deleted when is decided by its callers.

- ``pages``: the unit of O_DIRECT.
- ``layout``: directories and file names, and what is found under them.
- ``namespace``: ``namespace.json``, and the rows that may share one directory.
- ``header``, ``chunk_file``: one chunk as one safetensors file.
- ``request_log``: ``sequences/*.jsonl``.
- ``eviction_order``: which files leave first.
- ``shared_names``, ``objects``: what objects of a shared tier are called, and requests for them.
- ``url_files``, ``object_cache``: objects read as files are, by ranges.
- ``chunk_sources``: a directory or a URL as a list of chunks.
- ``reader``: ``ColdTierReader``, for everyone who looks from outside.
"""
