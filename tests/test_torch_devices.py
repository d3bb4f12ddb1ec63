"""Sums that torch keeps: on its CPU device, which every machine has, and on CUDA, where there is one."""

import gc

import gradacc
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::item"}


class NeverWaits(TorchDispatchMode):
    """Fails where the host would wait for a device to know a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        assert name not in WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def accumulator(params, **options):
    return gradacc.GradientAccumulator(params, **{"backend": "torch", **options})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_every_dtype_agree_with_float64(dtype, device):
    torch.manual_seed(0)
    gradients = [torch.randn(5, 7, device=device).to(dtype) for _ in range(4)]
    acc = accumulator({"w": gradients[0]})
    for weight, g in enumerate(gradients, 1):
        acc.add({"w": g.T.contiguous().T}, weight)
    result = acc.take().torch()["w"]
    expected = sum(g.double() * weight for weight, g in enumerate(gradients, 1)) / 10
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.device.type == device
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", ["meta", *DEVICES])
@pytest.mark.parametrize("attach", [False, True])
def test_an_add_waits_for_no_device(attach, device):
    """On "meta" there are no values: whoever asks for one gets an error."""
    net = nn.Linear(3, 2).to(device)
    acc = accumulator(net, micro_norms=True)
    if attach:
        acc.attach(net)
    weights = [torch.tensor(2.0, device=device), torch.tensor([3], device=device), torch.tensor(0, device=device)]
    batch = torch.ones(1, 3, device=device)
    for weight in weights:
        loss = net(batch).sum()
        with NeverWaits():
            if attach:
                with acc.micro_batch(weight):
                    loss.backward()
            else:
                loss.backward()
                acc.add(net, weight)
    assert acc.count == 3
    if device == "meta":
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            acc.last  # noqa: B018
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            acc.take()
    else:
        assert acc.last.finite
        assert acc.weight == 5.0
        assert acc.take().torch()["weight"].eq(1).all()


def test_weights_and_scales_that_only_the_device_knows():
    acc, one = accumulator({"w": torch.zeros(2)}), torch.ones(2)
    acc.add({"w": one * torch.nan}, torch.tensor(0.0))  # masked: not looked at
    acc.add({"w": one * 4}, torch.tensor(2.0), scale=1)
    acc.add({"w": one * 8}, 2, scale=torch.tensor(0.5, dtype=torch.float64))
    acc.add({"w": one}, torch.tensor(1.0), scale=torch.tensor(-1.0))
    state = acc.state_dict()
    assert (acc.weight, state["weight"]) == (5.0, 5.0)
    assert acc.take().numpy()["w"].tolist() == [np.float32(7 / 5)] * 2
    acc.add({"w": one}, torch.tensor(7.0))
    acc.reset()
    acc.add({"w": one}, torch.tensor(3.0))
    assert acc.take().weight == 3.0


def test_late_weights_are_those_at_the_time_of_the_call():
    acc, one = accumulator({"w": torch.zeros(2)}), torch.ones(2)
    weight = torch.tensor(2.0)
    acc.add({"w": one}, weight)
    with acc.micro_batch(weight, scale=weight):
        weight.fill_(100.0)
        acc.add_part({"w": one})
    assert acc.take().weight == 4.0


def test_a_state_that_is_loaded_replaces_late_weights_and_scales(tmp_path):
    acc, one = accumulator({"w": torch.zeros(2)}), torch.ones(2)
    acc.add({"w": one}, 3)
    state, path = acc.state_dict(), tmp_path / "window.safetensors"
    acc.save(path)
    for load in (lambda: acc.load_state_dict(state), lambda: acc.load(path)):
        acc.add({"w": one}, torch.tensor(7.0))
        load()
        assert acc.weight == 3.0
        micro_batch = acc.micro_batch(torch.tensor(7.0))
        micro_batch.__enter__()
        load()
        acc.add({"w": one}, 1)
        assert acc.take().torch()["w"].tolist() == [1.0, 1.0]


def test_weights_that_could_not_be_read_are_asked_for_again():
    acc = accumulator({"w": torch.zeros(2)})
    acc.add({"w": torch.ones(2)}, torch.tensor(2.0, device="meta"), scale=1)
    for _ in range(2):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            acc.take()
    assert acc.count == 1


def test_what_was_refused_does_not_vouch_for_what_comes_next():
    acc = accumulator({"w": torch.zeros(2)}, on_nonfinite="raise")
    with pytest.raises(gradacc.NonFiniteError):
        acc.add({"w": torch.full((2,), torch.nan)})
    with pytest.raises(gradacc.NonFiniteError), acc.micro_batch():
        acc.add_part({"w": torch.full((2,), torch.nan)})


class Fails(TorchDispatchMode):
    """Lets torch fail in an operation of a name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().startswith(self.name):
            raise MemoryError("on purpose")
        return function(*args, **(kwargs or {}))


