"""Reinforcement learning with a reward that can be checked: answer in CAPITALS.

python examples/rl_verifiable_reward.py [--base-url local] [--base-model tinkex/tiny] [--steps 8]

Every round samples a group of answers, scores them and trains on them: answers above the group's mean become likelier,
answers below it less likely.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import tinkex
from _shared import parsed

PROMPT = "Say it loud: "
GROUP = 48
LENGTH = 8


def reward(tokenizer: Any, tokens: list[int]) -> float:
    """The share of tokens that are capital letters."""
    return mean(float(tokenizer.decode([each]).strip().isupper()) for each in tokens)


def main() -> None:
    options = parsed(__doc__, steps=8)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=16, seed=0)
        tokenizer = training.get_tokenizer()
        prompt = tinkex.ModelInput.from_text(PROMPT, tokenizer)
        rewards = []
        for step in range(options.steps):
            policy = training.save_weights_and_get_sampling_client()  # a snapshot of the weights
            params = tinkex.SamplingParams(max_tokens=LENGTH, seed=step)
            drawn = policy.sample(prompt, GROUP, params).result().sequences
            scores = [reward(tokenizer, each.tokens) for each in drawn]
            rollouts = [
                rollout(prompt.to_ints(), each, score - mean(scores))
                for each, score in zip(drawn, scores, strict=True)
            ]
            training.forward_backward(rollouts, "importance_sampling")
            training.optim_step(tinkex.AdamParams(learning_rate=5e-3))
            rewards.append(mean(scores))
            print(f"round {step:2}  reward {rewards[-1]:.3f}  {'█' * round(40 * rewards[-1])}")
        print(f"One answer of the last round: {tokenizer.decode(drawn[0].tokens)!r}")
    assert rewards[-1] > rewards[0] + 0.3, "the reward did not climb"


def rollout(prompt: list[int], drawn: tinkex.SampledSequence, advantage: float) -> tinkex.Datum:
    """A datum with the sampled tokens, their logprobs at sampling time, and their advantage over the group."""
    assert drawn.logprobs is not None
    asked = [0.0] * (len(prompt) - 1)  # the prompt was not sampled, so it has no advantage
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints([*prompt, *drawn.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *drawn.tokens],
            "logprobs": [*asked, *drawn.logprobs],
            "advantages": [*asked, *[advantage] * len(drawn.tokens)],
        },
    )


if __name__ == "__main__":
    main()
