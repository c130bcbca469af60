"""The two base classes of the protocol's models."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic._internal._model_construction import ModelMetaclass

from tinkex.errors import InvalidInputError

__all__ = ["FROM_WIRE", "RequestModel", "ResponseModel", "first_complaint"]

# Validation context of values that came over the wire: there a null means "not given", because
# clients up to 0.16 write null for every argument that their user passed as None.
FROM_WIRE: Final = {"from_wire": True}


def first_complaint(error: ValidationError) -> tuple[str | None, str]:
    """The field and the message of pydantic's first error; never the value, which may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])) or None, first["msg"].removeprefix("Value error, ")


class _RefusesBadValues(ModelMetaclass):
    """Raises InvalidInputError if a caller's value is not valid.

    Only direct calls of the class come through here. Decoding from the wire does not and keeps pydantic's error.
    A custom `__init__` would not work: pydantic also calls it when it decodes.
    """

    def __call__(self, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            field, complaint = first_complaint(error)
            known: list[str] = list(getattr(self, "model_fields", ()))
            if field in fields and field not in known:
                near = get_close_matches(field, known, n=1)
                meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
                complaint = f"is not a field of {self.__name__}; {meant}"
            raise InvalidInputError(complaint, field=field) from error


# Only pydantic's own metaclass tells type checkers that the fields of a class are its arguments.
if TYPE_CHECKING:
    _OfRequests = ModelMetaclass
else:
    _OfRequests = _RefusesBadValues


class _WireModel(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        defer_build=True,  # validators are built on first use: most programs need few of them
        protected_namespaces=(),  # the protocol has model_id, model_name, model_path
        arbitrary_types_allowed=True,
        use_attribute_docstrings=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent_on_the_wire(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is FROM_WIRE and isinstance(data, dict) and None in data.values():
            return {name: value for name, value in data.items() if value is not None}
        return data


class RequestModel(_WireModel, metaclass=_OfRequests):
    """Written by a caller: a misspelt field is an error."""

    model_config = ConfigDict(extra="forbid")


class ResponseModel(_WireModel):
    """Written by the service: fields of a newer release are ignored."""

    model_config = ConfigDict(extra="ignore")
