"""Reading the events of a streamed sample: tokens, the end of each sequence, and what goes wrong."""

from __future__ import annotations

from tinkex._wire.failures import failure_from_body
from tinkex._wire.sse import ServerSentEvent
from tinkex.errors import APIConnectionError, APIResponseValidationError
from tinkex.types import SampleStreamChunk

__all__ = ["SampleEvents"]


class SampleEvents:
    """What one stream has brought so far; it is complete when each of its sequences has a finish reason."""

    def __init__(self, num_samples: int) -> None:
        self.tokens = 0
        self._unfinished = set(range(num_samples))

    def read(self, event: ServerSentEvent) -> SampleStreamChunk | None:
        """The chunk in an event; None if it only keeps the connection awake. An error that was sent is raised."""
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
        """Raise if the stream ended before its sequences did, so that half an answer never passes for a whole one."""
        if self._unfinished:
            raise APIConnectionError(
                message=f"The stream ended after {self.tokens} tokens, before the sample was finished; "
                "what has come of it is incomplete."
            )
