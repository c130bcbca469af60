"""Read a model of the Llama family from its files, without transformers: its import alone takes several seconds.

The network has the module names of transformers' classes, so adapters and checkpoints name the same layers, but no
forward pass: `llama_train` and the decoder run it. A model with anything that is not known here, such as another kind
of rotary embedding or an unknown tensor, is not read (`None`), and transformers loads it instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .base_models import PreparedModel

__all__ = ["read_llama"]

_FAMILIES: Final = frozenset({"llama", "qwen2", "qwen3", "mistral"})
_LINEAR: Final = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS: Final = ("q_norm", "k_norm")


def read_llama(
    model: PreparedModel, *, device: str, dtype: torch.dtype, keep_half: bool = False
) -> LlamaNetwork | None:
    """The frozen network of a prepared model; None if only transformers can load it.

    With `keep_half`, matrices that are bfloat16 in the files stay so, and products of `dtype` read them.
    """
    config = _config(model)
    if config is None:
        return None
    frequencies = _frequencies(config)
    if frequencies is None:
        return None
    tensors = _Tensors(model.directory, device, dtype, keep_half=keep_half)
    try:
        network = LlamaNetwork(config, tensors, frequencies.to(device), tied=model.tied_embeddings)
    except KeyError:
        return None  # transformers names the missing tensors
    return network if not tensors.unread else None


class _Tensors:
    """Tensors of the weight files by name; remembers which were not read."""

    def __init__(
        self, directory: Path, device: str, dtype: torch.dtype, *, keep_half: bool
    ) -> None:
        self._device, self._dtype = device, dtype
        self._files: dict[str, Any] = {}
        for path in _weight_files(directory):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        # Older files store the frequencies of the rotary embedding, which follow from the config.
        self.unread = {name for name in self._files if not name.endswith("rotary_emb.inv_freq")}
        self._keep_half = keep_half and self._are_half()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> nn.Parameter:
        tensor = self._files[name].get_tensor(name)
        kept = self._keep_half and tensor.dim() == 2
        self.unread.discard(name)
        tensor = tensor.to(device=self._device, dtype=None if kept else self._dtype)
        return nn.Parameter(tensor, requires_grad=False)

    def skip(self, name: str) -> None:
        self.unread.discard(name)

    def _are_half(self) -> bool:
        """Whether all matrices are bfloat16: some of them are fused, so they need one type."""
        found = (file.get_slice(name) for name, file in self._files.items())
        return all(part.get_dtype() == "BF16" for part in found if len(part.get_shape()) == 2)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    shards = json.loads(index.read_bytes())["weight_map"].values()
    return [directory / shard for shard in sorted(set(shards))]


class LlamaNetwork(nn.Module):
    """The modules of a Llama model, named as in transformers."""

    base_model_prefix = "model"

    def __init__(
        self, config: SimpleNamespace, tensors: _Tensors, frequencies: Tensor, *, tied: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config, tensors, frequencies)
        self.lm_head = _Linear(tensors, "model.embed_tokens" if tied else "lm_head")
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
            tensors.skip("lm_head.weight")
        _check_shapes(self, config)

    @property
    def dtype(self) -> torch.dtype:
        """The type of rows and products; matrices may be stored in a shorter one."""
        return self.model.norm.weight.dtype

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class _Body(nn.Module):
    def __init__(self, config: SimpleNamespace, tensors: _Tensors, frequencies: Tensor) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(tensors.take("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(
            _Layer(config, tensors, f"model.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.norm = _Norm(config, tensors, "model.norm")
        self.rotary_emb = _Rotary(frequencies)


class _Layer(nn.Module):
    def __init__(self, config: SimpleNamespace, tensors: _Tensors, prefix: str) -> None:
        super().__init__()
        for part, names in _LINEAR.items():
            block = nn.Module()
            for name in names:
                block.add_module(name, _Linear(tensors, f"{prefix}.{part}.{name}"))
            self.add_module(part, block)
        attention = self.get_submodule("self_attn")
        for name in _HEAD_NORMS:
            if f"{prefix}.self_attn.{name}.weight" in tensors:
                attention.add_module(name, _Norm(config, tensors, f"{prefix}.self_attn.{name}"))
        for name in _NORMS:
            self.add_module(name, _Norm(config, tensors, f"{prefix}.{name}"))


class _Linear(nn.Linear):
    """A linear layer whose tensors come from the files."""

    def __init__(self, tensors: _Tensors, name: str) -> None:
        nn.Module.__init__(self)
        self.weight = tensors.take(f"{name}.weight")
        self.out_features, self.in_features = self.weight.shape
        self.bias = tensors.take(f"{name}.bias") if f"{name}.bias" in tensors else None  # type: ignore[assignment]


class _Embedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class _Norm(nn.Module):
    def __init__(self, config: SimpleNamespace, tensors: _Tensors, name: str) -> None:
        super().__init__()
        self.weight = tensors.take(f"{name}.weight")
        self.variance_epsilon = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(
            x, self.weight.shape, self.weight.to(x.dtype), self.variance_epsilon
        )


class _Rotary(nn.Module):
    """Cosines and sines of positions, in float32."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self._frequencies = frequencies

    def forward(self, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions_BT[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _config(model: PreparedModel) -> SimpleNamespace | None:
    stated = json.loads((model.directory / "config.json").read_bytes())
    needed = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    if stated.get("model_type") not in _FAMILIES or not needed.issubset(stated):
        return None
    if stated.get("quantization_config") or stated.get("hidden_act", "silu") != "silu":
        return None
    heads = stated["num_attention_heads"]
    defaults = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": heads,
        "sliding_window": None,
    }
    config = SimpleNamespace(**(defaults | stated))
    if stated["model_type"] != "mistral" and not stated.get("use_sliding_window"):
        config.sliding_window = None
    if stated["model_type"] == "mistral" and "sliding_window" not in stated:
        return None  # the default of this family is a window
    config.head_dim = stated.get("head_dim") or config.hidden_size // heads
    return None if config.sliding_window else config


def _frequencies(config: SimpleNamespace) -> Tensor | None:
    """Radians per position of each pair of dimensions; None for a kind of rotary embedding that is not known here."""
    rope: Mapping[str, Any] = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None or getattr(config, "partial_rotary_factor", 1.0) != 1.0:
        return None
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies: Tensor = 1.0 / torch.pow(float(theta), steps)
    if kind == "default":
        return frequencies
    return _stretched(frequencies, rope) if kind == "llama3" else None


def _stretched(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3's frequencies: long wavelengths are divided by the factor, medium ones in part."""
    factor, old = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    part = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = (1 - part) * frequencies / factor + part * frequencies
    return stretched


def _check_shapes(network: LlamaNetwork, config: SimpleNamespace) -> None:
    """Raise KeyError if a tensor does not fit the config, so that transformers reports it."""
    hidden, size = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    inner = config.intermediate_size
    expected = {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, queries), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
        "down_proj": (hidden, inner), "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,), "norm": (hidden,), "q_norm": (size,), "k_norm": (size,),
    }  # fmt: skip
    for name, parameter in network.named_parameters():
        module, _, kind = name.rpartition(".")
        shape = expected[module.rpartition(".")[2]]
        if tuple(parameter.shape) != (shape if kind == "weight" else shape[:1]):
            raise KeyError(name)
