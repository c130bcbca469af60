"""Merges an adapter into its base model: the result needs neither PEFT nor this package.

Nearly always the base model's files contain the adapted layers by name. Then the files are copied tensor by tensor
and only adapted tensors are computed, so memory is that of the largest tensor. Otherwise transformers and PEFT load
the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.base_models import PreparedModel
    from tinkex.engine.checkpoint import LoadedCheckpoint

__all__ = ["merge", "merge_loaded"]

_CHUNK: Final = 16 << 20
_INDEX: Final = "model.safetensors.index.json"
_HEAD: Final = "lm_head"
#: Names of input embeddings; an adapted unembedding that shares them gets its own copy.
_EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
#: Files of a model that are not weights.
_KEPT: Final = ("*.json", "*.model", "*.txt", "*.jinja")

#: Called with the bytes written so far, and those of the whole model.
OnWritten = Callable[[int, int | None], None]


def merge(
    adapter: Path,
    base: PreparedModel,
    target: Path,
    progress: OnWritten = lambda _done, _total: None,
) -> None:
    """Write `base` with the adapter merged in to the empty directory `target`."""
    from tinkex.engine import checkpoint

    saved = checkpoint.load(adapter)
    plan = _plan(base.directory, saved)
    if plan is None:
        merge_loaded(adapter, base, target)
        return
    _copy_the_rest(base.directory, target)
    if plan.untied:
        _edit(target / "config.json", {"tie_word_embeddings": False})
    total = sum(part.size for parts in plan.files.values() for part in parts)
    done = 0
    for name, parts in plan.files.items():
        for written in _write_file(base.directory / name, target / name, parts, saved):
            done += written
            progress(done, total)
    if len(plan.files) > 1 or (base.directory / _INDEX).is_file():
        weights = {part.name: name for name, parts in plan.files.items() for part in parts}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (target / _INDEX).write_text(json.dumps(index, indent=2))


def merge_loaded(adapter: Path, base: PreparedModel, target: Path) -> None:
    """The same with transformers and PEFT, and all weights in memory."""
    import peft
    import torch

    from tinkex.engine import base_models, checkpoint

    adapted = checkpoint.load(adapter).tensors
    model: Any = base_models.load(base, device="cpu", dtype=_dtype(base))
    if base.tied_embeddings and _HEAD in adapted:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(str(target))
    written = {file.name for file in target.iterdir()}
    _copy_the_rest(base.directory, target, but=written)


def _dtype(base: PreparedModel) -> Any:
    import torch

    config = json.loads((base.directory / "config.json").read_bytes())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, str(name), torch.float32)


# -- planning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A tensor of a file: the position of its bytes, and the adapted layer, if any."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    layer: str | None = None


@dataclass(frozen=True)
class _Plan:
    files: Mapping[str, list[_Part]]
    untied: bool


def _plan(directory: Path, saved: LoadedCheckpoint) -> _Plan | None:
    """The tensors of each new file; None if the files lack an adapted layer."""
    index = directory / _INDEX
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    weights = {f"{layer}.weight": layer for layer in saved.tensors}
    files = {name: list(_parts(directory / name, weights)) for name in names}
    found = {part.layer for parts in files.values() for part in parts if part.layer}
    missing = saved.tensors.keys() - found
    untied = missing == {_HEAD}
    if untied and not _add_head(files):
        return None
    fits = all(_fits(part, saved) for parts in files.values() for part in parts)
    return _Plan(files, untied) if fits and (untied or not missing) else None


def _parts(file: Path, weights: Mapping[str, str]) -> Iterator[_Part]:
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    for name, facts in header.items():
        if name != "__metadata__":
            start, end = facts["data_offsets"]
            where = 8 + length + start
            shape = tuple(facts["shape"])
            yield _Part(name, facts["dtype"], shape, where, end - start, weights.get(name))


def _add_head(files: Mapping[str, list[_Part]]) -> bool:
    """Add a separate tensor for an unembedding that shares the embeddings; False if that is not possible."""
    shared = [
        (parts, part)
        for parts in files.values()
        for part in parts
        if part.name.endswith(_EMBEDDINGS)
    ]
    if len(shared) != 1:
        return False
    parts, part = shared[0]
    parts.append(
        _Part(f"{_HEAD}.weight", part.dtype, part.shape, part.start, part.size, layer=_HEAD)
    )
    return True


def _fits(part: _Part, saved: LoadedCheckpoint) -> bool:
    if part.layer is None:
        return True
    a, b = saved.tensors[part.layer]
    return part.shape == (b.shape[0], a.shape[1]) and part.dtype in {"F32", "F16", "BF16", "F64"}


# -- writing ----------------------------------------------------------------------------------------


def _write_file(
    source: Path, target: Path, parts: list[_Part], saved: LoadedCheckpoint
) -> Iterator[int]:
    """Write a file of tensors; yields the bytes of each piece."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in parts:
        offsets = [position, position + part.size]
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}
        position += part.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    with ExitStack() as stack:
        reader = stack.enter_context(source.open("rb"))
        writer = stack.enter_context(target.open("wb"))
        writer.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            reader.seek(part.start)
            if part.layer is None:
                yield from _copy(reader, writer, part.size)
            else:
                writer.write(_updated(reader.read(part.size), part, saved))
                yield part.size


def _copy(reader: BinaryIO, writer: BinaryIO, size: int) -> Iterator[int]:
    while size:
        piece = reader.read(min(size, _CHUNK))
        if not piece:
            raise InvalidInputError("a file of the base model is shorter than its header says")
        writer.write(piece)
        size -= len(piece)
        yield len(piece)


def _updated(data: bytes, part: _Part, saved: LoadedCheckpoint) -> bytes:
    import torch

    assert part.layer is not None
    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
    weight = torch.frombuffer(bytearray(data), dtype=dtypes[part.dtype]).reshape(part.shape)
    a, b = saved.tensors[part.layer]
    scale = saved.spec.alpha / saved.spec.rank
    exact = torch.promote_types(weight.dtype, torch.float32)
    merged: Tensor = weight.to(exact) + scale * (b.to(exact) @ a.to(exact))
    return merged.to(weight.dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _copy_the_rest(
    source: Path, target: Path, but: set[str] | frozenset[str] = frozenset()
) -> None:
    """Copy configuration, tokenizer and chat template."""
    for pattern in _KEPT:
        for file in source.glob(pattern):
            if file.name != _INDEX and file.name not in but:
                shutil.copyfile(file, target / file.name)


def _edit(file: Path, changes: Mapping[str, Any]) -> None:
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps({**content, **changes}, indent=2))
