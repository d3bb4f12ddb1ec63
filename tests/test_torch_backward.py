"""Gradients that are added during backward, beside what plain torch makes of the same."""

import copy
import gc
import weakref

import gradacc
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(net, batch):
    return net(batch).square().mean()


def batches(*sizes):
    return list(torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(1)).split(sizes))


def attached(net, **options):
    acc = gradacc.GradientAccumulator(net, **options)
    return acc, acc.attach(net)


def no_grad_left(net):
    return all(p.grad is None for p in net.parameters())


def assert_full_batch(acc, net, given):
    expected = torch.autograd.grad(loss(net, torch.cat(given)), list(net.parameters()))
    for result, gradient in zip(acc.take().torch().values(), expected, strict=True):
        torch.testing.assert_close(result, gradient)


def test_micro_batches_are_the_full_batch_and_grad_is_none_at_once():
    net, given, alive = network(), batches(3, 1, 8), []
    acc, _ = attached(net)
    net[2].weight.register_post_accumulate_grad_hook(lambda p: alive.append(p.grad))
    for batch in given:
        with acc.micro_batch(weight=len(batch)):
            loss(net, batch).backward()
            assert no_grad_left(net)
    assert alive == [None] * 3
    assert_full_batch(acc, net, given)


def test_a_gradient_is_freed_when_it_has_been_added():
    net, (batch,), born = network(), batches(4), []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: born.append(weakref.ref(p.grad)))
    acc, _ = attached(net)
    with acc.micro_batch():
        loss(net, batch).backward()
    assert len(born) == 4
    assert not any(gradient() is not None for gradient in born)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_shared_checkpointed_layer_weighs_once(use_reentrant):
    layer = nn.Linear(5, 5)
    (batch,) = batches(3)
    batch.requires_grad_()
    twice = nn.Sequential(layer, layer)
    acc, _ = attached(layer)
    with acc.micro_batch(weight=3):
        h = checkpoint(layer, batch, use_reentrant=use_reentrant)
        checkpoint(layer, h, use_reentrant=use_reentrant).square().mean().backward()
    assert (acc.count, acc.weight) == (1, 3)
    assert_full_batch(acc, twice, [batch.detach()])


def test_two_modules_and_parts_by_hand_in_one_micro_batch():
    net, head, (batch,) = network(), nn.ModuleDict({"head": nn.Linear(2, 1)}), batches(3)
    acc = gradacc.GradientAccumulator([*net.named_parameters(), *head.named_parameters()])
    acc.attach(net)
    acc.attach(head)
    with acc.micro_batch():
        head["head"](net(batch)).mean().backward()
        acc.add_part({"head.bias": torch.full((1,), 2.0)})
    assert list(acc.ids) == list(acc.take())
    assert no_grad_left(head)
    with acc.micro_batch():
        acc.add_part({"head.bias": torch.full((1,), 2.0)})
    assert acc.take().torch()["head.bias"].item() == 2.0


def test_what_can_not_be_attached():
    net = network()
    acc, _ = attached(net)
    with pytest.raises(gradacc.GradaccError, match=r"0.weight.*already"):
        acc.attach(net)
    with pytest.raises(gradacc.UnknownParameterError, match=r"1.weight"):
        gradacc.GradientAccumulator(net).attach(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    with pytest.raises(gradacc.ArgumentError, match="skip"):
        gradacc.GradientAccumulator(net, on_nonfinite="skip").attach(net)
    (batch,) = batches(2)
    with acc.micro_batch():  # none of those has left a hook
        loss(net, batch).backward()
    assert_full_batch(acc, net, [batch])


def test_a_parameter_is_attached_once_under_whatever_name():
    net, (batch,) = network(), batches(2)
    outer = nn.ModuleDict({"net": net})
    acc = gradacc.GradientAccumulator([*net.named_parameters(), *outer.named_parameters(remove_duplicate=False)])
    acc.attach(net)
    with pytest.raises(gradacc.GradaccError, match=r"net.0.weight.*0.weight"):
        acc.attach(outer)
    other = gradacc.GradientAccumulator(net)
    other.attach(net)
    with pytest.raises(gradacc.GradaccError, match=r"weight|bias.*\.grad"), acc.micro_batch(), other.micro_batch():
        loss(net, batch).backward()


def test_detaching_twice_and_attaching_again():
    net, given = network(), batches(2, 3)
    acc, handle = attached(net)
    handle.detach()
    handle.detach()
    loss(net, given[0]).backward()
    assert acc.count == 0
    net.zero_grad()
    acc.attach(net)
    for batch in given:
        with acc.micro_batch(weight=len(batch)):
            loss(net, batch).backward()
    assert_full_batch(acc, net, given)


def test_a_grad_that_was_not_cleared_is_refused_before_backward():
    net, given = network(), batches(2, 3)
    acc, _ = attached(net)
    with acc.micro_batch():
        loss(net, given[0]).backward()
    acc.take().assign_to(net)
    with pytest.raises(gradacc.GradaccError, match="zero_grad"), acc.micro_batch():
        pytest.fail("its body must not run")
    assert not no_grad_left(net)  # it may not have been stepped with yet
    net.zero_grad()
    with acc.micro_batch():  # the window was not broken
        loss(net, given[1]).backward()
    assert_full_batch(acc, net, given[1:])


def test_a_backward_that_fails_leaves_no_gradient_behind():
    net, (batch,) = network(), batches(2)
    acc, _ = attached(net)

    def fail(_):
        raise KeyError("on purpose")

    last = nn.Linear(2, 2)
    h = net(batch)
    h.register_hook(fail)
    with pytest.raises(KeyError), acc.micro_batch():
        last(h).sum().backward()
    assert no_grad_left(net)
    with pytest.raises(gradacc.WindowError, match="micro_batch"):  # nothing was added: it is not broken
        loss(net, batch).backward()
    net.zero_grad()
    with acc.micro_batch():
        loss(net, batch).backward()
    assert_full_batch(acc, net, [batch])


def test_copies_and_states_of_an_attached_model():
    net, (batch,) = network(), batches(2)
    acc, _ = attached(net)
    twin = copy.deepcopy(net)
    loss(twin, batch).backward()  # has no hooks
    assert acc.count == 0
    assert not no_grad_left(twin)
    twin.load_state_dict(net.state_dict())


def test_nothing_is_kept_alive_by_a_detached_handle():
    net = network()
    acc, handle = attached(net)
    handle.detach()
    gone = weakref.ref(acc)
    del acc, handle
    gc.collect()
    assert gone() is None


def test_a_frozen_parameter_is_hooked_when_it_is_unfrozen():
    net, (batch,) = network(), batches(2)
    net[0].requires_grad_(False)
    acc, _ = attached(net, reduction="sum")
    for trainable, ids in [(False, 2), (True, 4), (False, 2), (True, 4)]:
        net[0].requires_grad_(trainable)
        with acc.micro_batch():
            loss(net, batch).backward()
        assert len(acc.take()) == ids
        assert no_grad_left(net)
