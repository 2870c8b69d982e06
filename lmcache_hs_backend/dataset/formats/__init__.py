"""One module for each trainer: how the rows of a sample become what its reader reads."""

from __future__ import annotations

from lmcache_hs_backend.dataset.formats.base import Format
from lmcache_hs_backend.dataset.formats.deepspec import DeepSpec
from lmcache_hs_backend.dataset.formats.modelopt import ModelOpt
from lmcache_hs_backend.dataset.formats.specforge import SpecForge
from lmcache_hs_backend.dataset.formats.speculators import Speculators

FORMATS: dict[str, type[Format]] = {
    "speculators": Speculators,
    "specforge": SpecForge,
    "modelopt": ModelOpt,
    "deepspec": DeepSpec,
}

__all__ = ["FORMATS", "DeepSpec", "Format", "ModelOpt", "SpecForge", "Speculators"]
