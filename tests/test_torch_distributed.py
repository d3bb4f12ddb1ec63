"""`take(group=...)` in two and three local processes, against the same gradients in one."""

import itertools
import os
import re

import gradacc
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradacc.torch import AccumulatingOptimizer
from gradacc.torch.distributed import take
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile


@pytest.fixture(scope="module")
def three():
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def network(*sizes):
    torch.manual_seed(0)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def batches(*sizes):
    return list(torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(1)).split(list(sizes)))


def mean_loss(net, batch):
    return net(batch).square().mean()


def full_batch(net, given):
    return torch.autograd.grad(mean_loss(net, torch.cat(given)), list(net.parameters()))


def assert_gradients(arrays, expected):
    for array, gradient in zip(arrays.values(), expected, strict=True):
        np.testing.assert_allclose(array, gradient.numpy(), rtol=1e-4, atol=1e-6)


# ---- plain parameters

SIZES = [[1], [1000, 3], []]  # of the micro-batches of each rank


def token_mean(rank, backend):
    net = network(4, 8, 2)
    acc = gradacc.GradientAccumulator(net, backend=backend)
    own = batches(*itertools.chain(*SIZES))
    before = sum(map(len, SIZES[:rank]))
    for batch in own[before : before + len(SIZES[rank])]:
        mean_loss(net, batch).backward()
        acc.add(net, weight=len(batch))
    grads = acc.take(dist.group.WORLD)
    return grads.numpy(), (grads.count, grads.weight), grads.norm(), grads.clip_(0.01), grads.norm()


@pytest.mark.parametrize("backend", ["engine", "torch"])
def test_other_tokens_other_numbers_of_micro_batches_and_none_at_all(three, backend):
    answers = three(token_mean, backend)
    net, sizes = network(4, 8, 2), list(itertools.chain(*SIZES))
    expected = full_batch(net, batches(*sizes))
    norm = torch.nn.utils.get_total_norm(expected).item()
    for arrays, counts, norm_before, returned, norm_after in answers:
        assert_gradients(arrays, expected)
        assert counts == (len(sizes), sum(sizes))
        assert norm_before == returned == pytest.approx(norm, rel=1e-5)
        assert norm_after == pytest.approx(0.01, rel=1e-3)
        assert all(np.array_equal(a, b) for a, b in zip(arrays.values(), answers[0][0].values(), strict=True))


def sums_of(rank, dtype, sums, backend):
    acc = gradacc.GradientAccumulator({"w": ((70,), dtype), "late": ((3,), dtype)}, dtype=sums, backend=backend)
    acc.add({"w": torch.full((70,), 1.0 + rank, dtype=getattr(torch, dtype))}, 2)
    return acc.take(dist.group.WORLD).torch()["w"].float()


