"""One training step and one sample over real sockets."""

from __future__ import annotations

from tinkex import types

from ..scripted import Answer, promise


def test_a_training_step_and_a_sample(server, service):
    server.on("POST /api/v1/forward_backward", promise("fb"))
    server.on("POST /api/v1/optim_step", promise("step"))
    server.on("POST /api/v1/asample", promise("sample", sample_sequence_ids=["q-1"]))
    server.on_future(
        "fb",
        Answer({"loss_fn_output_type": "x", "loss_fn_outputs": [], "metrics": {"loss:sum": 2.0}}),
    )
    server.on_future("step", Answer({"metrics": {"grad_norm": 1.0}}))
    server.on_future(
        "sample",
        Answer({"sequences": [{"stop_reason": "stop", "tokens": [7], "logprobs": [-0.5]}]}),
    )
    client = service()
    training = client.create_lora_training_client("some/model", rank=4)
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    )
    forward = training.forward_backward([datum], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    assert forward.result(10).loss == 2.0
    assert step.result(10).metrics == {"grad_norm": 1.0}
    sampler = client.create_sampling_client(base_model="some/model")
    sampled = sampler.sample(
        types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)
    ).result(10)
    assert sampled.sequences[0].tokens == [7]
    assert sampled.sequences[0].sequence_id == "q-1"
    assert server.asked("POST /api/v1/optim_step")[0].json["seq_id"] == 2
