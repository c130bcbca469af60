"""The kernel kills the engine because its control group has no memory left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tinkex

from .memory_group import memory_group
from .served import Served

LENGTH = 2000
#: Bytes of memory for work, beyond what the service and its engine need after starting.
ROOM = 250 << 20


def hungry(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Needs fifty 16 MB matrices at once for the gradient: within the limit of a loss, above that of the group."""
    square = logprobs.unsqueeze(0) - logprobs.unsqueeze(1)
    for _ in range(50):
        square = torch.tanh(square)
    return square.sum(), {}


def datum(length: int) -> tinkex.Datum:
    tokens = np.arange(length) % 200
    return tinkex.Datum(tinkex.ModelInput.from_ints(tokens), {"target_tokens": tokens})


def test_only_the_request_that_exhausts_memory_fails(tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("starts five engines one after another; make chaos runs it")
    with memory_group() as group:
        served = Served(tmp_path)
        served.run_by(group.entering)
        served.start()
        service = tinkex.ServiceClient(base_url=served.url, api_key="tml-local")
        try:
            loss = service.create_custom_loss(hungry, {"logprobs": 1}).result()
            killer, trainer = (
                service.create_lora_training_client("tinkex/tiny", rank=4) for _ in range(2)
            )
            # Warm up, so that everything that is loaded on first use is in memory.
            killer.forward_backward_custom([datum(8)], loss).result()
            sampler = service.create_sampling_client(base_model="tinkex/tiny")
            group.limit(group.used + ROOM)
            deadly = killer.forward_backward_custom([datum(LENGTH)], loss)
            params = tinkex.SamplingParams(max_tokens=20, seed=1)
            prompt = tinkex.ModelInput.from_ints([1, 2, 3])
            samples = [sampler.sample(prompt, 2, params) for _ in range(4)]
            losses = []
            for _ in range(3):
                passed = trainer.forward_backward([datum(50)], "cross_entropy")
                trainer.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result(timeout=300)
                losses.append(passed.result().metrics["loss:sum"])
            assert losses == sorted(losses, reverse=True)
            drawn = [sample.result(timeout=300) for sample in samples]
            assert all(len(result.sequences) == 2 for result in drawn)
            with pytest.raises(tinkex.RequestFailedError, match="Out of memory"):
                deadly.result(timeout=300)
            assert group.kills > 0
            assert served.process.poll() is None  # the kernel killed the engine, not the service
            # The run whose request failed can continue too.
            assert killer.forward_backward([datum(50)], "cross_entropy").result(timeout=300).loss
            print(f"{group.kills} engines killed by the kernel")
        finally:
            service.close("success").result()
            served.stop()
