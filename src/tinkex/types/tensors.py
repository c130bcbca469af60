"""Tensors on the wire: `int64` or `float32`, dense or as compressed sparse rows, stored as numpy arrays.

torch is imported only by the conversions that need it.
"""

from __future__ import annotations

import struct
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from pydantic_core import core_schema

from tinkex._lazy import np
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import torch
    from pydantic import GetCoreSchemaHandler

__all__ = [
    "PromptAltTokens",
    "TensorData",
    "TensorDtype",
    "TopkLogprobs",
    "check_precision_loss",
    "dtype_of",
]

TensorDtype: TypeAlias = Literal["int64", "float32"]
Array: TypeAlias = "npt.NDArray[Any]"

_PACK_CODES: Final = {"int32": "i", "int64": "q", "float32": "f"}

#: The logprob of an empty top-k cell.
EMPTY_LOGPROB: Final = -99999.0


@cache
def numpy_dtype(name: Literal["int32", "int64", "float32"]) -> np.dtype[Any]:
    return np.dtype(name)


@cache
def _pack_code(dtype: np.dtype[Any]) -> str:
    return _PACK_CODES[dtype.name]


def check_precision_loss(dtype: npt.DTypeLike) -> tuple[TensorDtype, str] | None:
    """The loss that a conversion from `dtype` may cause: `(target, reason)`, or None."""
    kind = np.dtype(dtype)
    if kind.kind == "f" and kind.itemsize > 4:
        return "float32", f"{kind.name} is narrowed to float32: precision loss"
    if kind.kind == "u" and kind.itemsize == 8:
        return "int64", "uint64 is read as int64: values from 2**63 overflow"
    return None


