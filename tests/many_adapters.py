"""Samples of many adapters, asked for while adapters are trained, saved, opened again and deleted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

PER_MOMENT = 4  # samples of an adapter at one moment: half from a checkpoint that is deleted soon
LENGTH = 6


@dataclass(frozen=True)
class Asked:
    """A sample that was asked for, and a checkpoint that keeps its weights."""

    kept: str
    prompt: tuple[int, ...]
    seed: int

    def ask(self, sampler):
        params = SamplingParams(max_tokens=LENGTH, seed=self.seed, temperature=1.0, stop=[])
        return sampler.sample(ModelInput.from_ints(list(self.prompt)), 1, params)


def datum(number: int) -> Datum:
    tokens = np.random.default_rng(number).integers(0, 256, 24)
    return Datum(ModelInput.from_ints(tokens[:-1].tolist()), {"target_tokens": tokens[1:]})


def sampled_while_training(client, base_model: str, adapters: int, moments: int):
    """Ask for samples of all adapters at once, while all of them are trained."""
    rest = client.create_rest_client()
    runs = [
        client.create_lora_training_client(base_model, rank=4, seed=number)
        for number in range(adapters)
    ]
    answers, deleted = [], []
    for moment in range(moments):
        for number, run in enumerate(runs):
            run.forward_backward([datum(number)], "cross_entropy")
            # Larger steps lead the tiny model to states that cancel out, where rounding shows in the third digit.
            run.optim_step(AdamParams(learning_rate=0.01))
            kept = run.save_weights_for_sampler(f"{number}-{moment}").result().path
            brief = run.save_weights_for_sampler(f"{number}-{moment}-brief").result().path
            samplers = [client.create_sampling_client(model_path=path) for path in (kept, brief)]
            for index in range(PER_MOMENT):
                prompt = tuple(range(number, number + 10 + index))
                asked = Asked(kept, prompt, seed=100 * moment + index)
                answers.append((asked, asked.ask(samplers[index % 2])))
            deleted.append((brief, answers[-1][1]))
        for path, last in deleted:
            last.result()
            rest.delete_checkpoint_from_tinker_path(path).result()
        deleted.clear()
    return [(asked, future.result().sequences[0]) for asked, future in answers]
