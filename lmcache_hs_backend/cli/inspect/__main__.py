"""``python -m lmcache_hs_backend.cli.inspect``."""

from lmcache_hs_backend.cli.inspect.app import main

raise SystemExit(main())