def add_ones(acc, parts):
    ones = {"old": torch.ones(2), "new": torch.ones(2)}
    if not parts:
        return acc.add(ones)
    with acc.micro_batch():
        acc.add_part(ones)


@pytest.mark.parametrize("parts", [False, True])
def test_an_add_that_fails_half_way_breaks_the_window(parts):
    acc = accumulator({"old": torch.zeros(2), "new": torch.zeros(2)})
    acc.add({"old": torch.ones(2)})
    with pytest.raises(MemoryError), Fails("aten::_foreach_add_"):
        add_ones(acc, parts)
    with pytest.raises(gradacc.WindowError, match="reset"):
        acc.take()
    acc.reset()
    acc.add({"old": torch.ones(2)})
    assert acc.take().torch()["old"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("parts", [False, True])
def test_an_add_that_fails_before_it_writes_changes_nothing(parts):
    acc = accumulator({"old": torch.zeros(2), "new": torch.zeros(2)})
    acc.add({"old": torch.ones(2)})
    with pytest.raises(MemoryError), Fails("aten::_foreach_norm"):
        add_ones(acc, parts)
    assert acc.take().torch()["old"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_turns_out_to_be_wrong_breaks_the_window(wrong):
    acc = accumulator({"w": torch.zeros(2)})
    acc.add({"w": torch.ones(2)}, torch.tensor(wrong))
    with pytest.raises(gradacc.ArgumentError, match="weight"):
        acc.take()
    with pytest.raises(gradacc.WindowError, match="reset"):
        acc.take()
    acc.reset()
    acc.add({"w": torch.ones(2)})
    assert acc.take().torch()["w"].tolist() == [1, 1]
    with pytest.raises(gradacc.ArgumentError, match=r"weight: .*\(2,\)"):
        acc.add({"w": torch.ones(2)}, torch.ones(2))


def test_a_budget_of_tokens_needs_to_know_the_weight():
    acc = accumulator({"w": torch.zeros(2)}, until_weight=5)
    assert not acc.add({"w": torch.ones(2)}, torch.tensor(3.0))
    assert acc.add({"w": torch.ones(2)}, torch.tensor(3.0))


def test_backends_and_devices_that_make_no_sense():
    for options in ({"backend": "cuda"}, {"device": "gpu"}, {"backend": "torch", "device": "cpu"}):
        with pytest.raises(gradacc.ArgumentError, match=r"backend|device"):
            gradacc.GradientAccumulator({"w": torch.zeros(2)}, **options)


def test_the_environment_sets_the_default(monkeypatch):
    monkeypatch.setenv("GRADACC_BACKEND", "nothing")
    with pytest.raises(gradacc.ArgumentError, match="nothing"):
        gradacc.GradientAccumulator({"w": torch.zeros(2)})
    gradacc.GradientAccumulator({"w": torch.zeros(2)}, backend="engine")


def test_arrays_of_others_are_copied_for_torch():
    acc = accumulator({"w": ((2, 3), "float32"), "n": ((), "float64")})
    array = np.arange(6, dtype=np.float16).reshape(3, 2)
    array.flags.writeable = False
    acc.add({"w": array.T[::-1], "n": np.float32(3)})
    result = acc.take().numpy()
    assert result["w"].tolist() == array.T[::-1].tolist()
    assert result["n"] == 3


def test_one_window_over_both_stores():
    """`late` is the only one whose gradients are torch's: those of "meta", a device without elements."""
    acc = gradacc.GradientAccumulator({"here": ((2,), "float32"), "there": ((2,), "float32")}, backend="auto")
    acc.add({"here": torch.ones(2), "there": torch.ones(2, device="meta")})
    with pytest.raises(gradacc.GradaccError, match=r"there: expected a gradient on meta.*got one on cpu"):
        acc.add({"here": torch.full((2,), 9.0), "there": torch.ones(2)})
    with pytest.raises(gradacc.GradaccError, match=r"here: expected a gradient on cpu.*got one on meta"):
        acc.add({"here": torch.ones(2, device="meta")})
    acc.add({"here": torch.full((2,), 3.0)})
    grads = acc.take()
    assert list(grads) == ["here", "there"]
    assert (grads.count, grads["here"].shape, grads["there"].shape) == (2, (2,), (2,))
    assert grads.torch()["here"].tolist() == [2.0, 2.0]
    assert grads.torch()["there"].device.type == "meta"
    acc.add({"there": torch.ones(2)})  # in the next window it may come from elsewhere
    assert acc.take().torch()["there"].tolist() == [1.0, 1.0]


def test_the_engine_alone_refuses_other_devices():
    acc = gradacc.GradientAccumulator({"w": torch.zeros(2)}, backend="engine")
    with pytest.raises(gradacc.GradaccError, match="w: "):
        acc.add({"w": torch.ones(2, device="meta")})


@pytest.mark.parametrize("device", DEVICES)
def test_scaling_after_a_hand_over_goes_into_new_memory(device):
    acc = accumulator({"w": torch.zeros(3, device=device), "b": torch.zeros((), device=device)})
    acc.add({"w": torch.full((3,), 4.0, device=device), "b": torch.tensor(2.0, device=device)}, 2)
    grads = acc.take()
    before = grads.torch()["w"]
    assert torch.from_dlpack(grads["w"]).data_ptr() == before.data_ptr()
    assert grads.clip_(1.0) == pytest.approx(52**0.5)
    after = grads.torch()["w"]
    assert before.tolist() == [4, 4, 4]
    torch.testing.assert_close(after, before / 52**0.5, rtol=1e-5, atol=0)
    assert [len(flat) for flat in grads.flat()] == [32]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_a_window_goes_with_its_gradients(device):
    acc, held = accumulator({"w": torch.zeros(5, device=device)}), []
    for window in range(4):
        acc.add({"w": torch.full((5,), float(window), device=device)})
        held.append(acc.take().torch()["w"])
    gc.collect()
    assert [g[0].item() for g in held] == [0, 1, 2, 3]


def test_a_parameter_that_torch_refuses_to_look_at_changes_nothing():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    strange = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), dtype=torch.float32)
    acc = accumulator({"a": torch.zeros(2), "b": torch.zeros(2)})
    acc.add({"a": torch.ones(2)})
    with pytest.raises(TypeError):
        acc.add({"a": torch.full((2,), 9.0), "b": strange})
    assert acc.count == 1
    assert acc.take().torch()["a"].tolist() == [1, 1]


