"""Runs in the environment of an official client. It reads one JSON question per line and writes one JSON answer per line."""

import base64
import importlib
import inspect
import json
import sys
import traceback
from typing import Any

from neutral import build, plain  # type: ignore[import-not-found]  # beside this file when it runs

answers, sys.stdout = sys.stdout, sys.stderr  # prints of the package must not mix with the answers

tinker = importlib.import_module("tinker")
types = importlib.import_module("tinker.types")


def _class(name: str) -> Any:
    """Find a class of the package; not every release lists all of them in `tinker.types`."""
    if found := getattr(types, name, None):
        return found
    module = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return getattr(importlib.import_module(f"tinker.types.{module.lstrip('_')}"), name)


class _Types:
    def __getattr__(self, name: str) -> Any:
        return _class(name)


def version() -> Any:
    return tinker.__version__


def plain_value(description: Any) -> Any:
    return plain(build(description, _Types()))


def encode_json(description: Any, unset: bool) -> Any:
    """The body that this release sends: until 0.16 all fields that were set, later all that are not None."""
    value = build(description, _Types())
    if unset:
        return value.model_dump(exclude_unset=True, mode="json")
    return value.model_dump(exclude_none=True, mode="json")


def decode_json(name: str, body: Any) -> Any:
    kind = _class(name)
    if hasattr(kind, "model_validate"):
        return plain(kind.model_validate(body))
    convert = importlib.import_module("tinker.lib._pydantic_conv")
    return plain(convert.deserialize_json_response(body, kind))


def _request_message(description: Any, forward_only: bool) -> Any:
    convert = importlib.import_module("tinker.proto.request_conv")
    message = convert.forward_backward_request_to_proto(build(description, _Types()))
    message.forward_only = forward_only
    return message


def encode_request(description: Any, forward_only: bool) -> Any:
    return _to_text(_request_message(description, forward_only).SerializeToString())


def same_request(description: Any, forward_only: bool, data: str) -> Any:
    """Two requests as text: the one that this package would send, and the one that it reads from `data`."""
    expected = _request_message(description, forward_only)
    found = type(expected)()
    found.ParseFromString(base64.b64decode(data))
    return [str(expected), str(found)]


def encode_result(name: str, message: Any) -> Any:
    """A result message in protobuf JSON form, serialised with this package's schema."""
    schema = importlib.import_module("tinker.proto.tinker_public_pb2")
    json_format = importlib.import_module("google.protobuf.json_format")
    written = json_format.ParseDict(message, getattr(schema, name)())
    return _to_text(written.SerializeToString())


def decode_result(name: str, data: str) -> Any:
    convert = importlib.import_module("tinker.proto.response_conv")
    return plain(convert.deserialize_proto_response(base64.b64decode(data), _class(name)))


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


QUESTIONS = {
    name: answer
    for name, answer in list(globals().items())
    if inspect.isfunction(answer) and answer.__module__ == __name__ and not name.startswith("_")
}

if __name__ == "__main__":
    for line in sys.stdin:
        question, *arguments = json.loads(line)
        try:
            reply = {"value": QUESTIONS[question](*arguments)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=answers, flush=True)
