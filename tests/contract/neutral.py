"""Values as plain JSON, so that two packages in two processes can exchange them.

Imported by the tests and, in the environment of an official client, by `official_side.py`: it may need only numpy.
"""

import base64
import dataclasses
import enum
import math
from typing import Any

import numpy as np


def build(description: Any, types: Any) -> Any:
    """Build the described value with the classes in `types`.

    `{"$": name, ...}` is an instance of a class, `$ints` a ModelInput of token ids, `$array` a numpy
    array with its dtype, `$bytes` base64.
    """
    if isinstance(description, list):
        return [build(item, types) for item in description]
    if not isinstance(description, dict):
        return description
    if "$ints" in description:
        return types.ModelInput.from_ints(description["$ints"])
    if "$array" in description:
        return np.array(description["$array"], description["dtype"])
    if "$bytes" in description:
        return base64.b64decode(description["$bytes"])
    fields = {name: build(value, types) for name, value in description.items() if name != "$"}
    return getattr(types, description["$"])(**fields) if "$" in description else fields


# Some releases store these values under other names; the names here exist in all releases.
_PUBLIC_NAMES = {
    "TensorData": ("dtype", "shape", "data", "sparse_crow_indices", "sparse_col_indices"),
    "SampledSequence": ("stop_reason", "tokens", "logprobs", "topk_logprobs"),
    "SampleResponse": (
        "sequences",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "target_prompt_logprobs",
        "prompt_cache_hit_tokens",
        "prompt_alt_tokens",
    ),
}


def plain(value: Any) -> Any:
    """Any value as plain JSON. None values are left out."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    if names := _names(value):
        return plain({name: getattr(value, name, None) for name in names})
    return value


def _names(value: Any) -> tuple[str, ...]:
    kind = type(value)
    if kind.__name__ in _PUBLIC_NAMES:
        return _PUBLIC_NAMES[kind.__name__]
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return (*getattr(kind, "model_fields", ()), *(getattr(value, "model_extra", None) or ()))
