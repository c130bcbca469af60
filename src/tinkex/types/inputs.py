"""Model inputs: chunks, `ModelInput`, and the `Datum` on which a loss is computed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    PlainSerializer,
    PlainValidator,
    Tag,
)

from tinkex._lazy import np
from tinkex.errors import InvalidInputError

from ._base import RequestModel
from .tensors import Array, TensorData, numpy_dtype, packed

__all__ = [
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LossFnInputs",
    "LossFnOutput",
    "ModelInput",
    "ModelInputChunk",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "SampledProvenanceSpan",
]

LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]


def _token_list(tokens: Array) -> list[int]:
    listed: list[int] = tokens.tolist()
    return listed


def _token_array(tokens: Any) -> Array:
    array = packed(tokens, numpy_dtype("int32"), field="tokens")
    if array.ndim != 1:
        raise InvalidInputError(
            f"must be one flat list, not {array.ndim}-dimensional", field="tokens"
        )
    return array


class _ArrayAsList:
    """Shows a numpy-backed field as the list that users of the protocol expect.

    pydantic reads and writes fields in the instance's `__dict__`; attribute access goes through this
    descriptor, which caches the list.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cache = f"_{name}_as_list"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError(self.name)  # a pydantic field is not an attribute of its class
        stored = instance.__dict__
        if self.cache not in stored:
            stored[self.cache] = stored[self.name].tolist()
        return stored[self.cache]

    def __set__(
        self, instance: Any, value: Any
    ) -> None:  # gives the descriptor priority over __dict__
        raise AttributeError(f"{self.name} cannot be changed")


