"""The two kinds of model everything else is made of."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

__all__ = ["FROM_WIRE", "RequestModel", "ResponseModel"]

# Validation context of values that came over the wire: there a null means "not given", because
# clients up to 0.16 write null for every argument their user passed as None.
FROM_WIRE: Final = {"from_wire": True}


class _WireModel(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        defer_build=True,  # validators are built at first use: most programs need few of them
        protected_namespaces=(),  # the protocol has model_id, model_name, model_path
        arbitrary_types_allowed=True,
        use_attribute_docstrings=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent_on_the_wire(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is FROM_WIRE and isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class RequestModel(_WireModel):
    """What a caller writes: a misspelt field is an error, not silence."""

    model_config = ConfigDict(extra="forbid")


class ResponseModel(_WireModel):
    """What the service writes: fields of a newer release are ignored."""

    model_config = ConfigDict(extra="ignore")
