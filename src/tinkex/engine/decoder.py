"""Running a model one token at a time, for many sequences at once.

`LeanDecoder` is for models of the Llama family: it calls the matrix products itself, with the projections that
read the same input fused, and keeps keys and values in one tensor per layer. `PlainDecoder` is for every other
model: transformers' own forward, one sequence at a time.

Shapes: B sequences in the batch, T positions, D hidden, H query heads, G key-value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .lora import Adapter, LoraLinear
from .trainer import LanguageModel

__all__ = ["Decoder", "Rows", "decoder_for"]

_FAMILY: Final = frozenset({"llama", "qwen2", "qwen3", "mistral"})
_GROW: Final = 64


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch speak with which adapter; None is the base model."""

    adapter: Adapter | None
    rows: Tensor | None  # None: all of them


class Decoder(Protocol):
    """Keeps the state of sequences in slots 0 … B-1; the caller decides which sequence is where."""

    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Tensor], adapter: Adapter | None
    ) -> list[Tensor]:
        """Read prompts into slots; the hidden states of each prompt."""

    def step(self, tokens_B: Tensor, lengths_B: Tensor, groups: Sequence[Rows]) -> Tensor:
        """Read one token in each of the first B slots; the logits after it."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make one slot's state another's."""


def decoder_for(base: LanguageModel) -> Decoder:
    if base.config.model_type in _FAMILY and not getattr(base.config, "sliding_window", None):
        return LeanDecoder(base)
    return PlainDecoder(base)


class _Projection:
    """Several linear layers that read the same input, as one product; adapters are applied per layer."""

    def __init__(self, layers: Mapping[str, LoraLinear]) -> None:
        self._names = list(layers)
        parts = list(layers.values())
        self._sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.data for part in parts])
        biases = [part.bias for part in parts]
        self.bias = None if biases[0] is None else torch.cat([bias.data for bias in biases])  # type: ignore[union-attr]
        # The layers become views of the fused weight, so that the model is in memory once.
        for part, weight in zip(parts, torch.split(self.weight, self._sizes), strict=True):
            part.base.weight.data = weight
        self._fused: dict[int, tuple[Adapter, Tensor, Tensor] | None] = {}

    def __call__(self, x: Tensor, groups: Sequence[Rows]) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        for group in groups:
            if group.adapter is None:
                continue
            factors = self._factors(group.adapter)
            if factors is None:
                continue
            a, b = factors
            if group.rows is None:
                y += functional.linear(functional.linear(x, a), b)
            else:
                rows = x.index_select(0, group.rows)
                y.index_add_(0, group.rows, functional.linear(functional.linear(rows, a), b))
        return y

    def _factors(self, adapter: Adapter) -> tuple[Tensor, Tensor] | None:
        """The adapter's pairs for these layers as one pair: A stacked, B block-diagonal and scaled."""
        known = self._fused.get(id(adapter))
        if known is None and id(adapter) not in self._fused:
            known = self._fused[id(adapter)] = self._fuse(adapter)
        return None if known is None else known[1:]

    def _fuse(self, adapter: Adapter) -> tuple[Adapter, Tensor, Tensor] | None:
        pairs = [adapter.pairs.get(name) for name in self._names]
        present = [pair for pair in pairs if pair is not None]
        if not present:
            return None
        a = torch.cat([pair.a.detach() for pair in present])
        b = torch.zeros(sum(self._sizes), len(a), dtype=a.dtype, device=a.device)
        row = column = 0
        for size, pair in zip(self._sizes, pairs, strict=True):
            if pair is not None:
                rank = pair.a.shape[0]
                b[row : row + size, column : column + rank] = pair.b.detach() * adapter.scale
                column += rank
            row += size
        return adapter, a, b

    def forget(self, adapter: Adapter) -> None:
        self._fused.pop(id(adapter), None)


