"""Invalid requests, generated from the OpenAPI document or by damaging valid bodies; reproducible by a seed."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import zstandard

from tests.server.api import training_request
from tinkex._wire import tinkex_pb2 as pb

__all__ = ["Ask", "FromDocument", "bodies_of_passes", "damaged"]

Schema = Mapping[str, Any]
_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, 10**30)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e308, -1e308, 1e-9, 3.4e39)
_TEXTS = (
    *(
        "",
        " ",
        "a",
        "x" * 300,
        "ü🐟",
        "\0",
        "\ud800",
        "../../etc/passwd",
        "..",
        ".",
        "a/b",
        "%2e%2e%2f",
        "%00",
    ),
    *(
        "' OR 1=1 --",
        "tinker://",
        "tinker://a/weights/b",
        "2024-01-01T00:00:00Z",
        "9999-12-31T23:59:59-23:59",
    ),
    *("null", "-1", "NaN", "𝕏" * 80, "\r\nx-api-key: no", "tinkex/tiny", "cross_entropy", "{}"),
)


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class FromDocument:
    """Generates requests that mostly follow an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._schemas = document["components"]["schemas"]
        self._operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        self.chance = random.Random(seed)
        #: Existing ids and paths by kind: with a valid id, a request gets past the first checks.
        self.known: dict[str, list[str]] = {}
        self._plausible: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(
                (
                    "max_tokens",
                    "num_samples",
                    "topk_prompt_logprobs",
                    "topk_sample_logprobs",
                    "seq_id",
                ),
                lambda: self.chance.choice((0, 1, 2, 3, 5, -1)),
            ),
            **dict.fromkeys(
                (
                    "session_id",
                    "model_id",
                    "training_run_id",
                    "sampling_session_id",
                    "sampler_id",
                    "request_id",
                ),
                lambda: self._id(),
            ),
            **dict.fromkeys(
                ("path", "model_path", "source_path", "tinker_path"), lambda: self._id("path")
            ),
            "checkpoint_name": lambda: self._id("name"),
            "base_model": lambda: self.chance.choice(("tinkex/tiny", "nobody/knows")),
            "dtype": lambda: self.chance.choice(("int64", "float32")),
            "tokens": lambda: [self.chance.randrange(300) for _ in range(self.chance.randrange(6))],
            "rank": lambda: self.chance.choice((1, 2, 4, 8, 0, 513)),
            "timeout": lambda: self.chance.choice((0, 0.01, None, -1)),
        }

    def remember(self, kind: str, value: str) -> None:
        values = self.known.setdefault(kind, [])
        if value not in values:
            values.append(value)
            del values[: len(values) - 500 : 1]

    def _id(self, kind: str = "id") -> str:
        known = self.known.get(kind)
        return self.chance.choice(known) if known and self._mostly() else self._text()

    def _mostly(self, share: float = 0.85) -> bool:
        return self.chance.random() < share

    def _text(self) -> str:
        return self.chance.choice(_TEXTS)

    # -- values --------------------------------------------------------------------------------

    def value(self, schema: Schema, name: str = "", depth: int = 0) -> Any:
        """A value that fits a schema; sometimes one that does not."""
        if not self._mostly(0.96):
            return self.chance.choice(
                (None, True, [], {}, "", 0, -1, 1.5, self._text(), [[]], {"": None})
            )
        if name in self._plausible and self._mostly(0.9):
            return self._plausible[name]()
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], name, depth)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                options = schema[choice]
                if depth > 6:
                    options = [each for each in options if each.get("type") == "null"] or options[
                        :1
                    ]
                return self.value(self.chance.choice(options), name, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.chance.choice(schema["enum"])
        return self._typed(schema, name, depth)

    def _typed(self, schema: Schema, name: str, depth: int) -> Any:
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            if "prefixItems" in schema:
                return [self.value(each, name, depth + 1) for each in schema["prefixItems"]]
            count = 0 if depth > 8 else self.chance.choice((0, 1, 1, 2, 3))
            return [self.value(schema.get("items", {}), name, depth + 1) for _ in range(count)]
        if kind == "integer":
            return (
                self.chance.choice(_NUMBERS) if not self._mostly(0.7) else self.chance.randrange(10)
            )
        if kind == "number":
            return self.chance.choice(_FLOATS + _NUMBERS)
        if kind == "boolean":
            return self.chance.random() < 0.5
        if kind == "null":
            return None
        return self._text()

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        made = {
            name: self.value(each, name, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if (self._mostly(0.97) if name in required else self._mostly(0.5) and depth < 8)
        }
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            for _ in range(self.chance.randrange(3)):
                name = self.chance.choice(("target_tokens", "weights", "logprobs", self._text()))
                made[name] = self.value(more, "", depth + 1)
        return made

    # -- requests ------------------------------------------------------------------------------

    def ask(self) -> Ask:
        method, path, operation = self.chance.choice(self._operations)
        query = {}
        for parameter in operation.get("parameters", ()):
            name, schema = parameter["name"], parameter["schema"]
            if parameter["in"] == "path":
                made = str(self.value(schema, name))
                path = path.replace(
                    f"{{{name}}}", quote(made.encode("utf-8", "replace"), safe=self._safe()) or "-"
                )
            elif parameter["required"] or self._mostly(0.5):
                query[name] = str(self.value(schema, name)).encode("utf-8", "replace")
        if query:
            path += f"?{urlencode(query)}"
        if "requestBody" not in operation:
            return Ask(method, path)
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = _json(self.value(schema))
        headers = {"content-type": "application/json"}
        if not self._mostly(0.9):
            body = damaged(body, self.chance)
        if not self._mostly(0.9):
            body, headers = _disguised(body, headers, self.chance)
        return Ask(method, path, body, headers)

    def _safe(self) -> str:
        return self.chance.choice(("", ":", ":/", ":/%."))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "replace")


def _disguised(
    body: bytes, headers: dict[str, str], chance: random.Random
) -> tuple[bytes, dict[str, str]]:
    """Compress the body, or declare a wrong encoding or content type."""
    name, pack = chance.choice(
        (
            ("zstd", zstandard.ZstdCompressor().compress),
            ("gzip", gzip.compress),
            ("deflate", zlib.compress),
            ("br", bytes),
            ("identity", bytes),
            ("gzip, zstd", gzip.compress),
        )
    )
    packed = pack(body)
    if chance.random() < 0.5:
        packed = damaged(packed, chance)
    kind = chance.choice(
        ("application/json", "application/x-protobuf", "text/plain", "", "x" * 200)
    )
    return packed, {**headers, "content-encoding": name, "content-type": kind}


# -- damage --------------------------------------------------------------------------------------


def damaged(body: bytes, chance: random.Random) -> bytes:
    """Apply one or more random changes to a body."""
    made = bytearray(body)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(made) + 1)
        what = chance.randrange(7)
        if what == 0 and made:
            made[at % len(made)] ^= 1 << chance.randrange(8)
        elif what == 1:
            del made[at:]
        elif what == 2:
            made[at:at] = chance.randbytes(chance.randrange(1, 12))
        elif what == 3:
            del made[at : at + chance.randrange(1, 20)]
        elif what == 4:
            made[at:at] = made[chance.randrange(len(made) + 1) :][:64]
        elif what == 5:
            made[at:at] = b"\xff" * 9 + b"\x01"  # the largest varint
        else:
            made[at:at] = chance.choice(
                (b"[" * 2000, b'{"a":' * 500, b"\0", b"NaN", b"1e999", b"\xf0\x28")
            )
    return bytes(made)


