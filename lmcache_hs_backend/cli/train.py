"""``lmcache-hs-train``: ``speculators train`` with the ``hs_tiered`` backend, which reads a cold path directly.

Every option is speculators' own; the backend is chosen unless another one is named. With several
processes: ``torchrun … -m lmcache_hs_backend.cli.train …``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

PROGRAM = "lmcache-hs-train"


def main(argv: Sequence[str] | None = None) -> int:
    """Register the backend, then run the trainer. Gives the exit status: 1 when it is not installed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        backend = importlib.import_module("lmcache_hs_backend.integrations.speculators")
        speculators = importlib.import_module("speculators.cli")
    except ModuleNotFoundError as error:
        print(f"{PROGRAM}: error: {error}; pip install speculators==0.9.0 datasets", file=sys.stderr)
        return 1
    if not any(argument.split("=")[0] == "--hidden-states-backend" for argument in arguments):
        arguments += ["--hidden-states-backend", backend.NAME]
    speculators.app(args=["train", *arguments], prog_name="speculators")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
