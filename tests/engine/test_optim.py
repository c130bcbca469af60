"""AdamW: the steps of torch.optim.AdamW, with the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tinkex.engine.optim import AdamW
from tinkex.engine.values import AdamStep

SHAPES = [(8, 577), (577, 8), (1,), (3,), (17, 33), (4001, 8), (40_001, 8)]
STEP = AdamStep(learning_rate=1e-2, beta2=0.95, weight_decay=0.1, grad_clip_norm=1.0)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def parameters() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], seed: int, *, turned: bool = False) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = 0.1 * torch.randn(parameter.shape, generator=random)
        parameter.grad = gradient.mT.contiguous().mT if turned and gradient.dim() == 2 else gradient


def trained(threads: int) -> list[Tensor]:
    torch.set_num_threads(threads)
    ours = parameters()
    optimizer = AdamW(ours)
    for seed in range(5):
        give_gradients(ours, seed)
        optimizer.step(STEP)
    return [*(parameter.detach() for parameter in ours), *optimizer.first, *optimizer.second]


def test_steps_equal_those_of_torch():
    theirs = parameters()
    optimizer = torch.optim.AdamW(
        theirs, lr=1e-2, betas=(STEP.beta1, 0.95), eps=STEP.eps, weight_decay=0.1, foreach=False
    )
    for seed in range(5):
        give_gradients(theirs, seed)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
    for ours, expected in zip(trained(2), theirs, strict=False):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_number_of_threads_changes_no_bit(threads):
    for one, several in zip(trained(1), trained(threads), strict=True):
        assert torch.equal(one, several)


def test_a_missing_gradient_counts_as_zero():
    with_zero, without = parameters(), parameters()
    for own in (with_zero, without):
        give_gradients(own, 1)
    with_zero[0].grad, without[0].grad = torch.zeros(SHAPES[0]), None
    for own in (with_zero, without):
        AdamW(own).step(STEP)
    for first, second in zip(with_zero, without, strict=True):
        assert torch.equal(first, second)


def test_the_layout_of_a_gradient_in_memory_changes_nothing():
    straight, turned = parameters(), parameters()
    give_gradients(straight, 1)
    give_gradients(turned, 1, turned=True)
    for own in (straight, turned):
        AdamW(own).step(STEP)
    for first, second in zip(straight, turned, strict=True):
        assert torch.equal(first, second)
