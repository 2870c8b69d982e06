"""What can go wrong with a dataset as a whole, and with a single row of it."""

from __future__ import annotations


class DatasetError(Exception):
    """The dataset that was asked for cannot be made. One line for the user: what, and what to do."""


class NothingThere(DatasetError):
    """The cold paths have no row of what was asked for; some may come."""


class RowRejected(Exception):
    """A row fails a check. ``reason`` is one of REASONS; the text says what was found where."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Unreachable(RowRejected):
    """A chunk of the row is in a bucket that does not answer, or refuses: the row may be read later."""

    def __init__(self, detail: str) -> None:
        super().__init__("unreadable", detail)


#: Why a row that was planned is not in the dataset.
REASONS = {
    "gone": "a chunk of the row was deleted while the extraction ran",
    "bad_file": "a chunk file of the row is damaged",
    "unreadable": "the system refused to read a chunk file of the row",
    "layer": "a layer is no longer in a chunk of the row",
    "row": "the row of the prepared dataset has no list of token ids",
    "ids": "the token ids do not have the prefix digest, or are not those of the dataset's row",
    "shape": "the hidden size differs between layers or chunks of the row",
    "dtype": "the dtype of a layer differs between chunks of the row",
    "non_finite": "a value is NaN or infinite",
    "norm": "the last layer is not before (or not after) the final norm, as it was said to be",
    "mask": "the loss mask does not have one value 0 or 1 for each token",
    "no_loss": "the loss mask is 0 everywhere",
}
