"""One module for each trainer: how the rows of a sample become what its reader reads.

A trainer may want other tensors for another algorithm, which is another class then.
"""

from __future__ import annotations

from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.formats.base import Format
from lmcache_hs_backend.dataset.formats.deepspec import DeepSpec
from lmcache_hs_backend.dataset.formats.modelopt import ModelOpt
from lmcache_hs_backend.dataset.formats.specforge import SpecForge, SpecForgeDFlash, SpecForgeDSpark
from lmcache_hs_backend.dataset.formats.speculators import Speculators
from lmcache_hs_backend.dataset.formats.torchspec import TorchSpec, TorchSpecDFlash, TorchSpecDSpark

#: Trainer → algorithm → format. The first algorithm is the one that is meant when none is named.
FORMATS: dict[str, dict[str, type[Format]]] = {
    "speculators": dict.fromkeys(("eagle3", "peagle", "dflash", "dflash2", "dspark", "xpress", "mtp"), Speculators),
    "specforge": {
        "eagle3": SpecForge, "dflash": SpecForgeDFlash, "domino": SpecForgeDFlash, "dspark": SpecForgeDSpark,
    },
    "modelopt": dict.fromkeys(("eagle3", "dflash"), ModelOpt),
    "deepspec": {"dspark": DeepSpec},
    "torchspec": {
        "eagle3": TorchSpec, "dflash": TorchSpecDFlash, "domino": TorchSpecDFlash, "dspark": TorchSpecDSpark,
    },
}  # fmt: skip


def format_of(trainer: str, algorithm: str | None = None) -> type[Format]:
    """The format that a trainer reads for an algorithm. Raises DatasetError when it has no such offline algorithm."""
    known = FORMATS[trainer]
    name = algorithm or next(iter(known))
    if name not in known:
        raise DatasetError(f"--algorithm {name}: --format {trainer} is for {', '.join(known)}")
    return known[name]


__all__ = ["FORMATS", "Format", "format_of"]