def test_a_call_out_of_torchs_store_is_refused_and_does_not_hang():
    acc, one = accumulator({"w": torch.zeros(2)}), torch.ones(2)

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            with pytest.raises(gradacc.GradaccError, match="in use"):
                acc.reset()
            return function(*args, **(kwargs or {}))

    with Calls():
        acc.add({"w": one})
    assert acc.take().torch()["w"].tolist() == [1, 1]


@pytest.mark.cuda
def test_gradients_of_cuda_go_to_their_device_by_themselves():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2).cuda())
    acc = gradacc.GradientAccumulator(net, backend="auto")
    batch = torch.randn(6, 4)
    for part in batch.split([4, 2]):
        net[1](net[0](part).cuda()).square().mean().backward()
        acc.add(net, weight=len(part))
    grads = acc.take()
    assert [t.device.type for t in grads.torch().values()] == ["cpu", "cpu", "cuda", "cuda"]
    expected = torch.autograd.grad(net[1](net[0](batch).cuda()).square().mean(), list(net.parameters()))
    for result, gradient in zip(grads.torch().values(), expected, strict=True):
        torch.testing.assert_close(result, gradient)
    grads.assign_to(net)
    assert all(p.grad.device == p.device for p in net.parameters())


@pytest.mark.cuda
def test_a_late_scale_goes_to_the_devices_of_the_gradients():
    acc = gradacc.GradientAccumulator({"here": torch.zeros(2), "there": torch.zeros(2, device="cuda")}, backend="torch")
    for device in ("cpu", "cuda"):
        weight = torch.tensor(2.0, device=device)
        acc.add({"here": torch.ones(2), "there": torch.ones(2, device="cuda")}, weight)
    assert [t.tolist() for t in acc.take().torch().values()] == [[1.0, 1.0]] * 2


@pytest.mark.cuda
def test_gradients_of_cuda_may_be_summed_in_host_memory():
    net = nn.Linear(4, 2).cuda()
    acc = gradacc.GradientAccumulator(net, device="cpu")
    acc.attach(net)
    for value in (1.0, 3.0):
        with acc.micro_batch():
            net(torch.full((1, 4), value, device="cuda")).sum().backward()
    grads = acc.take()
    assert {t.device.type for t in grads.torch().values()} == {"cpu"}
    assert grads.torch()["weight"].eq(2).all()


@pytest.mark.cuda
def test_nothing_is_waited_for_on_cuda():
    acc = gradacc.GradientAccumulator({"w": torch.zeros(1000, device="cuda")})
    weight, gradient = torch.tensor(2.0, device="cuda"), torch.ones(1000, device="cuda")
    acc.add({"w": gradient}, weight)
    torch.cuda.set_sync_debug_mode("error")
    try:
        acc.add({"w": gradient}, weight)
        acc.add({"w": gradient})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert acc.weight == 5