@pytest.mark.parametrize("backend", ["engine", "torch"])
@pytest.mark.parametrize(("dtype", "sums"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", None)])
def test_sums_of_16_bits(two, dtype, sums, backend):
    for result in two(sums_of, dtype, sums, backend):
        assert result.eq(1.5).all()


def seen_here_and_there(rank, place):
    """Ids that only one rank has; a buffer made within the window on one of them; complex and float64 sums."""
    acc = gradacc.GradientAccumulator({"a": ((3,), "float32"), "z": ((2,), "complex64"), "never": ((5,), "float64")})
    late = ("late", ((2,), "float64"))
    if place == "before" or rank == 1:
        acc.register(*late)
    acc.add({"a": np.full(3, 1.0 + rank, "float32")})
    if place == "within" and rank == 0:
        acc.register(*late)
    acc.add({"late": np.ones(2)} if rank == 0 else {"z": np.full(2, 4j, "complex64")}, scale=0 if rank == 0 else 1)
    return acc.take(dist.group.WORLD).numpy()


@pytest.mark.parametrize("place", ["before", "within"])
def test_ids_seen_on_one_rank_and_buffers_that_differ(two, place):
    for arrays in two(seen_here_and_there, place):
        assert list(arrays) == ["a", "z", "late"]
        assert (arrays["a"] == 0.75).all()
        assert (arrays["z"] == 1j).all()
        assert (arrays["late"] == 0).all()


def registered_within(rank):
    acc = gradacc.GradientAccumulator({"a": ((3,), "float32"), "b": ((3,), "float32")})
    if rank == 0:
        acc.register("c", ((2,), "float32"))
    acc.add({"a": np.ones(3, "float32")})
    if rank == 1:
        acc.register("c", ((2,), "float32"))  # in a buffer of its own
    acc.add({"c": np.full(2, 3.0, "float32")})
    return acc.take(dist.group.WORLD).numpy()


def test_a_parameter_registered_in_mid_window_on_one_rank(two):
    for arrays in two(registered_within):
        assert (arrays["a"].tolist(), arrays["c"].tolist()) == ([0.5] * 3, [1.5] * 2)


def collectives(run):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run()
    events = [event for event in recorded.events() if event.name.startswith("gloo:all_reduce")]
    return [sum(int(np.prod(shape)) for shape in event.input_shapes) for event in events]


def ddp(rank, attach):
    net = network(4, 500)
    wrapped, acc = DistributedDataParallel(net), gradacc.GradientAccumulator(net)
    if attach:
        acc.attach(net)

    def window():
        with wrapped.no_sync():
            for batch in batches(3, 1, 5, 2)[2 * rank : 2 * rank + 2]:
                if attach:
                    with acc.micro_batch(weight=len(batch)):
                        mean_loss(wrapped, batch).backward()
                else:
                    mean_loss(wrapped, batch).backward()
                    acc.add(net, weight=len(batch))
        acc.take(dist.group.WORLD).assign_to(net)

    return collectives(window), {name: p.grad.numpy() for name, p in net.named_parameters()}


@pytest.mark.parametrize("attach", [False, True])
def test_ddp_under_no_sync_reduces_once_per_window(two, attach):
    expected = full_batch(network(4, 500), batches(3, 1, 5, 2))
    for sizes, arrays in two(ddp, attach):
        assert len(sizes) == 1
        assert 2500 <= sizes[0] < 2600
        assert_gradients(arrays, expected)


# ---- errors


def outcome(acc):
    try:
        return acc.take(dist.group.WORLD).numpy()
    except gradacc.GradaccError as error:
        return type(error).__name__, str(error)


def wrong(rank, what):
    acc = gradacc.GradientAccumulator({"w": ((1 + (what == "shape" and rank == 1),), "float32")})
    one = np.ones(1, "float32")
    if what == "broken":
        try:
            with acc.micro_batch():
                acc.add_part({"w": one})
                if rank == 1:
                    raise KeyError
        except KeyError:
            pass
    micro_batch = acc.micro_batch()
    if what == "open" and rank == 1:
        micro_batch.__enter__()
    if what == "no weight":
        acc.add({"w": one}, 0, scale=1)
    first = outcome(acc)
    count = acc.count
    acc = acc if what != "shape" else gradacc.GradientAccumulator({"w": ((1,), "float32")})
    acc.reset()
    acc.add({"w": one * (2 + rank)})
    return first, count, outcome(acc)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("broken", "WindowError", "rank 1 .*reset"),
        ("open", "WindowError", "rank 1 .*a micro-batch is open"),
        ("empty", "WindowError", "empty"),
        ("no weight", "WindowError", "weight is 0"),
        ("shape", "GradaccError", "ranks 0 and 1 .*parameters"),
    ],
)
def test_what_is_wrong_on_one_is_raised_on_all_and_the_windows_are_kept(two, what, error, message):
    for rank, (first, count, second) in enumerate(two(wrong, what)):
        assert first[0] == error
        assert re.search(message, first[1])
        assert count == (what == "broken" and rank == 0) + (what == "no weight")
        assert second["w"].tolist() == [2.5]


def cannot_read(rank):
    acc = gradacc.GradientAccumulator({"w": ((1,), "float32")}, backend="torch")
    acc.add({"w": torch.ones(1)}, torch.tensor(1.0, device="meta" if rank == 1 else "cpu"), scale=1)
    return outcome(acc)


