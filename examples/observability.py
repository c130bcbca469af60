"""Watch a training run: progress, metrics, tokens and their price, and the trace of every call.

python examples/observability.py [--base-url local] [--base-model tinkex/tiny] [--steps 8]

The trace needs `pip install opentelemetry-sdk`; without it everything else is shown.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import tinkex
from tinkex.objectives import completion
from tinkex.telemetry import Metrics, OpenTelemetry, Prices, Rates, Usage, estimate

DATA = [completion([5, 6, 7, 8], [9, 10, 11, 12]), completion([20, 21, 22], [23, 24, 25])]
PROMPT = tinkex.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = tinkex.SamplingParams(max_tokens=8, seed=1)
#: Dollars per million tokens; put in what your service charges.
PRICES = Prices({"*": Rates(training=0.40, prefill=0.13, sampled=0.40)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--base-model", default="tinkex/tiny")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    expected = estimate(
        options.base_model,
        data=DATA,
        steps=options.steps,
        prompts=[PROMPT],
        num_samples=4,
        max_tokens=8,
        prices=PRICES,
    )
    print(f"Expected: {expected}")

    with ExitStack() as watching:
        metrics = watching.enter_context(Metrics())
        usage = watching.enter_context(Usage(PRICES))
        spans = traced(watching)
        watching.enter_context(tinkex.progress(options.steps, title="training"))
        with tinkex.ServiceClient(base_url=options.base_url) as service:
            train_and_sample(service, options.base_model, options.steps)

    print()
    print_metrics(metrics)
    print(f"\n{usage.summary()}")
    if spans is None:
        print("\nFor the trace: pip install opentelemetry-sdk")
    else:
        print_last_of_each_kind(spans.get_finished_spans())
    assert usage.tokens.training == expected.tokens.training


def train_and_sample(service: tinkex.ServiceClient, base_model: str, steps: int) -> None:
    training = service.create_lora_training_client(base_model, rank=8)
    for _ in range(steps):
        result = training.forward_backward(DATA, "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
        result.result()
    sampler = training.save_weights_and_get_sampling_client()
    with tinkex.telemetry.metadata(phase="evaluation"):  # written on every event and span below
        sampler.sample(PROMPT, num_samples=4, sampling_params=PARAMS).result()


def traced(watching: ExitStack) -> Any:
    """Collect spans in memory; a real program exports them, to Jaeger for example."""
    if find_spec("opentelemetry.sdk") is None:
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    watching.enter_context(OpenTelemetry(provider))
    return exporter


def print_metrics(metrics: Metrics) -> None:
    found = metrics.snapshot()
    for name, value in [*found.counters.items(), *found.gauges.items()]:
        print(f"{name:36}{value:>10,.6g}")
    print(f"\n{'milliseconds':36}{'count':>10}{'p50':>10}{'p95':>10}{'p99':>10}")
    for name, each in found.histograms.items():
        latencies = "".join(f"{value or 0:>10,.1f}" for value in (each.p50, each.p95, each.p99))
        print(f"{name:36}{each.count:>10}{latencies}")


def print_last_of_each_kind(spans: Any) -> None:
    """One call of each kind as a tree: its requests, the wait for its result, and how long each took."""
    below = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_time):
        below[span.parent.span_id if span.parent else None].append(span)
    for root in {span.name: span for span in below[None]}.values():
        print()
        print_tree(root, below, 0)


def print_tree(span: Any, below: Any, depth: int) -> None:
    name = f"{'  ' * depth}{span.name}"
    print(f"{name:46}{(span.end_time - span.start_time) / 1e6:>10.1f} ms")
    for child in below[span.context.span_id]:
        print_tree(child, below, depth + 1)


if __name__ == "__main__":
    main()
