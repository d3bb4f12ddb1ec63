"""`AccumulatingOptimizer`, beside the inner optimizer run by hand on the mean of each window."""

import copy
import io
import pickle

import gradacc
import pytest
import torch
from gradacc.torch import AccumulatingOptimizer
from torch import nn


def network(dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def adamw(net, **options):
    return torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.3, **options)


def batches(*sizes):
    return list(torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(1)).split(sizes))


def loss(net, batch):
    return net(batch).square().mean()


def train(net, optimizer, given):
    for batch in given:
        loss(net, batch).backward()
        optimizer.step(weight=len(batch))


def moved(optimizer):
    return copy.deepcopy([[group["params"] for group in optimizer.param_groups], list(optimizer.state.values())])


def assert_same(these, those):
    torch.testing.assert_close(these, those, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inner_optimizer_steps_on_the_mean_of_each_window(options, dtype):
    ours, plain, given = network(dtype), network(dtype), [b.to(dtype) for b in batches(3, 1, 8, 2, 2, 7)]
    optimizer, inner = AccumulatingOptimizer(adamw(ours, **options), every=3), adamw(plain, **options)
    train(ours, optimizer, given)
    for window in (given[:3], given[3:]):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
        for batch in window:
            for s, g in zip(sums, torch.autograd.grad(loss(plain, batch), list(plain.parameters())), strict=True):
                s += g.float() * len(batch)
        for p, s in zip(plain.parameters(), sums, strict=True):
            p.grad = (s.double() * (1 / sum(map(len, window)))).float().to(dtype)
        inner.step()
    assert_same(moved(optimizer), moved(inner))


def test_between_windows_nothing_moves_and_no_grad_is_left():
    net = network()
    optimizer = AccumulatingOptimizer(adamw(net), every=2)
    train(net, optimizer, batches(3, 1))
    before = moved(optimizer)
    train(net, optimizer, batches(2))
    assert_same(moved(optimizer), before)
    assert (optimizer.stepped, optimizer.accumulator.count) == (False, 1)
    assert all(p.grad is None for p in net.parameters())


def test_the_schedule_may_change_and_options_are_those_of_the_accumulator():
    net, given = network(), batches(3, 1, 8, 2)
    optimizer, steps = AccumulatingOptimizer(adamw(net), {0: 1, 2: 2}, reduction="sum", micro_norms=True), []
    for batch in given:
        train(net, optimizer, [batch])
        steps.append(optimizer.stepped)
    assert steps == [True, True, False, True]
    assert optimizer.accumulator.last.norm > 0
    for options in ({"every": 0}, {"every": 2, "max_norm": -1}, {"every": 2, "max_norm": float("nan")}):
        with pytest.raises(gradacc.ArgumentError):
            AccumulatingOptimizer(adamw(net), **options)
    with pytest.raises(TypeError, match="everyy"):
        AccumulatingOptimizer(adamw(net), 2, everyy=2)


def test_skipped_micro_batches_are_waited_for():
    net, (one, two) = network(), batches(3, 1)
    optimizer = AccumulatingOptimizer(adamw(net), every=2, on_nonfinite="skip")
    train(net, optimizer, [one, one * torch.nan])
    assert not optimizer.stepped
    train(net, optimizer, [two])
    assert optimizer.stepped
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_refused_micro_batch_changes_nothing():
    net, (batch,) = network(), batches(3)
    optimizer = AccumulatingOptimizer(adamw(net), every=1, on_nonfinite="raise")
    loss(net, batch * torch.nan).backward()
    before = moved(optimizer)
    with pytest.raises(gradacc.NonFiniteError, match="#0"):
        optimizer.step()
    assert_same(moved(optimizer), before)
    assert net[0].weight.grad is not None
    with pytest.raises(gradacc.ArgumentError, match="weight"):
        optimizer.step(weight=-1)
    optimizer.zero_grad()
    train(net, optimizer, [batch])
    assert optimizer.stepped


def test_an_inner_step_that_fails_leaves_no_grad_behind():
    net, (batch,) = network(), batches(3)
    optimizer = AccumulatingOptimizer(adamw(net), every=1)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(net, optimizer, [batch])
    assert all(p.grad is None for p in net.parameters())
    handle.remove()
    train(net, optimizer, [batch])
    assert optimizer.stepped
    assert optimizer.accumulator.window == 2


def test_an_assignment_that_fails_leaves_no_grad_behind(monkeypatch):
    net, (batch,) = network(), batches(3)
    optimizer, calls = AccumulatingOptimizer(adamw(net), every=1), []

    def fails(parameter, gradient):
        parameter.grad = torch.zeros_like(parameter)
        calls.append(parameter)
        if len(calls) == 2:
            raise MemoryError

    monkeypatch.setattr("gradacc.torch.optimizer.assign", fails)
    with pytest.raises(MemoryError):
        train(net, optimizer, [batch])
    assert all(p.grad is None for p in net.parameters())


def test_a_refused_step_forgets_the_scale_of_a_scaler():
    net, (batch,) = network(), batches(3)
    optimizer, scaler = AccumulatingOptimizer(adamw(net), every=1), torch.amp.GradScaler("cpu", 1024.0)
    scaler.scale(loss(net, batch)).backward()
    with pytest.raises(gradacc.ArgumentError, match="weight"):
        scaler.step(optimizer, weight=-1)
    optimizer.zero_grad()
    loss(net, batch).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    given = []
    optimizer.register_step_pre_hook(lambda *_: given.extend(p.grad for p in net.parameters()))
    optimizer.step(weight=3)
    torch.testing.assert_close(given, expected)


def test_copies_keep_a_schedule_that_was_set():
    net, (batch,) = network(), batches(3)
    optimizer = AccumulatingOptimizer(adamw(net), every=4)
    optimizer.accumulator.set_schedule(until_weight=7)
    twin = copy.deepcopy(optimizer)
    assert (twin.accumulator.every, twin.accumulator.until_weight) == (None, 7.0)
    optimizer.accumulator.set_schedule(every=2)
    assert copy.deepcopy(optimizer).accumulator.every == 2
    train(net, optimizer, [batch, batch])
    assert optimizer.stepped


@pytest.mark.parametrize("named", [False, True])
def test_a_group_that_can_not_be_summed_is_refused_before_the_inner_optimizer_knows_it(named):
    net, w = network(), nn.Parameter(torch.zeros(2))
    optimizer = AccumulatingOptimizer(torch.optim.SGD(net.named_parameters() if named else net.parameters()), every=1)
    wrong = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    with pytest.raises(gradacc.DtypeError):
        optimizer.add_param_group({"params": (p for p in ([("a", w), ("b", wrong)] if named else [w, wrong]))})
    assert (len(optimizer.param_groups), len(optimizer.accumulator.ids)) == (1, 4)
    other = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": (p for p in ([("a", w)] if named else [w]))})
    optimizer.add_param_group({"params": [("c", other)] if named else other})
    assert (len(optimizer.param_groups), len(optimizer.accumulator.ids)) == (3, 6)


def test_sparse_gradients_and_a_frozen_table():
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3)])
    net[1].requires_grad_(False)
    before = net[0].weight.detach().clone()
    optimizer = AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), every=2)
    for rows in ([1, 1, 2], [5]):
        net[0](torch.tensor(rows)).sum().backward()
        optimizer.step()
    step = torch.tensor([0, 1.0, 0.5, 0, 0, 0.5]).unsqueeze(1).expand(6, 3)
    assert_same(net[0].weight.detach(), before - step)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(copied):
    net, (first, second) = network(), batches(3, 1)
    optimizer = AccumulatingOptimizer(adamw(net), every=2, max_norm=0.1)
    train(net, optimizer, [first, second, second])
    twin = copied(optimizer)
    assert twin.accumulator.count == 1
    before = moved(optimizer)
    for p, q in zip(twin.param_groups[0]["params"], net.parameters(), strict=True):
        p.grad = torch.autograd.grad(loss(net, first), q)[0]
    twin.step(weight=3)
    assert twin.stepped
    assert_same(moved(optimizer), before)
    train(net, optimizer, [first])
    assert_same(moved(optimizer), moved(twin))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_state_goes_through_torch_save(dtype):
    nets, given = [network(torch.bfloat16), network(torch.bfloat16)], [b.bfloat16() for b in batches(3, 1, 8, 2)]
    first, second = (AccumulatingOptimizer(adamw(net), every=2, dtype=dtype) for net in nets)
    train(nets[0], first, given[:3])
    file = io.BytesIO()
    torch.save([nets[0].state_dict(), first.state_dict()], file)
    file.seek(0)
    model, state = torch.load(file, weights_only=True)
    nets[1].load_state_dict(model)
    second.load_state_dict(state)
    for net, optimizer in zip(nets, (first, second), strict=True):
        train(net, optimizer, given[3:])
        assert optimizer.stepped
    assert_same(moved(first), moved(second))