def test_what_torch_raises_on_one_is_raised_on_all(two):
    for name, message in two(cannot_read):
        assert name == "GradaccError"
        assert re.search("rank 1 .*meta", message)


def dies(rank):
    acc = gradacc.GradientAccumulator({"w": ((1,), "float32")})
    acc.add({"w": np.ones(1, "float32")})
    if rank == 1:
        os._exit(1)
    acc.take(dist.group.WORLD)


def test_a_process_that_died_gives_the_others_an_error():
    ranks = Ranks(2)
    survivor, _ = ranks(dies)
    assert isinstance(survivor, RuntimeError)
    ranks.stop()


# ---- sharded parameters


def sharded(mesh_shape, dtype=None):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    net = network(4, 5, 1)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return net


def fsdp_step(rank, attach, options, mesh_shape):
    net = sharded(mesh_shape)
    acc, optimizer = gradacc.GradientAccumulator(net, **options), torch.optim.SGD(net.parameters(), lr=1.0)
    if attach:
        acc.attach(net)
    size = dist.get_world_size()
    for batch in batches(*range(1, 2 * size + 1))[2 * rank : 2 * rank + 2]:
        if attach:
            with acc.micro_batch(weight=len(batch), scale=1):
                net(batch).square().sum().backward()
        else:
            net(batch).square().sum().backward()
            acc.add(net, weight=len(batch), scale=1)
    grads = acc.take(dist.group.WORLD)
    norm = grads.clip_(0.05)
    grads.assign_to(net)
    optimizer.step()
    return norm, grads.weight, {name: p.full_tensor().detach().numpy() for name, p in net.named_parameters()}


def assert_stepped(answers, size):
    net, given = network(4, 5, 1), batches(*range(1, 2 * size + 1))
    expected = full_batch(net, given)
    norm = torch.nn.utils.get_total_norm(expected).item()
    stepped = [p.detach() - g * min(1, 0.05 / norm) for p, g in zip(net.parameters(), expected, strict=True)]
    for reached, weight, parameters in answers:
        assert reached == pytest.approx(norm, rel=1e-4)
        assert weight == sum(map(len, given))
        assert_gradients(parameters, stepped)


@pytest.mark.parametrize("options", [{}, {"backend": "torch"}], ids=str)
@pytest.mark.parametrize("attach", [False, True])
def test_fsdp_steps_on_the_token_mean_clipped_by_the_norm_of_all_shards(three, attach, options):
    assert_stepped(three(fsdp_step, attach, options, (3,)), 3)


def test_fsdp_with_replicas_counts_each_shard_once(two):
    """Two replicas of one shard each."""
    assert_stepped(two(fsdp_step, False, {}, (2, 1)), 2)


def fsdp_beside_plain(rank):
    """A scale of a head that is not sharded, and whose gradients nobody has averaged."""
    net, head = sharded((2,)), nn.Parameter(torch.ones(()))
    acc = gradacc.GradientAccumulator([*net.named_parameters(), ("head", head)])
    for batch in batches(1, 2, 3, 4)[2 * rank : 2 * rank + 2]:
        (net(batch).square() * head).sum().backward()
        acc.add({**{name: p.grad for name, p in net.named_parameters()}, "head": head.grad}, len(batch), scale=1)
        net.zero_grad()
        head.grad = None
    grads = acc.take(dist.group.WORLD)
    return grads.norm(), grads.numpy()


def test_sharded_beside_plain_parameters(two):
    net, head, given = network(4, 5, 1), nn.Parameter(torch.ones(())), torch.cat(batches(1, 2, 3, 4))
    parameters = [*net.parameters(), head]
    expected = torch.autograd.grad((net(given).square() * head).mean(), parameters)
    answers = two(fsdp_beside_plain)
    shards = [[arrays[id] for _, arrays in answers] for id in list(answers[0][1])[:-1]]
    assert_gradients(dict(enumerate(map(np.concatenate, shards))), expected[:-1])
    for norm, arrays in answers:
        assert norm == pytest.approx(torch.nn.utils.get_total_norm(expected).item(), rel=1e-4)
        np.testing.assert_allclose(arrays["head"], expected[-1].item(), rtol=1e-4)


