"""Retries: a service, then a function, fails twice and then succeeds; a permanent error is raised at once.

python examples/retry_and_capture.py [--base-url local] [--base-model tinkex/tiny]
"""

from __future__ import annotations

import tinkex
from _shared import Answer, Between, parsed
from tinkex.telemetry import attach, capture_exceptions, detach
from tinkex.telemetry.events import RetryAttemptRetry

PROMPT = tinkex.ModelInput.from_ints([65, 66, 67])
PARAMS = tinkex.SamplingParams(max_tokens=4)
#: Three attempts: immediately, after 0.2 s, and after another 0.4 s.
RETRIES = tinkex.RetryConfig(max_retries=2, retry_delay_base=0.2, jitter_factor=0)


def main() -> None:
    options = parsed(__doc__)
    bad_days = 2

    def sometimes(url: str) -> Answer | None:
        nonlocal bad_days
        if not url.endswith("/asample") or bad_days == 0:
            return None
        bad_days -= 1
        return Answer(503, {"message": "out for lunch"})

    retries: list[RetryAttemptRetry] = []
    number = attach(retries.append, RetryAttemptRetry)
    with tinkex.ServiceClient(base_url=options.base_url, http_client=Between(sometimes)) as service:
        sampler = service.create_sampling_client(
            base_model=options.base_model, retry_config=RETRIES
        )
        capture = capture_exceptions(service.get_telemetry())  # reports exceptions
        with capture:
            drawn = sampler.sample(PROMPT, 1, PARAMS).result()
        for each in retries:
            print(f"attempt {each.attempt} failed: {each.error}; retry in {each.delay:.1f} s")
        print(f"Final result: {drawn.sequences[0].tokens}")

        calls = 0

        def flaky() -> str:
            nonlocal calls
            calls += 1
            if calls <= 2:
                raise ConnectionError(f"call {calls}")
            return "worked"

        for_functions = tinkex.RetryConfig(
            max_retries=2,
            retry_delay_base=0.2,
            jitter_factor=0,
            retryable_exceptions=(ConnectionError,),
        )
        with capture:
            print(f"The function: {tinkex.with_retry(flaky, for_functions).result()}")

        bad_days = 10
        try:
            with capture:
                sampler.sample(PROMPT, 1, PARAMS).result()
        except tinkex.InternalServerError as error:
            print(f"Too many failures in a row: {error}")
        bad_days = 0
        try:
            with capture:
                service.create_sampling_client(base_model="no/such-model")
        except tinkex.TinkerError as error:
            assert error.user_error
            print(f"Not retried, because the error is permanent: {error}")
    detach(number)
    assert [each.delay for each in retries] == [0.2, 0.4] * 3


if __name__ == "__main__":
    main()