def dtype_of(dtype: npt.DTypeLike, *, quiet: bool = True) -> TensorDtype:
    """The wire dtype of a numpy dtype; with `quiet=False` it warns about a loss of precision."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        wire: TensorDtype = "float32"
    elif kind.kind in "iu":
        wire = "int64"
    else:
        raise InvalidInputError(
            f"unsupported dtype {kind.name}; use a floating or integer type", field="dtype"
        )
    if not quiet and (loss := check_precision_loss(kind)):
        warnings.warn(loss[1], stacklevel=2)
    return wire


def packed(values: Any, dtype: np.dtype[Any], *, field: str) -> Array:
    """Return `values` as an array of `dtype`, with as little copying as possible.

    A flat list goes through `struct`: it is twice as fast as numpy here and, unlike numpy, refuses to truncate a
    float to an integer.
    """
    if isinstance(values, np.ndarray):
        return _converted(values, dtype, field)
    if not isinstance(values, list | tuple):
        if hasattr(values, "__array__"):
            return _converted(_viewed(values, field), dtype, field)
        values = _listed(values, field)
    try:
        raw = struct.pack(f"={len(values)}{_pack_code(dtype)}", *values)
    except (struct.error, TypeError, OverflowError):
        return _converted(_nested(values, field), dtype, field)
    return np.frombuffer(raw, dtype)


def _viewed(values: Any, field: str) -> Array:
    """The array inside an object of another library, such as a torch tensor."""
    try:
        return np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"cannot be read as an array: {error}", field=field) from error


def _listed(values: Any, field: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise InvalidInputError(
            f"expected numbers, got {type(values).__name__}: {values!r:.80}", field=field
        )
    return list(values)


def _nested(values: Sequence[Any], field: str) -> Array:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(
            "ragged nesting: all rows must have the same length", field=field
        ) from error
    if array.dtype.kind not in "fiub":
        odd = next((value for value in _flat(values) if not isinstance(value, int | float)), None)
        if odd is None and array.dtype.kind == "O" and None not in _flat(values):
            raise InvalidInputError("an integer does not fit in 64 bits", field=field)
        raise InvalidInputError(f"expected numbers, got {odd!r:.80}", field=field)
    return array


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _converted(array: Array, dtype: np.dtype[Any], field: str) -> Array:
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "fiub":
        raise InvalidInputError(f"unsupported dtype {array.dtype.name}", field=field)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrowed: Array = array.astype(dtype)
        lost = np.isinf(narrowed)
        if lost.any() and not np.isinf(array[lost]).all():
            raise InvalidInputError(f"a number does not fit in {dtype.name}", field=field)
        return narrowed
    if array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
        raise InvalidInputError(f"expected integers, got {array.dtype.name} values", field=field)
    if array.size and array.dtype.kind != "b":
        low, high = array.min().item(), array.max().item()  # Python compares 2.0**63 exactly
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise InvalidInputError(
                f"value {low if low < limits.min else high} does not fit in {dtype.name}",
                field=field,
            )
    return array.astype(dtype)


class TensorData:
    """A tensor of the protocol.

    `data` may be a flat or rectangular list, or a numpy array. An array whose dtype already fits is kept without
    copying; do not write to it afterwards. With `sparse_crow_indices` and `sparse_col_indices`, `data` has the
    stored values of a two-dimensional tensor in compressed sparse rows.
    """

    __slots__ = ("_col", "_crow", "_values", "dtype", "shape")

    dtype: TensorDtype
    shape: list[int] | None
    _values: Array
    _crow: Array | None
    _col: Array | None

    def __init__(
        self,
        data: Any = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | Array | None = None,
        sparse_col_indices: Sequence[int] | Array | None = None,
    ) -> None:
        if data is None:
            raise InvalidInputError("is required", field="data")
        if dtype is None:
            if hasattr(data, "__array__"):
                data = _viewed(data, "data")
            else:
                data = _nested(_listed(data, "data"), "data")
            dtype = dtype_of(data.dtype) if data.size else "float32"
        elif dtype not in get_args(TensorDtype):
            raise InvalidInputError(f"must be int64 or float32, not {dtype!r}", field="dtype")
        values = packed(data, numpy_dtype(dtype), field="data")
        self.dtype = dtype
        self.shape = _checked_shape(shape)
        self._crow = self._col = None
        if sparse_crow_indices is None and sparse_col_indices is None:
            self._values = self._dense(values)
        else:
            self._values = values.reshape(-1)
            self._sparse(sparse_crow_indices, sparse_col_indices)

    def _dense(self, values: Array) -> Array:
        if self.shape is None:
            if values.ndim != 1:  # on the wire the numbers are one flat list
                self.shape = list(values.shape)
            return values
        if prod(self.shape) != values.size:
            raise InvalidInputError(
                f"{self.shape} needs {prod(self.shape)} values, data has {values.size}",
                field="shape",
            )
        try:
            return values.reshape(self.shape)
        except ValueError as error:  # too many dimensions, or one is too large for an array
            raise InvalidInputError(f"{self.shape!r:.80} {error}", field="shape") from error

    def _sparse(self, crow: Any, col: Any) -> None:
        if crow is None or col is None:
            missing = "sparse_crow_indices" if crow is None else "sparse_col_indices"
            raise InvalidInputError("is required for a sparse tensor", field=missing)
        if self.shape is None or len(self.shape) != 2:
            raise InvalidInputError("a sparse tensor has two dimensions", field="shape")
        crow = packed(crow, numpy_dtype("int64"), field="sparse_crow_indices").reshape(-1)
        col = packed(col, numpy_dtype("int64"), field="sparse_col_indices").reshape(-1)
        rows, columns = self.shape
        if (
            crow.size != rows + 1
            or crow[0] != 0
            or crow[-1] != self._values.size
            or np.any(np.diff(crow) < 0)
        ):
            raise InvalidInputError(
                f"must increase from 0 to {self._values.size} in {rows + 1} entries",
                field="sparse_crow_indices",
            )
        if col.size != self._values.size:
            raise InvalidInputError(
                f"has {col.size} entries for {self._values.size} values",
                field="sparse_col_indices",
            )
        if col.size and (col.min() < 0 or col.max() >= columns):
            raise InvalidInputError(f"must lie in [0, {columns})", field="sparse_col_indices")
        self._crow, self._col = crow, col

    # -- contents ----------------------------------------------------------------------------

    @property
    def is_sparse(self) -> bool:
        return self._crow is not None

    @property
    def values(self) -> Array:
        """The stored numbers: the dense array, or the stored values of a sparse one."""
        return self._values

    @property
    def data(self) -> list[Any]:
        """The stored numbers as one flat list."""
        flat: list[Any] = self._values.reshape(-1).tolist()
        return flat

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        return None if self._crow is None else self._crow.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        return None if self._col is None else self._col.tolist()

    @property
    def indices(self) -> tuple[Array, Array] | None:
        """Row pointers and column numbers of a sparse tensor, without copying."""
        if self._crow is None or self._col is None:
            return None
        return self._crow, self._col

    def __len__(self) -> int:
        if self.shape is not None:
            return self.shape[0] if self.shape else 1
        return self._values.shape[0] if self._values.ndim else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and self.sparse_crow_indices == other.sparse_crow_indices
            and self.sparse_col_indices == other.sparse_col_indices
            and np.array_equal(self._values, other._values, equal_nan=self.dtype == "float32")
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        layout = ", sparse" if self.is_sparse else ""
        preview = np.array2string(
            self._values.reshape(-1), threshold=6, edgeitems=2, separator=", "
        )
        return f"TensorData({preview}, dtype={self.dtype!r}, shape={self.shape}{layout})"

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self._values, self.dtype, self.shape, self._crow, self._col)
        return TensorData, args

    # -- conversions -------------------------------------------------------------------------

    @classmethod
    def from_numpy(cls, array: Array) -> TensorData:
        """Wrap an array: floating types become `float32`, integers `int64`; others are refused."""
        array = np.asarray(array)
        dtype = dtype_of(array.dtype)
        return cls(packed(array, numpy_dtype(dtype), field="data"), dtype, array.shape)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Wrap a tensor: floating types (bfloat16 too) become `float32`, all others `int64`."""
        import torch

        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        wide = torch.float32 if tensor.is_floating_point() else torch.int64
        return cls.from_numpy(tensor.to(device="cpu", dtype=wide).numpy())

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> TensorData:
        """Wrap a tensor; a two-dimensional one is stored without `pad_value` if that makes it smaller."""
        dense = cls.from_torch(tensor)
        if tensor.dim() != 2:
            return dense
        rows, columns = dense._values.shape
        row_of, column_of = np.nonzero(dense._values != pad_value)
        if (rows + 1) + 2 * row_of.size >= rows * columns:
            return dense
        crow = np.zeros(rows + 1, np.int64)
        np.cumsum(np.bincount(row_of, minlength=rows), out=crow[1:])
        values = dense._values[row_of, column_of]
        return cls(values, dense.dtype, [rows, columns], crow, column_of.astype(np.int64))

    def to_numpy(self, pad_value: int = 0) -> Array:
        """The dense array; missing cells of a sparse tensor become `pad_value`."""
        if self._crow is None or self._col is None or self.shape is None:
            return self._values
        dense = np.full(self.shape, pad_value, self._values.dtype)
        row_of = np.repeat(np.arange(self.shape[0]), np.diff(self._crow))
        dense[row_of, self._col] = self._values
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """The dense tensor, as a writable copy."""
        import torch

        return torch.from_numpy(self.to_numpy(pad_value).copy())

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """The dense numbers nested by shape."""
        nested: list[Any] = self.to_numpy(pad_value).tolist()
        return nested

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _from_object,
            serialization=core_schema.plain_serializer_function_ser_schema(tensor_to_object),
        )


