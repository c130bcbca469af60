"""Base of the recorded dialects of other servers: routes by pattern, futures, FastAPI's 422 answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, ClassVar

from tinkex import types
from tinkex._wire import proto_codec
from tinkex._wire.media_types import PROTOBUF

from ..scripted import Answer, Reply, Request, ScriptedServer

Handler = Callable[..., Reply]


class Dialect(ScriptedServer):
    """A scripted server that answers like another implementation of the protocol.

    `routes` maps `"POST /api/v1/asample"` to the name of a method. `{x}` matches one path segment, `{x:path}` any number
    of them. A test may script single routes with `on`, as with every scripted server.
    """

    routes: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._scripts.clear()
        self._numbers = count(1)
        self._results: dict[str, Callable[[Request], Answer]] = {}
        self._patterns = [(_pattern(route), name) for route, name in self.routes.items()]

    def reply_to(self, request: Request) -> Reply:
        scripted = self._route(request) in self._scripts
        reply = super().reply_to(request)  # also records the request
        return reply if scripted else self._answered(request)

    def _answered(self, request: Request) -> Reply:
        asked = f"{request.method} {request.path}"
        for pattern, name in self._patterns:
            if match := pattern.fullmatch(asked):
                handler: Handler = getattr(self, name)
                return handler(request, **match.groupdict())
        path = request.path.replace("\\", "/")
        if any(
            pattern.fullmatch(f"{other} {path}")
            for pattern, _ in self._patterns
            for other in _METHODS
        ):
            return Answer({"detail": "Method Not Allowed"}, 405)
        return Answer({"detail": "Not Found"}, 404)

    # -- futures -----------------------------------------------------------------------------

    def later(self, answer: Callable[[Request], Answer] | Answer) -> str:
        """Store the result of a request; returns the id to poll."""
        number = str(next(self._numbers))
        self._results[number] = (lambda _: answer) if isinstance(answer, Answer) else answer
        return number

    def retrieve_future(self, request: Request) -> Answer:
        found = self._results.get(request.json["request_id"])
        return Answer({"detail": "Future not found"}, 404) if found is None else found(request)


_METHODS = ("GET", "POST", "PUT", "DELETE")


def _pattern(route: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)(:path)?\}", route)
    text = re.escape(parts[0])
    for name, many, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if many else '[^/]+'}){re.escape(rest)}"
    return re.compile(text)


def invalid(*complaints: tuple[str, str, str]) -> Answer:
    """FastAPI's 422 answer, with type, field and message of each error."""
    detail = [
        {"type": kind, "loc": ["body", field], "msg": message}
        for kind, field, message in complaints
    ]
    return Answer({"detail": detail}, 422)


def refused_fields(
    body: Mapping[str, Any], required: Iterable[str], known: Iterable[str]
) -> Answer | None:
    """The 422 of a model that forbids unknown fields, or None if `body` fits it."""
    missing = [("missing", name, "Field required") for name in required if name not in body]
    extra = [
        ("extra_forbidden", name, "Extra inputs are not permitted")
        for name in body
        if name not in known
    ]
    return invalid(*missing, *extra) if missing or extra else None


def sampled_answer(response: types.SampleResponse) -> Callable[[Request], Answer]:
    def answer(request: Request) -> Answer:
        assert PROTOBUF in request.headers["accept"]
        return Answer(proto_codec.encode_sample_response(response), content_type=PROTOBUF)

    return answer


def pass_answer(output: types.ForwardBackwardOutput) -> Callable[[Request], Answer]:
    def answer(request: Request) -> Answer:
        assert PROTOBUF in request.headers["accept"]
        return Answer(proto_codec.encode_forward_backward_output(output), content_type=PROTOBUF)

    return answer
