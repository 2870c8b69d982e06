"""What the capture asks of a model, whether it runs in this process or is a server: requests in, outcomes out."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Request(NamedTuple):
    """One row for the model.

    Attributes:
        row_id: What the request is called, so that its record names the row.
        token_ids: The prompt.
        max_tokens: How many to sample; 1 for a row that is only read, as vLLM samples at least one.
        record: What its request record is to say (``format.request_log.client_fields``).
        place: Its file and line, for messages.
        nbytes: The most that its chunks can add to what is on disk.
    """

    row_id: str
    token_ids: list[int]
    max_tokens: int
    record: dict[str, Any]
    place: str
    nbytes: int

    @property
    def transfer_params(self) -> dict[str, Any]:
        """vLLM's ``kv_transfer_params`` of the request."""
        return {"hidden_states_record": self.record} if self.record else {}


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
        request: The request.
        tokens: Tokens of prompt and answer.
        problem: Why it failed, None if it did not.
        transfer: The reply's ``kv_transfer_params``.
    """

    request: Request
    tokens: int
    problem: str | None = None
    transfer: dict[str, Any] | None = None


class Backend(Protocol):
    """A model with the connector. Not thread-safe."""

    max_model_len: int

    @property
    def running(self) -> int:
        """Requests that have not ended."""

    @property
    def room(self) -> int:
        """How many more requests it takes now."""

    def submit(self, request: Request) -> None:
        """Give it a request. Raises CaptureError when the model is gone."""

    def wait(self) -> list[Outcome]:
        """What has ended, after waiting a moment for something to end. Raises CaptureError when the model is gone."""

    def close(self) -> None:
        """End in good order: rows on their way to the disk get there."""

    def abandon(self) -> None:
        """End within a second and a half, whatever is under way."""