def _from_object(value: Any) -> TensorData:
    return value if isinstance(value, TensorData) else tensor_from_object(value)


def tensor_from_object(value: Mapping[str, Any], *, field: str = "tensor") -> TensorData:
    """Read a tensor from its JSON form; null means NaN, which JSON does not have."""
    if not isinstance(value, dict) or "data" not in value:
        raise InvalidInputError(
            f"expected an object with data and dtype, got {value!r:.80}", field=field
        )
    data, dtype = value["data"], value.get("dtype")
    if dtype == "float32" and isinstance(data, list) and None in data:
        data = [float("nan") if number is None else number for number in data]
    try:
        return TensorData(
            data,
            dtype,
            value.get("shape"),
            value.get("sparse_crow_indices"),
            value.get("sparse_col_indices"),
        )
    except InvalidInputError as error:
        raise InvalidInputError(str(error), field=field) from error


def tensor_to_object(tensor: TensorData) -> dict[str, Any]:
    """Write a tensor in its JSON form, without fields that are not set."""
    written: dict[str, Any] = {"data": tensor.data, "dtype": tensor.dtype}
    if tensor.shape is not None:
        written["shape"] = tensor.shape
    if tensor.is_sparse:
        written["sparse_crow_indices"] = tensor.sparse_crow_indices
        written["sparse_col_indices"] = tensor.sparse_col_indices
    return written


