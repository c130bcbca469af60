"""Distillation: a student model learns from a teacher's samples and their logprobs.

python examples/distillation.py [--base-url local] [--base-model tinkex/tiny] [--steps 12] [--teacher tinker://…]

`--teacher` is a checkpoint to sample from. Without it, a teacher is first trained here for a few steps.
"""

from __future__ import annotations

from typing import Any

import tinkex
from _shared import parsed
from tinkex.objectives import completion

PROMPT = "The weather today: "
SAYINGS = ["sun, sun, sun\n", "rain, more rain\n", "snow and wind\n"]
ADAM = tinkex.AdamParams(learning_rate=1e-2)
DRAWN = 24


def main() -> None:
    options = parsed(__doc__, steps=12, teacher="")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        student = service.create_lora_training_client(options.base_model, rank=16, seed=1)
        tokenizer = student.get_tokenizer()
        if options.teacher:
            teacher = service.create_sampling_client(model_path=options.teacher)
        else:
            teacher = trained_teacher(service, options.base_model, tokenizer)

        prompt = tinkex.ModelInput.from_text(PROMPT, tokenizer)
        divergences = []
        for step in range(options.steps):
            params = tinkex.SamplingParams(max_tokens=16, stop=["\n"], seed=step)
            drawn = teacher.sample(prompt, DRAWN, params).result().sequences
            data = [completion(prompt.to_ints(), each.tokens) for each in drawn]
            passed = student.forward_backward(data, "cross_entropy")
            student.optim_step(ADAM)
            # Each round uses new samples, so this is an unbiased estimate of KL(teacher‖student).
            teachers = sum(sum(each.logprobs or []) for each in drawn)
            students = -passed.result().metrics["loss:sum"]
            divergences.append((teachers - students) / sum(len(each.tokens) for each in drawn))
            print(f"round {step:2}  KL {divergences[-1]:6.3f} nats a token")

        params = tinkex.SamplingParams(max_tokens=16, stop=["\n"], temperature=0.3, seed=0)
        pupil = student.save_weights_and_get_sampling_client()
        for name, sampler in {"teacher": teacher, "student": pupil}.items():
            said = sampler.sample(prompt, 3, params).result().sequences
            print(f"{name}: {[tokenizer.decode(each.tokens) for each in said]}")
    assert divergences[-1] < divergences[0] / 4, "the student did not come nearer to the teacher"


def trained_teacher(
    service: tinkex.ServiceClient, base_model: str, tokenizer: Any
) -> tinkex.SamplingClient:
    training = service.create_lora_training_client(base_model, rank=16, seed=0)
    prompt = tokenizer.encode(PROMPT)
    data = [completion(prompt, tokenizer.encode(saying)) for saying in SAYINGS]
    for _ in range(25):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(ADAM)
    return training.save_weights_and_get_sampling_client()


if __name__ == "__main__":
    main()