def test_a_state_that_does_not_fit_changes_nothing():
    net, given = network(), batches(3, 1, 2)
    optimizer = AccumulatingOptimizer(adamw(net), every=2)
    train(net, optimizer, given)
    before, window = moved(optimizer), optimizer.accumulator.state_dict()
    good = copy.deepcopy(optimizer.state_dict())
    other = AccumulatingOptimizer(torch.optim.AdamW([nn.Parameter(torch.zeros(3)) for _ in range(4)]), every=2)
    broken = [{**good, "accumulator": part} for part in (None, {}, {"window": 3, "overflowed": False})]
    broken[0] = {**good, "accumulator": other.state_dict()["accumulator"]}
    for state in broken:
        with pytest.raises(gradacc.StateError):
            optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({**good, "param_groups": good["param_groups"] * 2})
    assert_same(moved(optimizer), before)
    assert optimizer.accumulator.count == window["count"] == 1


@pytest.mark.parametrize("scheduler", [torch.optim.lr_scheduler.OneCycleLR, torch.optim.lr_scheduler.CosineAnnealingLR])
def test_schedulers_of_torch(scheduler):
    net, given = network(), batches(3, 1, 2, 4)
    optimizer = AccumulatingOptimizer(adamw(net), every=2)
    options = {"max_lr": 1.0, "total_steps": 3} if scheduler is torch.optim.lr_scheduler.OneCycleLR else {"T_max": 2}
    schedule = scheduler(optimizer, **options)
    inner = adamw(network())
    plain = scheduler(inner, **options)
    for batch in given:
        train(net, optimizer, [batch])
        if optimizer.stepped:
            schedule.step()
            inner.step()
            plain.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"]