def bodies_of_passes(
    model_id: str, seq_id: int, chance: random.Random
) -> tuple[bytes, dict[str, str]]:
    """A protobuf training request: valid or with random fields, maybe damaged, maybe compressed."""
    if chance.random() < 0.5:
        body = training_request(model_id, seq_id)
    else:
        message = pb.ForwardBackwardRequest()
        message.model_id = (
            model_id if chance.random() < 0.97 else chance.choice(("", "a:train:0", model_id[:-1]))
        )
        message.seq_id = seq_id
        _fill(message, chance, 0)
        body = message.SerializeToString()
    if chance.random() < 0.6:
        body = damaged(body, chance)
    headers = {"content-type": "application/x-protobuf"}
    packing = chance.random()
    if packing < 0.5:
        headers["content-encoding"] = "zstd"
        body = zstandard.ZstdCompressor(write_content_size=packing < 0.25).compress(body)
        if packing < 0.2 or packing > 0.4:
            body = damaged(body, chance)
    return body, headers


def _fill(message: Any, chance: random.Random, depth: int) -> None:
    """Fill fields with random values of their types."""
    for described in message.DESCRIPTOR.fields:
        if described.name in {"model_id", "seq_id"} or chance.random() < (
            0.25 if depth < 2 else 0.5
        ):
            continue
        repeated = described.is_repeated
        if described.message_type is not None and described.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, described.name), described.message_type, chance, depth)
        elif described.message_type is not None:
            if depth < 7:
                for _ in range(chance.randrange(1, 3) if repeated else 1):
                    part = getattr(message, described.name)
                    part = part.add() if repeated else part
                    part.SetInParent()
                    _fill(part, chance, depth + 1)
        elif repeated:
            getattr(message, described.name).extend(
                _scalar(described, chance) for _ in range(chance.randrange(4))
            )
        else:
            setattr(message, described.name, _scalar(described, chance))


def _fill_map(target: Any, entry: Any, chance: random.Random, depth: int) -> None:
    value = entry.fields_by_name["value"]
    for _ in range(chance.randrange(3)):
        key = chance.choice(
            ("target_tokens", "weights", "logprobs", "advantages", "beta", "loss_id", "")
        )
        if value.message_type is not None:
            target[key].SetInParent()
            _fill(target[key], chance, depth + 1)
        else:
            target[key] = _scalar(value, chance)


def _scalar(described: Any, chance: random.Random) -> Any:
    kind = described.cpp_type
    if kind == described.CPPTYPE_STRING:
        if described.type == described.TYPE_BYTES:
            return chance.choice(
                (
                    b"",
                    b"\1\0\0\0",
                    b"\1\0\0\0\2\0\0\0\3\0\0\0",
                    b"\0\0\x80?" * 3,
                    chance.randbytes(chance.randrange(40)),
                )
            )
        return chance.choice(
            (
                "cross_entropy",
                "ppo",
                "importance_sampling",
                "custom",
                "",
                "int64",
                "float32",
                "ü",
                "x" * 100,
            )
        )
    if kind == described.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in {described.CPPTYPE_DOUBLE, described.CPPTYPE_FLOAT}:
        return chance.choice((0.0, 1.0, -1.0, 1e30, float("nan"), float("inf"), 1e-30))
    if kind == described.CPPTYPE_ENUM:
        return chance.choice([*(each.number for each in described.enum_type.values), 77])
    limits = {
        described.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        described.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        described.CPPTYPE_UINT32: (0, 2**32 - 1),
        described.CPPTYPE_UINT64: (0, 2**64 - 1),
    }
    low, high = limits[kind]
    return chance.choice((0, 1, 2, 3, 3, 3, max(low, -1), low, high))