class EncodedTextChunk(RequestModel):
    """A sequence of token ids."""

    tokens: Annotated[Sequence[int], PlainValidator(_token_array), PlainSerializer(_token_list)]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def tokens_np(self) -> Array:
        """The ids as int32, without copying."""
        array: Array = self.__dict__["tokens"]
        return array

    @property
    def length(self) -> int:
        return len(self.__dict__["tokens"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedTextChunk):
            return NotImplemented
        return np.array_equal(self.tokens_np, other.tokens_np)

    __hash__ = None  # type: ignore[assignment]

    def __repr_args__(self) -> Any:
        yield "tokens", self.tokens
        yield "type", self.type

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        fields = {name: state["__dict__"][name] for name in type(self).model_fields}
        return state | {"__dict__": fields}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        kept = {"tokens": self.tokens_np, "type": self.type}
        return type(self)(**kept | dict(update or {}))


EncodedTextChunk.tokens = _ArrayAsList("tokens")  # type: ignore[assignment]


def text_chunk(tokens: Array) -> EncodedTextChunk:
    """A chunk from an int32 array that needs no checks."""
    return EncodedTextChunk.model_construct(tokens=cast("Sequence[int]", tokens))


def _bytes_or_base64(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise InvalidInputError(f"is not base64: {error}") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidInputError(f"expected bytes or base64 text, got {type(value).__name__}")


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


Base64Bytes: TypeAlias = Annotated[
    bytes, BeforeValidator(_bytes_or_base64), PlainSerializer(_to_base64, return_type=str)
]


def _not_negative(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise InvalidInputError("must be 0 or more")
    return value


ExpectedTokens: TypeAlias = Annotated[int | None, AfterValidator(_not_negative)]
ImageFormat: TypeAlias = Literal["png", "jpeg"]


def _stated_length(expected_tokens: int | None) -> int:
    if expected_tokens is None:
        raise InvalidInputError("is required for the length of an image", field="expected_tokens")
    return expected_tokens


class ImageChunk(RequestModel):
    """An image in the prompt; in JSON the file is base64."""

    data: Base64Bytes
    format: ImageFormat
    expected_tokens: ExpectedTokens = None
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        return _stated_length(self.expected_tokens)


class ImageAssetPointerChunk(RequestModel):
    """An image that the service already has."""

    format: ImageFormat
    location: str
    expected_tokens: ExpectedTokens = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _stated_length(self.expected_tokens)


class DmelChunk(RequestModel):
    """Audio as discretised mel frames, in the service's container format."""

    dmel: Base64Bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The first dimension, read from the container's header."""
        return _dmel_frames(self.dmel)


_CONSTANT_TENSOR_MARK: Final = 254


def _dmel_frames(container: bytes) -> int:
    position = 1 if container[:1] == bytes([_CONSTANT_TENSOR_MARK]) else 0
    position += 1  # the dtype byte
    dimensions, position = _varint(container, position)
    if dimensions == 0:
        return 0
    frames, _ = _varint(container, position)
    return frames


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise InvalidInputError("the header is incomplete", field="dmel")


_KEY_OF_KIND: Final = {
    "tokens": "encoded_text",
    "location": "image_asset_pointer",
    "data": "image",
    "dmel": "dmel",
}


def _chunk_kind(value: Any) -> str | None:
    """The kind of a chunk; clients up to 0.16 do not send it, so it is inferred from the keys."""
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    if named := value.get("type"):
        return str(named)
    return next((kind for key, kind in _KEY_OF_KIND.items() if key in value), None)


ModelInputChunk: TypeAlias = Annotated[
    Annotated[EncodedTextChunk, Tag("encoded_text")]
    | Annotated[ImageAssetPointerChunk, Tag("image_asset_pointer")]
    | Annotated[ImageChunk, Tag("image")]
    | Annotated[DmelChunk, Tag("dmel")],
    Discriminator(_chunk_kind),
]


def _tokenizer_of(model_name: str | None) -> Any:
    if not isinstance(model_name, str) or not model_name:
        raise InvalidInputError(
            "give a tokenizer, a training_client or the name of a model", field="model_name"
        )
    # Imported by name: these types are shared with the service and must not depend on the client.
    tokenizers = import_module("tinkex._client.tokenizers")
    return tokenizers.load_tokenizer(tokenizers.tokenizer_id(model_name))


class ModelInput(RequestModel):
    """A sequence of chunks; immutable, so it can be shared between requests and threads."""

    chunks: list[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | Array) -> ModelInput:
        """One text chunk from token ids; an int32 array is kept without copying."""
        return cls.model_construct(chunks=[text_chunk(_token_array(tokens))])

    @classmethod
    def from_text(
        cls,
        text: str,
        tokenizer: Any = None,
        *,
        model_name: str | None = None,
        training_client: Any = None,
    ) -> ModelInput:
        """Encode `text` without a chat template, with the given tokenizer or that of a model."""
        if not isinstance(text, str):
            raise InvalidInputError(f"expected str, got {type(text).__name__}", field="text")
        if isinstance(tokenizer, str):
            raise InvalidInputError("is text; name a model with model_name=…", field="tokenizer")
        if tokenizer is None and training_client is not None:
            tokenizer = training_client.get_tokenizer()
        if tokenizer is None:
            tokenizer = _tokenizer_of(model_name)
        return cls.from_ints(tokenizer.encode(text))

    @classmethod
    def empty(cls) -> ModelInput:
        return cls.model_construct(chunks=[])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """Add one token, to the last chunk if it is text."""
        tail = _token_array([token])
        last = self.chunks[-1] if self.chunks else None
        if isinstance(last, EncodedTextChunk):
            longer = EncodedTextChunk(tokens=np.concatenate([last.tokens_np, tail]))
            return ModelInput(chunks=[*self.chunks[:-1], longer])
        return ModelInput(chunks=[*self.chunks, EncodedTextChunk(tokens=tail)])

    def to_ints(self) -> list[int]:
        ints: list[int] = self.to_numpy().tolist()
        return ints

    def to_numpy(self) -> Array:
        """All token ids as one int32 array; an error if a chunk is not text."""
        parts = [self._text(chunk).tokens_np for chunk in self.chunks]
        return (
            parts[0]
            if len(parts) == 1
            else np.concatenate(parts or [np.empty(0, numpy_dtype("int32"))])
        )

    @staticmethod
    def _text(chunk: ModelInputChunk) -> EncodedTextChunk:
        if isinstance(chunk, EncodedTextChunk):
            return chunk
        raise InvalidInputError(f"a chunk of type {chunk.type} has no token ids", field="chunks")

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProvenanceSpan:
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise InvalidInputError(
                f"must be a non-empty string, not {self.sequence_id!r:.80}", field="sequence_id"
            )
        for name in ("offset", "length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInputError(
                    f"must be an integer of 0 or more, not {value!r:.80}", field=name
                )


class PromptProvenanceSpan(_ProvenanceSpan):
    """Positions that were part of the prompt of a sampled sequence."""

    __slots__ = ()


class SampledProvenanceSpan(_ProvenanceSpan):
    """Positions that were sampled."""

    __slots__ = ()


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]

# A list has no dtype; the protocol defines it by name.
_DTYPE_OF_KEY: Final[dict[str, Literal["int64", "float32"]]] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
# Wide teacher targets are mostly padding, and only these two may be sent sparse.
_MAY_BE_SPARSE: Final = frozenset({"target_tokens", "weights"})


@dataclass
class Datum:
    """One training example: the input and the tensors its loss reads.

    Values of `loss_fn_inputs` may be lists, numpy arrays or torch tensors; they become `TensorData`.
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    if TYPE_CHECKING:  # the constructor accepts more types than the fields have

        def __init__(
            self,
            model_input: ModelInput,
            loss_fn_inputs: Mapping[str, Any] = ...,
            model_input_spans: ProvenanceSpans | None = None,
            loss_fn_input_spans: ProvenanceSpans | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.model_input, ModelInput):
            raise InvalidInputError(
                f"expected ModelInput, got {type(self.model_input).__name__}", field="model_input"
            )
        if not isinstance(self.loss_fn_inputs, Mapping):
            raise InvalidInputError(
                f"expected a mapping, got {type(self.loss_fn_inputs).__name__}",
                field="loss_fn_inputs",
            )
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise InvalidInputError(
                "model_input_spans and loss_fn_input_spans must be given together", field="spans"
            )
        self.loss_fn_inputs = {
            key: value if isinstance(value, TensorData) else _loss_tensor(key, value)
            for key, value in self.loss_fn_inputs.items()
        }

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Datum:
        """A copy with the sampled sequences from which its positions come."""
        return replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)


def _loss_tensor(key: str, value: Any) -> TensorData:
    where = f"loss_fn_inputs.{key}"
    try:
        if isinstance(value, np.ndarray):
            return TensorData.from_numpy(value)
        if _is_torch(value):
            if key in _MAY_BE_SPARSE and value.dim() == 2:
                return TensorData.from_torch_sparse(value)
            return TensorData.from_torch(value)
        if isinstance(value, list | tuple) and key in _DTYPE_OF_KEY:
            return _listed_tensor(value, _DTYPE_OF_KEY[key])
    except InvalidInputError as error:
        raise InvalidInputError(str(error), field=where) from error
    raise InvalidInputError(
        f"expected a numpy array, torch tensor or TensorData, got {type(value).__name__} "
        f"(lists are accepted for {', '.join(_DTYPE_OF_KEY)})",
        field=where,
    )


def _listed_tensor(values: Sequence[Any], dtype: Literal["int64", "float32"]) -> TensorData:
    array = packed(values, np.dtype(dtype), field="data")
    return TensorData(array, dtype, array.shape)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")