def test_unscaling_and_clipping_by_hand_under_a_grad_scaler():
    """The user calls unscale_ for every micro-batch, to look at the gradients: the scale is divided out once."""
    w = nn.Parameter(torch.zeros(1))
    optimizer, scaler = AccumulatingOptimizer(torch.optim.SGD([w], lr=1.0), every=2), torch.amp.GradScaler("cpu", 8.0)
    for value in (1.0, 3.0):
        scaler.scale((w * value).sum()).backward()
        scaler.unscale_(optimizer)
        assert w.grad.item() == value
        scaler.step(optimizer)
        scaler.update()
    assert w.item() == -2.0


def test_the_loss_scale_may_change_within_a_window_and_an_overflow_is_saved():
    w = nn.Parameter(torch.zeros(1))
    optimizer = AccumulatingOptimizer(torch.optim.SGD([w], lr=1.0), every=2)
    scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=1)

    def step(value):
        scaler.scale((w * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    step(3.0)
    assert w.item() == -2.0
    assert scaler.get_scale() == 32.0
    step(float("inf"))
    state = optimizer.state_dict()
    optimizer.reset()
    optimizer.load_state_dict(state)
    step(1.0)
    assert (w.item(), optimizer.stepped, optimizer.accumulator.window) == (-2.0, False, 1)
    optimizer.flush()
    step(1.0)
    step(1.0)
    assert w.item() == -3.0