class _Layer:
    def __init__(self, name: str, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        prefix = f"{name}.self_attn"
        self.qkv = _Projection(
            {
                f"{prefix}.{part}": getattr(attention, part)
                for part in ("q_proj", "k_proj", "v_proj")
            }
        )
        self.out = _Projection({f"{prefix}.o_proj": attention.o_proj})
        self.gate_up = _Projection(
            {f"{name}.mlp.{part}": getattr(mlp, part) for part in ("gate_proj", "up_proj")}
        )
        self.down = _Projection({f"{name}.mlp.down_proj": mlp.down_proj})
        self.activation = mlp.act_fn
        self.norm1, self.eps1 = (
            module.input_layernorm.weight,
            module.input_layernorm.variance_epsilon,
        )
        after = module.post_attention_layernorm
        self.norm2, self.eps2 = after.weight, after.variance_epsilon
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.keys: Tensor
        self.values: Tensor

    @property
    def projections(self) -> tuple[_Projection, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class LeanDecoder:
    """The Llama family, with as little between the matrix products as can be."""

    def __init__(self, base: LanguageModel) -> None:
        config = base.config
        self._base = base
        self._body: Any = base.body
        prefix = base.model.base_model_prefix
        self._layers = [
            _Layer(f"{prefix}.layers.{index}", layer)
            for index, layer in enumerate(self._body.layers)
        ]
        self._heads: int = config.num_attention_heads
        self._groups: int = config.num_key_value_heads
        self._size: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._slots = self._capacity = 0
        self._norm: Any = self._body.norm

    # -- the cache ---------------------------------------------------------------------------

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many sequences of such a length."""
        if slots <= self._slots and length <= self._capacity:
            return
        wanted_slots = max(self._slots, slots)
        wanted = max(self._capacity, -(-length // _GROW) * _GROW)
        shape = (wanted_slots, self._groups, wanted, self._size)
        for layer in self._layers:
            keys = torch.zeros(shape, dtype=self._base.dtype, device=self._base.device)
            values = torch.zeros_like(keys)
            if self._slots:
                keys[: self._slots, :, : self._capacity] = layer.keys
                values[: self._slots, :, : self._capacity] = layer.values
            layer.keys, layer.values = keys, values
        self._slots, self._capacity = wanted_slots, wanted

    def release(self) -> None:
        """Give the memory back; no sequence is left."""
        self._slots = self._capacity = 0
        for layer in self._layers:
            layer.keys = layer.values = torch.empty(0)

    def copy(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def forget(self, adapter: Adapter) -> None:
        """Drop what was prepared for an adapter that is gone."""
        for layer in self._layers:
            for projection in layer.projections:
                projection.forget(adapter)

    # -- running -----------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Tensor], adapter: Adapter | None
    ) -> list[Tensor]:
        lengths = [len(prompt) for prompt in prompts]
        longest, count = max(lengths), len(prompts)
        self.reserve(max(slots) + 1, longest + 1)
        tokens_BT = torch.zeros(count, longest, dtype=torch.long, device=self._base.device)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
        x = self._body.embed_tokens(tokens_BT)
        cos, sin = self._rotation(x, torch.arange(longest, device=x.device)[None])
        groups = (Rows(adapter, None),)
        where = torch.tensor(list(slots), device=x.device)
        for layer in self._layers:
            q, k, v = self._attention_inputs(layer, x, groups, cos[:, None], sin[:, None])
            layer.keys[where, :, :longest] = k
            layer.values[where, :, :longest] = v
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = self._finish_layer(layer, x, mixed.transpose(1, 2).flatten(2), groups)
        hidden_BTD = self._norm(x)
        return [hidden_BTD[row, :length] for row, length in enumerate(lengths)]

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, lengths_B: Tensor, groups: Sequence[Rows]) -> Tensor:
        count, longest = len(tokens_B), int(lengths_B.max()) + 1
        self.reserve(count, longest)
        x = self._body.embed_tokens(tokens_B)
        cos, sin = self._rotation(x, lengths_B[:, None])
        beyond = torch.arange(longest, device=x.device)[None] > lengths_B[:, None]
        mask = torch.zeros(beyond.shape, dtype=x.dtype, device=x.device).masked_fill_(
            beyond, -torch.inf
        )
        mask = mask[:, None, None]
        rows = torch.arange(count, device=x.device)
        scale = self._size**-0.5
        for layer in self._layers:
            q, k, v = self._attention_inputs(layer, x[:, None], groups, cos[:, None], sin[:, None])
            layer.keys[rows, :, lengths_B] = k[:, :, 0]
            layer.values[rows, :, lengths_B] = v[:, :, 0]
            keys, values = layer.keys[:count, :, :longest], layer.values[:count, :, :longest]
            q = q.view(count, self._groups, -1, self._size) * scale
            weights = torch.matmul(q, keys.transpose(2, 3)).add_(mask).softmax(-1)
            mixed = torch.matmul(weights, values).view(count, -1)
            x = self._finish_layer(layer, x, mixed, groups)
        return self._logits(self._norm(x), groups)

    def _logits(self, hidden: Tensor, groups: Sequence[Rows]) -> Tensor:
        logits = self._base.logits(hidden)
        name = "lm_head"
        for group in groups:
            pair = None if group.adapter is None else group.adapter.pairs.get(name)
            if group.adapter is None or pair is None:
                continue
            rows = hidden if group.rows is None else hidden.index_select(0, group.rows)
            update = (
                functional.linear(functional.linear(rows, pair.a), pair.b) * group.adapter.scale
            )
            if group.rows is None:
                logits += update
            else:
                logits.index_add_(0, group.rows, update.float())
        return logits

    def prompt_logits(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        with torch.inference_mode():
            return self._logits(hidden, (Rows(adapter, None),))

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._body.rotary_emb(x, positions)
        return cos, sin

    def _attention_inputs(
        self, layer: _Layer, x: Tensor, groups: Sequence[Rows], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: B × heads × T × E."""
        batch, length = x.shape[0], x.shape[1]
        normed = _rms_norm(x, layer.norm1, layer.eps1)
        qkv = layer.qkv(normed.flatten(0, 1), _spread(groups, length)).view(
            batch, length, -1, self._size
        )
        q, k, v = torch.split(qkv, [self._heads, self._groups, self._groups], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.transpose(1, 2)

    def _finish_layer(
        self, layer: _Layer, x: Tensor, mixed: Tensor, groups: Sequence[Rows]
    ) -> Tensor:
        flat = mixed.view(-1, mixed.shape[-1])
        length = flat.shape[0] // x.shape[0]
        spread = _spread(groups, length)
        x = x + layer.out(flat, spread).view(x.shape)
        normed = _rms_norm(x, layer.norm2, layer.eps2).view(-1, x.shape[-1])
        gate, up = layer.gate_up(normed, spread).chunk(2, dim=-1)
        return x + layer.down(layer.activation(gate).mul_(up), spread).view(x.shape)


def _spread(groups: Sequence[Rows], length: int) -> Sequence[Rows]:
    """Rows of sequences as rows of their positions; only whole batches are longer than one position."""
    assert length == 1 or all(group.rows is None for group in groups)
    return groups


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class PlainDecoder:
    """Any model, through transformers' own forward and cache."""

    def __init__(self, base: LanguageModel) -> None:
        self._base = base
        self._caches: dict[int, Any] = {}

    def reserve(self, slots: int, length: int) -> None:
        """Caches grow by themselves."""

    def release(self) -> None:
        self._caches.clear()

    def forget(self, adapter: Adapter) -> None:
        """Nothing is prepared per adapter."""

    def copy(self, source: int, target: int, length: int) -> None:
        import copy

        self._caches[target] = copy.deepcopy(self._caches[source])

    @torch.inference_mode()
    def prefill(
        self, slots: Sequence[int], prompts: Sequence[Tensor], adapter: Adapter | None
    ) -> list[Tensor]:
        return [
            self._forward(slot, prompt[None], adapter, fresh=True)
            for slot, prompt in zip(slots, prompts, strict=True)
        ]

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, lengths_B: Tensor, groups: Sequence[Rows]) -> Tensor:
        logits: list[Tensor] = [torch.empty(0)] * len(tokens_B)
        for group in groups:
            rows = range(len(tokens_B)) if group.rows is None else group.rows.tolist()
            for row in rows:
                hidden = self._forward(row, tokens_B[row][None, None], group.adapter, fresh=False)
                logits[row] = self.prompt_logits(hidden, group.adapter)[0]
        return torch.stack(logits)

    def prompt_logits(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        with torch.inference_mode():
            return self._with(adapter, lambda: self._base.logits(hidden))

    def _forward(
        self, slot: int, tokens: Tensor, adapter: Adapter | None, *, fresh: bool
    ) -> Tensor:
        from transformers import DynamicCache

        if fresh:
            self._caches[slot] = DynamicCache(config=self._base.config)
        cache = self._caches[slot]

        def run() -> Tensor:
            output = self._base.body(input_ids=tokens, past_key_values=cache, use_cache=True)
            states: Tensor = output.last_hidden_state[0]
            return states

        return self._with(adapter, run)

    def _with(self, adapter: Adapter | None, run: Any) -> Tensor:
        if adapter is None:
            result: Tensor = run()
            return result
        with adapter.switched_on(self._base.layers):
            switched: Tensor = run()
            return switched
