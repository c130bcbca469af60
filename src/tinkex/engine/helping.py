"""One pass computed by several engines: the model's home sends its adapter, helpers send sums of gradients back."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from safetensors.torch import load, save

from .lora import Adapter
from .parcels import Depot, Parcel, PublishedAdapter
from .shards import Block, ShardSums
from .trainer import Gradients, LanguageModel, TrainedModel

__all__ = ["Helping"]

#: Adapters of other engines' models that a helper keeps in memory.
_KEPT: Final = 4


class Helping:
    """What an engine exchanges with the others of its pool."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._helped: OrderedDict[str, TrainedModel] = OrderedDict()
        self._published: dict[str, PublishedAdapter] = {}

    # -- adapters ----------------------------------------------------------------------------

    def publish(self, model_id: str, base_model: str, model: TrainedModel) -> PublishedAdapter:
        """Put a model's adapter into the depot under a name made of its content, for one pass."""
        tensors = {
            f"{name}.{factor}": tensor.cpu().contiguous()
            for name, pair in model.adapter.named_tensors().items()
            for factor, tensor in zip("ab", pair, strict=True)
        }
        data = save(tensors)
        name = hashlib.sha256(data).hexdigest()
        self.retract(model_id)
        # Each time another place: two models with equal weights are dropped at different times.
        parcel = replace(self._depot.put(f"{name}-{secrets.token_hex(4)}", data), name=name)
        self._published[model_id] = PublishedAdapter(parcel, base_model, model.adapter.spec)
        return self._published[model_id]

    def retract(self, model_id: str) -> None:
        """Drop the adapter that was published for a pass: the pass is over, or its home computes all of it."""
        before = self._published.pop(model_id, None)
        if before is not None:
            self._depot.drop(before.parcel)

    def helped(self, base: LanguageModel, adapter: PublishedAdapter) -> TrainedModel:
        """The adapter of a model that lives on another engine."""
        name = adapter.parcel.name
        if name not in self._helped:
            tensors = load(self._depot.get(adapter.parcel))
            # In the order of a new adapter, as on the model's home.
            pairs = {
                layer: (tensors[f"{layer}.a"], tensors[f"{layer}.b"])
                for layer in base.layers
                if f"{layer}.a" in tensors
            }
            of_tensors = Adapter.of_tensors(adapter.spec, pairs, base.device)
            self._helped[name] = TrainedModel(base, of_tensors)
        self._helped.move_to_end(name)
        while len(self._helped) > _KEPT:
            self._helped.popitem(last=False)
        return self._helped[name]

    # -- gradients ---------------------------------------------------------------------------

    def packed(self, sums: ShardSums[Gradients]) -> ShardSums[Parcel]:
        """Sums whose gradients are in the depot."""
        blocks: list[Block[Parcel]] = []
        try:
            for block in sums.blocks:
                put = self._put(block.total)
                blocks.append(Block(block.start, block.size, put))
        except OSError:  # there is room for some of them only, and nobody reads a part
            for kept in blocks:
                self._depot.drop(kept.total)
            raise
        return ShardSums(sums.losses, sums.logprobs, blocks, sums.metrics)

    def unpacked(self, model: TrainedModel, sums: ShardSums[Parcel]) -> ShardSums[Gradients]:
        """Sums as tensors on the model's device; their parcels are dropped."""
        blocks = [
            Block(block.start, block.size, self._take(model, block.total)) for block in sums.blocks
        ]
        return ShardSums(sums.losses, sums.logprobs, blocks, sums.metrics)

    def _put(self, gradients: Gradients) -> Parcel:
        tensors = {
            str(number): gradient.cpu().contiguous()
            for number, gradient in enumerate(gradients)
            if gradient is not None
        }
        return self._depot.put(f"gradients-{secrets.token_hex(16)}", save(tensors))

    def _take(self, model: TrainedModel, parcel: Parcel) -> Gradients:
        tensors = load(self._depot.get(parcel))
        self._depot.drop(parcel)
        numbers = range(len(model.optimizer.parameters))
        return [
            tensors[str(number)].to(model.base.device) if str(number) in tensors else None
            for number in numbers
        ]
