"""The pytest fixtures for users, in a separate test file with only tinkex installed."""

from __future__ import annotations

FAKE = """
    from tinkex import types

    def test_a_loop(tinkex_fake):
        client = tinkex_fake.client()
        training = client.create_lora_training_client(tinkex_fake.base_model, rank=4)
        datum = types.Datum(types.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})
        losses = []
        for _ in range(3):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.01)).result()
            losses.append(passed.result().metrics["loss:sum"])
        assert losses == sorted(losses, reverse=True)
        assert losses[0] > losses[-1]

    def test_another_client_is_another_session(tinkex_fake):
        sessions = {tinkex_fake.client().create_rest_client() for _ in range(2)}
        assert len(sessions) == 2
        assert tinkex_fake.data_dir.is_dir()
"""

TINY = """
    from tinkex import types

    def test_real_training_and_sampling(tinkex_tiny):
        client = tinkex_tiny.client()
        training = client.create_lora_training_client("tinkex/tiny", rank=4)
        datum = types.Datum(types.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})
        before = training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        after = training.forward([datum], "cross_entropy").result()
        assert after.metrics["loss:sum"] < before.metrics["loss:sum"]
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=3, stop=[])
        (sequence,) = sampler.sample(types.ModelInput.from_ints([5]), 1, params).result().sequences
        assert len(sequence.tokens) == 3
"""


def test_the_fake_service(pytester):
    pytester.makepyfile(FAKE)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_tiny_service(pytester):
    pytester.makepyfile(TINY)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_plugin_is_loaded_automatically(pytester):
    listed = pytester.runpytest_inprocess("--fixtures", "-q")
    listed.stdout.fnmatch_lines(["tinkex_fake*", "tinkex_tiny*"])
