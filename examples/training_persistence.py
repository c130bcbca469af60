"""Save and load: return to a checkpoint in the same run or in a new one, with or without the optimizer state.

python examples/training_persistence.py [--base-url local] [--base-model tinkex/tiny]
"""

from __future__ import annotations

import tinkex
from _shared import parsed
from tinkex.objectives import completion

DATA = [completion([65, 66, 67], [68, 69, 70]), completion([71, 72], [73, 74])]
ADAM = tinkex.AdamParams(learning_rate=1e-2)


def main() -> None:
    options = parsed(__doc__)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        steps(training, 3)
        saved = training.save_state("after-three", ttl_seconds=86_400).result()  # kept for one day
        print(f"saved {saved.path}")
        went_on = steps(training, 3)

        training.load_state_with_optimizer(saved.path).result()
        again = steps(training, 3)
        training.load_state(saved.path).result()
        fresh = steps(training, 3)
        resumed = service.create_training_client_from_state_with_optimizer(saved.path)
        elsewhere = steps(resumed, 3)
        restarted = service.create_training_client_from_state(saved.path)
        print(f"{'continued':34}{shown(went_on)}")
        print(f"{'loaded, with optimizer':34}{shown(again)}")
        print(f"{'in a new run, with optimizer':34}{shown(elsewhere)}")
        print(f"{'loaded, with a new optimizer':34}{shown(fresh)}")
        print(f"{'in a new run, new optimizer':34}{shown(steps(restarted, 3))}")
    assert same(again, went_on), "going back is not what it was"
    assert same(elsewhere, went_on), "the new run goes another way"
    # The weights are the same, so the first loss is the same. But Adam's moments are lost, so later losses differ.
    assert same(fresh[:1], went_on[:1])
    assert not same(fresh, went_on)


def steps(training: tinkex.TrainingClient, count: int) -> list[float]:
    """The loss before each step."""
    passed = []
    for _ in range(count):
        passed.append(training.forward_backward(DATA, "cross_entropy"))
        training.optim_step(ADAM)
    return [each.result().metrics["loss:sum"] for each in passed]


def same(some: list[float], others: list[float]) -> bool:
    return all(abs(a - b) < 1e-3 for a, b in zip(some, others, strict=True))


def shown(losses: list[float]) -> str:
    return "  ".join(f"{loss:8.4f}" for loss in losses)


if __name__ == "__main__":
    main()
