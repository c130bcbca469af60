"""A batch too large for one request is split, and its results are merged; then a step with weight decay and clipping.

python examples/adam_and_chunking.py [--base-url local] [--base-model tinkex/tiny] [--items 1025]
"""

from __future__ import annotations

import tinkex
from _shared import parsed
from tinkex.objectives import completion
from tinkex.telemetry import attach, detach
from tinkex.telemetry.events import HttpRequestStop


def main() -> None:
    options = parsed(__doc__, items=1025)  # one more than fits into a request
    data = [completion([65 + index % 26], [66 + index % 26]) for index in range(options.items)]
    requests: list[str] = []
    number = attach(lambda event: requests.append(event.path), HttpRequestStop)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=4)
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(
            tinkex.AdamParams(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
        )
        result, metrics = passed.result(), stepped.result().metrics
        detach(number)
        after = training.forward(data, "cross_entropy").result()
    sent = requests.count("/api/v1/forward_backward")
    print(
        f"{options.items} items in {sent} requests, {len(result.loss_fn_outputs)} outputs in order"
    )
    print(f"loss {result.loss:.2f}, after the step {after.loss:.2f}")
    print(f"metrics of the step: {metrics}")
    assert len(result.loss_fn_outputs) == options.items
    assert sent == -(-options.items // 1024)
    assert result.loss is not None
    assert after.loss is not None
    assert after.loss < result.loss, "the step did not help"


if __name__ == "__main__":
    main()
