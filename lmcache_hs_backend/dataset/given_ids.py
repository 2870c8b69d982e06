"""Token ids that a data set has already, with what it says of them: padding, and which are trained on. No I/O.

The door of a capture and the prepared datasets of an extraction read the same columns in the same way. Everything
raises ``ValueError`` with the reason in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: A token is trained on where all of these say so that a row has: 1, or in ``labels`` the token's own id.
MASK_COLUMNS = ("loss_mask", "assistant_masks", "assistant_mask", "labels", "completion_mask")
#: 0 where a row was padded.
PADDING = "attention_mask"
#: A label of a token that is not trained on, as every loss function of torch has it.
IGNORED = -100


class Twice(ValueError):
    """JSON that says a key twice."""


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (``object_pairs_hook``) whose keys are different: of two values for one, either is a guess."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Twice(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return made


def flat(value: object) -> list[Any] | None:
    """A list of numbers, which may be the only one in another list; None for anything else."""
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if not isinstance(value, list | tuple) or any(isinstance(item, list | tuple) for item in value):
        return None
    return list(value)


def ids_of(value: object, name: str) -> list[int]:
    """Token ids, from a column of that name."""
    ids = flat(value)
    if ids is None:
        raise ValueError(f"{name} are {value!r:.40}, not a list of integers, flat or [1, N]")
    for item in ids:
        if type(item) is not int or abs(item) >= 2**63:
            raise ValueError(f"{name} has {item!r:.40}, which is no token id")
    return ids


def unpadded(count: int, attention: object) -> slice:
    """Which of a row's tokens are its own, by its ``attention_mask``: all but the zeros at its ends."""
    if attention is None:
        return slice(0, count)
    mask = flat(attention)
    if mask is None or len(mask) != count:
        what = f"{attention!r:.40}" if mask is None else f"of {len(mask)}"
        raise ValueError(f"{count} token ids, but an {PADDING} {what}")
    if not all(value in (0, 1) for value in mask):
        raise ValueError(f"{PADDING} has a value other than 0 and 1")
    ones = [at for at, value in enumerate(mask) if value]
    begin, end = (ones[0], ones[-1] + 1) if ones else (0, 0)
    if len(ones) != end - begin:
        raise ValueError(f"{PADDING} has zeros between its ones: these tokens are not one sequence")
    return slice(begin, end)


def given_mask(columns: Mapping[str, object], ids: Sequence[int]) -> list[int] | None:
    """The loss mask of a row, 0 or 1 for each of its ids; None where none of its columns says anything."""
    masks = [_mask(name, columns[name], ids) for name in MASK_COLUMNS if columns.get(name) is not None]
    return [min(values) for values in zip(*masks, strict=True)] if masks else None


def _mask(name: str, value: object, ids: Sequence[int]) -> list[int]:
    values = flat(value)
    if values is None:
        raise ValueError(f"{len(ids)} token ids, but {name} is {value!r:.40}")
    if len(values) != len(ids):
        raise ValueError(f"{len(ids)} token ids, but {name} has {len(values)}")
    if name == "labels":
        for at, (label, token) in enumerate(zip(values, ids, strict=True)):
            if label not in (IGNORED, token):
                raise ValueError(
                    f"label {label} at token {at} is neither {IGNORED} nor the token's id {token}: moved by one?"
                )
        return [int(label != IGNORED) for label in values]
    if not all(value in (0, 1) for value in values):
        raise ValueError(f"{name} has values other than 0 and 1")
    return [int(value) for value in values]
