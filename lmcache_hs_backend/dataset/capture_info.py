"""Which stored layers become which inputs of a trainer: storage slots, numbering, and the final norm.

Chunks carry what their writer knew (``capture``, JSON): ``source``; ``layer_ids``, the numbering of the
storage slots; ``last_layer``, whether the last layer is before the final norm; ``num_layers`` of the model.
Two numberings are known, and are one apart:

- ``vllm``: slot k is the residual stream after k decoder layers, so ``num_layers`` is the last one.
- ``output``: slot k is the output of decoder layer k, counted from 0.

Nothing here reads a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_hs_backend.dataset.errors import DatasetError

VLLM = "vllm"
OUTPUT = "output"
PRE_NORM = "pre-norm"
POST_NORM = "post-norm"


@dataclass(frozen=True)
class Capture:
    """What is known about stored layers. Empty text or None: not known."""

    source: str = ""
    layer_ids: str = ""
    last_layer: str = ""
    num_layers: int | None = None

    @classmethod
    def parse(cls, text: str) -> Capture:
        """From a chunk's header. What is malformed or unheard of counts as not known."""
        try:
            info = json.loads(text)
        except (ValueError, RecursionError):
            info = None
        if not isinstance(info, dict):
            return cls()
        count = info.get("num_layers")
        return cls(
            source=str(info.get("source", "")),
            layer_ids=info["layer_ids"] if info.get("layer_ids") in (VLLM, OUTPUT) else "",
            last_layer=info["last_layer"] if info.get("last_layer") in (PRE_NORM, POST_NORM) else "",
            num_layers=count if type(count) is int and 0 < count < 100_000 else None,
        )

    def final_slot(self) -> int | None:
        """The storage slot of the model's last layer; None where the writer did not say."""
        if self.num_layers is None or not self.layer_ids:
            return None
        return self.num_layers - (self.layer_ids == OUTPUT)

    @classmethod
    def of(cls, texts: Sequence[str]) -> Capture:
        """The one capture of all chunks. Raises DatasetError when they disagree on what layers mean."""
        captures = list(dict.fromkeys(cls.parse(text) for text in texts))
        if len({(c.layer_ids, c.last_layer, c.num_layers) for c in captures}) > 1:
            found = "; ".join(
                f"{c.source or 'unknown source'}: numbering {c.layer_ids or 'unknown'}, last layer "
                f"{c.last_layer or 'unknown'}, {c.num_layers or 'unknown'} layers"
                for c in captures
            )
            raise DatasetError(
                f"the chunks were captured in different ways ({found}), so one storage slot would mean different "
                f"layers; extract their cold paths one by one"
            )
        return captures[0] if captures else cls()


@dataclass(frozen=True)
class Layers:
    """The storage slots of a dataset: ``aux`` in the order of the files, then ``last``, None where it has no use."""

    aux: tuple[int, ...]
    last: int | None
    capture: Capture

    @property
    def slots(self) -> tuple[int, ...]:
        """The layers of a sample, the last one last."""
        return self.aux if self.last is None else (*self.aux, self.last)

    @property
    def convention(self) -> str:
        """What the layer numbers mean, as the writer said."""
        return self.capture.layer_ids or "storage slots"

    def vllm_ids(self) -> list[int] | None:
        """The auxiliary layers as vLLM and speculators number them; None where the numbering is not known."""
        return self._ids(0 if self.capture.layer_ids == VLLM else 1)

    def output_ids(self) -> list[int] | None:
        """As SpecForge, ModelOpt and DeepSpec number them: the output of layer k, from 0."""
        return self._ids(-1 if self.capture.layer_ids == VLLM else 0)

    def _ids(self, shift: int) -> list[int] | None:
        return [slot + shift for slot in self.aux] if self.capture.layer_ids else None


def choose_layers(
    capture: Capture, stored: Sequence[int], aux: Sequence[int] | None, last: int | None, *, uses_last: bool = True
) -> tuple[Layers, list[str]]:
    """The layers to extract, and warnings about what had to be taken on trust.

    ``stored`` are the storage slots that occur. Without ``aux`` and ``last`` the capture decides: its last
    layer, and all others in ascending order. A slot that was not captured is a DatasetError, and so is a ``last`` that
    is not the model's last layer according to the capture. Without ``uses_last`` the last layer is left out, and need
    not be there.
    """
    slots = ", ".join(map(str, sorted(stored)))
    final = capture.final_slot()
    if not uses_last and last is not None:
        raise DatasetError(f"--last-layer {last}: this format stores no last layer")
    if uses_last and final is not None and final not in stored:
        raise DatasetError(f"the last layer, {final}, was not captured (stored {slots})")
    if final is not None and last not in (None, final):
        raise DatasetError(f"--last-layer {last}: the last layer of these captures is {final} (stored {slots})")
    if not uses_last:
        if aux is None:
            aux = sorted(slot for slot in stored if slot != final)
    elif last is None:
        if final is None:
            raise DatasetError(
                f"which storage slot holds the last layer is not known; name it with --last-layer (stored: {slots})"
            )
        last = final
        if aux is None:
            aux = sorted(slot for slot in stored if slot != last)
    aux = list(aux or ())
    named = aux if last is None else [*aux, last]
    for slot in named:
        if slot not in stored:
            raise DatasetError(f"layer {slot} was not captured (stored {slots})")
    if len(set(named)) != len(named):
        raise DatasetError(f"layers {', '.join(map(str, named))}: each may be named only once")
    warnings = []
    if capture.layer_ids:
        aux.sort()  # every trainer expects ascending layers, and the numbering says which those are
    else:
        warnings.append(
            f"how storage slots are numbered was not captured; {', '.join(map(str, aux)) or 'no layer'}"
            f"{'' if last is None else f' and the last layer {last}'} are taken as given, in that order"
        )
    return Layers(tuple(aux), last, capture), warnings