def fsdp_scales(rank, scales, resume):
    net = sharded((2,))
    acc = gradacc.GradientAccumulator(net)
    for batch, scale in zip(batches(3, 3), scales[rank], strict=True):
        mean_loss(net, batch).backward()
        acc.add(net, weight=3, scale=scale)
    if resume:
        other = gradacc.GradientAccumulator(net)
        other.load_state_dict(acc.state_dict())
        acc = other
    taken = outcome(acc)
    return taken if isinstance(taken, tuple) else None


@pytest.mark.parametrize(("scales", "refused"), [([[1, 2], [1, 2]], False), ([[1, 2], [2, 1]], True)])
def test_scales_that_differ_between_ranks_are_refused_on_all(two, scales, refused):
    for answer in two(fsdp_scales, scales, False):
        assert (answer is not None) == refused
        assert not refused or "scale=1" in answer[1]


def fsdp_late_scales(rank):
    net = sharded((2,))
    acc = gradacc.GradientAccumulator(net, backend="torch")
    for value in (2.0, 3.0):
        mean_loss(net, batches(3)[0]).backward()
        weight = torch.tensor(value)
        acc.add(net, weight)
        weight.zero_()
    return acc.take(dist.group.WORLD).weight


def test_scales_that_only_the_device_knows(two):
    assert two(fsdp_late_scales) == [10.0, 10.0]


def fsdp_refusals(rank):
    net, messages = sharded((2,)), []
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    empty = gradacc.GradientAccumulator({}, on_nonfinite="skip")
    for refused in (
        lambda: gradacc.GradientAccumulator(net, on_nonfinite="skip"),
        lambda: empty.register("w", net[0].weight),
        lambda: AccumulatingOptimizer(inner, every=1, max_norm=1.0),
    ):
        try:
            refused()
        except gradacc.ArgumentError as error:
            messages.append(str(error))
    plain = AccumulatingOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), every=1, max_norm=1.0)
    try:
        plain.add_param_group({"params": list(net.parameters())})
    except gradacc.ArgumentError as error:
        messages.append(str(error))
    return messages, len(empty.ids), len(plain.param_groups)


def test_what_one_process_would_decide_by_its_own_shards_is_refused(two):
    for messages, ids, groups in two(fsdp_refusals):
        assert [message.split(":")[0] for message in messages] == ["on_nonfinite"] * 2 + ["max_norm"] * 2
        assert (ids, groups) == (0, 1)


def fsdp_optimizer(rank):
    net = sharded((2,))
    optimizer = AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), every=2)
    for batch in batches(3, 3, 3, 3)[2 * rank : 2 * rank + 2]:
        mean_loss(net, batch).backward()
        optimizer.step()
    return {name: p.full_tensor().detach().numpy() for name, p in net.named_parameters()}


def test_an_accumulating_optimizer_over_shards(two):
    net, given = network(4, 5, 1), batches(3, 3, 3, 3)
    expected = full_batch(net, given)
    for parameters in two(fsdp_optimizer):
        assert_gradients(parameters, [p.detach() - g for p, g in zip(net.parameters(), expected, strict=True)])


def fsdp_without_group(rank):
    net = sharded((2,))
    acc = gradacc.GradientAccumulator(net)
    mean_loss(net, batches(3)[0]).backward()
    acc.add(net, weight=3)
    return {name: array.shape for name, array in acc.take().numpy().items()}


def test_without_a_group_there_are_local_shards_and_no_exchange(two):
    first, second = two(fsdp_without_group)
    assert (first["0.weight"], second["0.weight"]) == ((3, 4), (2, 4))
    assert (first["2.bias"], second["2.bias"]) == ((1,), (0,))


def other_group(rank):
    net, alone = sharded((2,)), [dist.new_group([0]), dist.new_group([1])][rank]
    acc = gradacc.GradientAccumulator(net)
    mean_loss(net, batches(3)[0]).backward()
    acc.add(net)
    try:
        take(acc, alone)
    except gradacc.GradaccError as error:
        return str(error)


def test_the_group_is_that_of_the_shards(two):
    for message in two(other_group):
        assert "ranks it is sharded over, (0, 1)" in message
