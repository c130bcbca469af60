"""Metrics of this program: number of requests, latencies (p50, p95, p99), tokens per second.

python examples/metrics_live.py [--base-url local] [--base-model tinkex/tiny] [--samples 20]
"""

from __future__ import annotations

import tinkex
from _shared import parsed
from tinkex.telemetry import Metrics

PROMPT = tinkex.ModelInput.from_ints([65, 66, 67])
PARAMS = tinkex.SamplingParams(max_tokens=8)


def main() -> None:
    options = parsed(__doc__, samples=20)
    with (
        tinkex.ServiceClient(base_url=options.base_url) as service,
        Metrics() as metrics,
    ):
        sampler = service.create_sampling_client(base_model=options.base_model)
        metrics.reset()  # do not count the calls above
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(options.samples)]
        tokens = sum(len(each.result().sequences[0].tokens) for each in futures)
        metrics.increment("my_prompts", options.samples)
        found = metrics.snapshot()

    for name, value in {**found.counters, **found.gauges}.items():
        print(f"{name:40}{value:>10,.6g}")
    print(f"\n{'milliseconds':40}{'count':>10}{'p50':>10}{'p95':>10}{'p99':>10}")
    for name, each in found.histograms.items():
        percentiles = "".join(f"{value or 0:>10.1f}" for value in (each.p50, each.p95, each.p99))
        print(f"{name:40}{each.count:>10}{percentiles}")
    assert found.counters["my_prompts"] == options.samples
    assert found.counters["tinkex_sampled_tokens"] == tokens
    assert found.counters["tinkex_requests_total"] >= options.samples


if __name__ == "__main__":
    main()
