"""What the requests of both APIs share: reading a body, and refusing what is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tinkex._wire import json_codec
from tinkex.errors import DecodeError, InvalidInputError

__all__ = ["MAX_TOOLS", "ServingRequest", "check_schema", "read", "text_of"]

R = TypeVar("R", bound="ServingRequest")

#: Characters of a parameter's name in an error.
_LONGEST_NAME: Final = 100
#: Tools of one request, as OpenAI limits them: each has a schema to compile.
MAX_TOOLS: Final = 128


class ServingRequest(BaseModel):
    """A request of another API. A parameter that is not a field of its class is refused, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=False)


def read(kind: type[R], content: Any) -> R:
    """A request from its JSON; null is the same as leaving a parameter out."""
    if not isinstance(content, dict):
        raise DecodeError("must be a JSON object", field="body")
    given = {name: value for name, value in content.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        field, complaint = json_codec.first_complaint(error)
        if field is not None:
            field = field[:_LONGEST_NAME]  # a client may send a name of megabytes
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "extra_forbidden" and field is not None:
            near = get_close_matches(field, kind.model_fields, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            complaint = f"this service does not support this parameter{meant}"
        raise InvalidInputError(complaint, field=field) from None


def check_schema(schema: Any, field: str) -> dict[str, Any]:
    """An object; whether it is a schema that can be followed is tried later, by `GrammarTrials`."""
    if not isinstance(schema, dict):
        raise InvalidInputError("must be a JSON schema: an object", field=field)
    return schema


def text_of(content: Any, field: str, kinds: Mapping[str, str]) -> str:
    """The text of a message: a string, or parts of which every one is text.

    `kinds` are the accepted types of parts and the key of each part's text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInputError("must be a string or a list of parts", field=field)
    texts = []
    for place, part in enumerate(content):
        where = f"{field}.{place}"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise InvalidInputError(
                f"is a part of type {kind!r:.60}; the models of this service read only text",
                field=where,
            )
        text = part.get(kinds[kind])
        if not isinstance(text, str):
            raise InvalidInputError("must be a string", field=f"{where}.{kinds[kind]}")
        texts.append(text)
    return "".join(texts)
