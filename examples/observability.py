"""Watch a training run: progress, metrics, tokens and their price, and the trace of every call.

python examples/observability.py [--base-url local] [--base-model tinkex/tiny] [--steps 8] [--picture FILE.svg]

The trace needs `pip install opentelemetry-sdk`. Without it, all other output is shown.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import tinkex
from tinkex.objectives import completion
from tinkex.telemetry import Metrics, OpenTelemetry, Prices, Rates, Usage, estimate

DATA = [completion([5, 6, 7, 8], [9, 10, 11, 12]), completion([20, 21, 22], [23, 24, 25])]
PROMPT = tinkex.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = tinkex.SamplingParams(max_tokens=8, seed=1)
#: Dollars per million tokens; replace them with the prices of your service.
PRICES = Prices({"*": Rates(training=0.40, prefill=0.13, sampled=0.40)})
#: Width of the time line of a trace, in characters.
WIDTH = 36


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--base-model", default="tinkex/tiny")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--picture", type=Path, help="draw metrics and trace into an SVG file")
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

    console = Console(width=100, record=True, highlight=False)
    console.print(counted(metrics), timed(metrics))
    if spans is not None:
        console.print(time_line(spans.get_finished_spans()))
    if options.picture is not None:
        draw(console, options.picture)
    print(usage.summary())
    if spans is None:
        print("\nFor the trace: pip install opentelemetry-sdk")
    assert usage.tokens.training == expected.tokens.training


def train_and_sample(service: tinkex.ServiceClient, base_model: str, steps: int) -> None:
    training = service.create_lora_training_client(base_model, rank=8)
    for _ in range(steps):
        result = training.forward_backward(DATA, "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
        result.result()
    sampler = training.save_weights_and_get_sampling_client()
    with tinkex.telemetry.metadata(phase="evaluation"):  # added to every event and span below
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


# -- metrics ---------------------------------------------------------------------------------------


def counted(metrics: Metrics) -> Table:
    found = metrics.snapshot()
    table = new_table("counter or gauge", "value")
    for name, value in [*found.counters.items(), *found.gauges.items()]:
        table.add_row(name, f"{value:,.6g}")
    return table


def timed(metrics: Metrics) -> Table:
    table = new_table("milliseconds", "count", "p50", "p95", "p99")
    for name, each in metrics.snapshot().histograms.items():
        latencies = (f"{value or 0:,.1f}" for value in (each.p50, each.p95, each.p99))
        table.add_row(name, str(each.count), *latencies)
    return table


def new_table(name: str, *numbers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold cyan", pad_edge=False)
    table.add_column(name, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


# -- traces ----------------------------------------------------------------------------------------


def time_line(spans: Any) -> Table:
    """The last call of each kind as a tree: its requests, the wait for its result, and their times."""
    below = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_time):
        below[span.parent.span_id if span.parent else None].append(span)
    table = new_table("trace", "ms")
    table.add_column("", no_wrap=True)
    for root in {span.name: span for span in below[None]}.values():
        whole = max(1, root.end_time - root.start_time)
        for span, depth in tree(root, below):
            seconds = (span.end_time - span.start_time) / 1e9
            before = round(WIDTH * (span.start_time - root.start_time) / whole)
            bar = "━" * max(1, round(WIDTH * seconds * 1e9 / whole))
            colour = ("green", "yellow", "magenta", "blue")[depth % 4]
            name = f"{'  ' * depth}{span.name}"
            table.add_row(name, f"{1000 * seconds:,.1f}", f"[{colour}]{' ' * before}{bar}[/]")
    return table


def tree(span: Any, below: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    yield span, depth
    for child in below[span.context.span_id]:
        yield from tree(child, below, depth + 1)


def draw(console: Console, file: Path) -> None:
    picture = console.export_svg(title="examples/observability.py", unique_id="observability")
    # Remove the web font, so that the SVG file loads nothing from the network.
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