def _checked_shape(shape: Sequence[int] | None) -> list[int] | None:
    if shape is None:
        return None
    if isinstance(shape, str | Mapping) or not hasattr(shape, "__iter__"):
        raise InvalidInputError(f"must be a list of sizes, not {shape!r:.80}", field="shape")
    sizes = list(shape)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
            raise InvalidInputError(
                f"must be a list of sizes of 0 or more, not {sizes!r:.80}", field="shape"
            )
    return [int(size) for size in sizes]


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """The k most likely tokens at each position, as two matrices of shape `(length, k)`.

    A cell without a token has id 0 and logprob -99999.
    """

    token_ids: Array
    logprobs: Array

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """The `(token, logprob)` pairs of each position, or None where nothing was computed."""
        rows: list[list[tuple[int, float]] | None] = []
        for ids, logprobs in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            row = [pair for pair in zip(ids, logprobs, strict=True) if pair[1] != EMPTY_LOGPROB]
            rows.append(row or None)
        return rows

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[Any] | None], *, field: str = "topk_logprobs"
    ) -> TopkLogprobs:
        """Build the matrices from rows of `[token, logprob]` pairs or `{token_id, logprob}`."""
        if not isinstance(rows, list | tuple) or not all(
            isinstance(row, list | tuple | None) for row in rows
        ):
            raise InvalidInputError(
                f"expected a list of rows, each a list or None, got {rows!r:.80}", field=field
            )
        pairs = [[_topk_pair(cell, field) for cell in row or ()] for row in rows]
        k = max(map(len, pairs), default=0)
        token_ids = np.zeros((len(pairs), k), np.int32)
        logprobs = np.full((len(pairs), k), EMPTY_LOGPROB, np.float32)
        for position, row in enumerate(pairs):
            for rank, (token, logprob) in enumerate(row):
                token_ids[position, rank] = token
                logprobs[position, rank] = logprob
        return cls(token_ids, logprobs)


def _topk_pair(cell: Any, field: str) -> tuple[np.int32, float]:
    try:
        token, logprob = (cell["token_id"], cell["logprob"]) if isinstance(cell, dict) else cell
        return np.int32(int(token)), float(logprob)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"expected a [token, logprob] pair, got {cell!r:.80}", field=field
        ) from error


@dataclass(slots=True)
class PromptAltTokens:
    """Alternative tokens for each prompt position and their logprobs, `[len(prompt) - 1, k]`."""

    tokens: TensorData
    logprobs: TensorData


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError(
        "tinkex sends tensors as the bytes they have in memory and needs a little-endian CPU"
    )
