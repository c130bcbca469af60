"""Regularizers without a service: how to write, combine, compute and measure terms, and how errors appear.

python examples/regularizers_tour.py

Everything here works the same in `forward_backward_custom(…, regularizers=[…])`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import torch

from _shared import parsed
from tinkex.regularizers import (
    L1,
    L2,
    CustomLossError,
    Entropy,
    KLDivergence,
    Pipeline,
    RegularizerSpec,
    grad_norm,
)
from tinkex.telemetry import attach, detach
from tinkex.telemetry.events import RegularizerStop

LOGPROBS = torch.linspace(-3, 3, 8).log_softmax(-1).requires_grad_()
UNIFORM = torch.zeros(8).log_softmax(-1)


def base_loss(data: Any, logprobs: Any) -> Any:
    return -logprobs.mean(), {"targets": logprobs.numel()}


async def slow_judge(data: Any, logprobs: Any) -> Any:
    """A term may be async: it can wait for a reward model, a disk or another service."""
    await asyncio.sleep(0.01)
    return logprobs.exp().square().sum(), {}


class Ceiling:
    """A term may be an object with options."""

    name = "ceiling"

    def compute(self, data: Any, logprobs: Any, options: Any) -> Any:
        return (logprobs.exp() - options["most"]).clamp(min=0).sum(), {"most": options["most"]}


TERMS: list[RegularizerSpec | dict[str, Any]] = [
    RegularizerSpec(L1(reduction="mean"), weight=0.1, name="l1"),
    RegularizerSpec(L2(target="probs"), weight=0.1, name="l2"),
    RegularizerSpec(Entropy(mode="maximize"), weight=0.01, name="entropy"),
    RegularizerSpec(KLDivergence(reference_logprobs=UNIFORM), weight=0.5, name="kl"),
    RegularizerSpec(slow_judge, weight=0.0, name="only measured", is_async=True),
    {"fn": Ceiling(), "weight": 0.2, "options": {"most": 0.5}},  # named by Ceiling.name
]


def main() -> None:
    parsed(__doc__)
    alone = Pipeline().compute([], LOGPROBS, base_loss)
    print(f"base loss alone: {alone.loss_total:.4f}")

    heard: list[str] = []
    number = attach(lambda event: heard.append(event.regularizer_name), RegularizerStop)
    output = Pipeline(TERMS, track_grad_norms=True).compute([], LOGPROBS, base_loss)
    detach(number)
    print(f"\n{'term':16}{'value':>10}{'weight':>8}{'adds':>10}{'gradient':>10}")
    for name, term in output.regularizers.items():
        print(
            f"{name:16}{term.value:10.4f}{term.weight:8.2f}"
            f"{term.contribution:10.4f}{term.grad_norm:10.4f}"
        )
    print(f"total {output.loss_total:.4f}, gradient {output.total_grad_norm:.4f}; events {heard}")
    assert abs(alone.loss_total + output.regularizer_total - output.loss_total) < 1e-5
    assert len(heard) == len(TERMS)

    # Serial instead of parallel: the same numbers.
    serial = Pipeline(TERMS, parallel=False).compute([], LOGPROBS, base_loss)
    assert abs(serial.loss_total - output.loss_total) < 1e-6

    # The norm of a gradient without a pipeline, and the result as JSON.
    by_hand = grad_norm(lambda logp: L1(reduction="mean").compute([], logp, {})[0], LOGPROBS)
    print(f"gradient of l1, without a pipeline: {by_hand:.4f}")
    print(f"as JSON: {json.dumps(output.to_dict())[:80]} …")

    # The error names the failed term, and its cause is the term's exception.
    broken = RegularizerSpec(lambda data, logprobs: 1 / 0, weight=1, name="broken")
    try:
        Pipeline([*TERMS, broken]).compute([], LOGPROBS, base_loss)
    except CustomLossError as error:
        print(f"refused: {error}")
        assert error.name == "broken"
        assert isinstance(error.__cause__, ZeroDivisionError)
    else:
        raise SystemExit("a broken term went unnoticed")


if __name__ == "__main__":
    main()
