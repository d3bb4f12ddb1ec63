"""Mixed precision: autocast, and loss scales of a bare accumulator; those of an optimizer are tested beside it."""

import gradacc
import pytest
import torch
from torch import nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(*sizes):
    return list(torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(1)).split(sizes))


def loss(net, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return net(batch).float().square().mean()


@pytest.mark.parametrize("attach", [False, True])
def test_autocast_to_bfloat16_is_the_full_batch_under_autocast(attach):
    net, given = network(), batches(7, 1, 4)
    acc = gradacc.GradientAccumulator(net)
    if attach:
        acc.attach(net)
    for batch in given:
        if attach:
            with acc.micro_batch(weight=len(batch)):
                loss(net, batch).backward()
        else:
            loss(net, batch).backward()
            acc.add(net, weight=len(batch))
    expected = torch.autograd.grad(loss(net, torch.cat(given)), list(net.parameters()))
    for result, gradient in zip(acc.take().torch().values(), expected, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, gradient, rtol=0.05, atol=0.005)


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
@pytest.mark.parametrize("attach", [False, True])
def test_a_window_is_unscaled_once_and_dropped_for_an_overflow_in_any_micro_batch(attach, bad):
    net, given = network(), batches(3, 1, 2, 2, 5, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1.0), torch.amp.GradScaler("cpu", 1024.0)
    acc, norms = gradacc.GradientAccumulator(net, every=3), []
    if attach:
        acc.attach(net)
    before = [p.detach().clone() for p in net.parameters()]
    full = torch.autograd.grad(loss(net, torch.cat(given[3:])), list(net.parameters()))
    for i, batch in enumerate(given):
        scaled = scaler.scale(loss(net, batch * (torch.inf if i == bad else 1)))
        if attach:
            with acc.micro_batch(weight=len(batch)):
                scaled.backward()
        else:
            scaled.backward()
            acc.add(net, weight=len(batch))
        if acc.complete:
            acc.take().assign_to(net)
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if len(norms) == 1:
                moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert any(moved) == (bad is None)
    assert scaler.get_scale() == (1024.0 if bad is None else 512.0)
    if bad is not None:  # the next window is clean: it is the mean of its own
        for p, q, gradient in zip(net.parameters(), before, full, strict=True):
            torch.testing.assert_close(q - p.detach(), gradient, rtol=0.05, atol=0.005)
