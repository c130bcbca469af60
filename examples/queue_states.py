"""Why does a request wait? The service reports pauses; the log, an observer and telemetry receive them.

python examples/queue_states.py [--base-url local] [--base-model tinkex/tiny]

The HTTP client of this example simulates the pauses; everything else is real. After a 429 the client sends no sample
for one second, and then only a few at a time.
"""

from __future__ import annotations

import logging
import sys
import time

import tinkex
from _shared import Answer, Between, parsed
from tinkex.telemetry import attach, detach
from tinkex.telemetry.events import QueueStateChange, Throttled

PROMPT = tinkex.ModelInput.from_ints([65, 66, 67])
PARAMS = tinkex.SamplingParams(max_tokens=4)
PAUSES = {
    "/asample": Answer(429, {"message": "too many samples", "queue_state": "paused_rate_limit"}),
    "/retrieve_future": Answer(
        408, {"queue_state": "paused_capacity", "queue_state_reason": "a new model is being loaded"}
    ),
}


def main() -> None:
    options = parsed(__doc__)
    logging.basicConfig(stream=sys.stdout, format="log:       %(message)s")
    pauses = dict(PAUSES)

    def busy(url: str) -> Answer | None:
        """Return each simulated pause once."""
        return next((pauses.pop(path) for path in list(pauses) if url.endswith(path)), None)

    observed: list[tuple[tinkex.QueueState, str | None]] = []

    def observer(state: tinkex.QueueState, reason: str | None) -> None:
        observed.append((state, reason))
        print(f"observer:  {state.value}: {reason or 'no reason given'}", flush=True)

    def listener(event: QueueStateChange | Throttled) -> None:
        told = event.measurements or event.facts["queue_state"]
        print(f"telemetry: {event.name} {told}", flush=True)

    number = attach(listener, QueueStateChange, Throttled)
    with tinkex.ServiceClient(base_url=options.base_url, http_client=Between(busy)) as service:
        sampler = service.create_sampling_client(base_model=options.base_model)
        sampler.observe_queue_state(observer)  # training clients have this method too
        began = time.perf_counter()
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        drawn = [future.result() for future in futures]
        print(f"{len(drawn)} samples, after {time.perf_counter() - began:.1f} s")
    detach(number)
    assert (tinkex.QueueState.PAUSED_RATE_LIMIT, None) in observed
    assert (tinkex.QueueState.PAUSED_CAPACITY, "a new model is being loaded") in observed
    assert not pauses


if __name__ == "__main__":
    main()
