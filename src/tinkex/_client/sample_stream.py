"""Reads the events of a streamed sample: tokens, the end of each sequence, and errors."""

from __future__ import annotations

from tinkex._wire.failures import failure_from_body
from tinkex._wire.sse import ServerSentEvent
from tinkex.errors import APIConnectionError, APIResponseValidationError
from tinkex.types import SampleStreamChunk

__all__ = ["SampleEvents"]


class SampleEvents:
    """The state of one stream. It is complete when every sequence has a finish reason."""

    def __init__(self, num_samples: int) -> None:
        self.tokens = 0
        self._unfinished = set(range(num_samples))

    def read(self, event: ServerSentEvent) -> SampleStreamChunk | None:
        """The chunk in an event; None for a keep-alive. Raises an error that the service sends as an event."""
        if not event.data:
            return None
        body = event.json()
        if not isinstance(body, dict):
            raise APIResponseValidationError(
                body=event.data[:2000],
                message=f"The stream sent {event.data[:80]!r}, not an object.",
            )
        if body.get("error") is not None:
            raise failure_from_body(body, None)
        chunk = SampleStreamChunk(
            token=body.get("token") or "",
            token_id=body.get("token_id"),
            index=body.get("index") or 0,
            finish_reason=body.get("finish_reason"),
            total_tokens=body.get("total_tokens"),
            logprob=body.get("logprob"),
        )
        if chunk.done:
            self._unfinished.discard(chunk.index)
        else:
            self.tokens += 1
        return chunk

    def check_complete(self) -> None:
        """Raise if the stream ended before all sequences did, so that no partial answer is taken for a complete one."""
        if self._unfinished:
            raise APIConnectionError(
                message=f"The stream ended after {self.tokens} tokens, before the sample was finished; "
                "the text received so far is incomplete."
            )
