"""Telemetry sent to the service: custom events, exceptions, the end of the session; and requests on the console.

python examples/telemetry_reporter.py [--base-url local] [--base-model tinkex/tiny]
"""

from __future__ import annotations

import logging
import sys

import tinkex
from _shared import parsed
from tinkex.telemetry import attach_logger, capture_exceptions, detach

PROMPT = tinkex.ModelInput.from_ints([65, 66, 67])


def main() -> None:
    options = parsed(__doc__)
    logging.basicConfig(stream=sys.stdout, format="  %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("tinkex").setLevel(logging.INFO)
    with tinkex.ServiceClient(base_url=options.base_url, telemetry_enabled=True) as service:
        reporter = service.get_telemetry()
        assert reporter is not None
        sampler = service.create_sampling_client(base_model=options.base_model)

        print("Each request, on the console:")
        number = attach_logger()
        sampler.sample(PROMPT, 1, tinkex.SamplingParams(max_tokens=4)).result()
        detach(number)

        # True means queued: a batch is sent every 10 s, or when 100 events are queued.
        assert reporter.log("checkpoint reached", {"step": 300})
        assert reporter.log("loss is high", {"loss": 9.5}, severity="WARNING")

        try:
            with capture_exceptions(reporter):  # also works as a decorator
                raise RuntimeError("something of ours broke")
        except RuntimeError as error:
            print(f"Reported and raised: {error}")
        try:
            with capture_exceptions(reporter):
                service.create_sampling_client(model_path="tinker://not/a")
        except tinkex.TinkerError as error:
            print(f"Reported as a user error, not as a crash: {error}")

        print(f"{reporter.pending} events are queued.")
        assert reporter.wait_until_drained(30), "the service did not accept the events"
        assert reporter.pending == 0
        print("Sent. Closing the client sends one last event.")
    assert not reporter.log("too late")


if __name__ == "__main__":
    main()
