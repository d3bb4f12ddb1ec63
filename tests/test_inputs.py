"""Gradients in every form they may come in: arrays, DLPack of both kinds, mappings and sequences."""

import collections
import contextlib
import gc
import sys
import threading
import types

import gradacc
import ml_dtypes
import numpy as np
import producer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producer import Producer, alive, capsule

BASE = np.arange(1.0, 121.0, dtype=np.float32)

VIEWS = {
    "contiguous": BASE.reshape(4, 30),
    "transposed": BASE.reshape(4, 5, 6).transpose(2, 0, 1),
    "columns": BASE.reshape(10, 12)[:, 1::3],
    "backwards": BASE[::-2],
    "expanded": np.broadcast_to(BASE[:3, None], (3, 4)),
    "no dimensions": BASE[7:8].reshape(()),
    "zero size": np.zeros((4, 0), np.float32),
    "not aligned": np.frombuffer(b"?" + BASE.tobytes(), np.float32, offset=1),
    "numpy scalar": np.float32(2.5),
    "float16": BASE.reshape(4, 30).astype(np.float16).T,
    "float64": BASE.reshape(4, 30).astype(np.float64).T,
    "bfloat16": BASE.reshape(4, 30).astype(ml_dtypes.bfloat16).T,
}


@pytest.mark.parametrize("g", VIEWS.values(), ids=VIEWS)
def test_numpy_arrays_are_read_in_logical_order(g):
    acc = gradacc.GradientAccumulator({"w": g})
    acc.add({"w": g})
    acc.add({"w": g}, scale=2)
    result = acc.take().numpy()["w"]
    assert result.shape == np.shape(g)
    np.testing.assert_array_equal(result, (np.asarray(g, np.float64) * 1.5).astype(result.dtype))


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    flips=st.lists(st.booleans(), min_size=4, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_any_strides(shape, order, flips, steps):
    axes = list(range(len(shape)))
    order.shuffle(axes)
    space = np.random.default_rng(0).normal(size=[shape[axis] * steps[axis] for axis in axes]).astype(np.float32)
    g = space[tuple(slice(None, None, steps[axis]) for axis in axes)].transpose(np.argsort(axes))
    g = g[tuple(slice(None, None, -1 if flip else 1) for flip, _ in zip(flips, shape, strict=False))]
    assert g.shape == shape
    acc = gradacc.GradientAccumulator({"w": (shape, "float32")})
    acc.add({"w": g})
    np.testing.assert_array_equal(acc.take().numpy()["w"], g)


def test_large_tensors_of_every_layout():
    """More than one chunk, with an odd end, on more than one thread."""
    n = 2**20 + 3
    g = np.arange(n, dtype=np.float32) % 1024
    wide = g[: n // 3 * 3].reshape(-1, 3)
    acc = gradacc.GradientAccumulator({"g": g, "t": wide.T})
    for weight in (1, 3):
        acc.add({"g": g, "t": wide.T}, weight)
    grads = acc.take()
    np.testing.assert_array_equal(grads.numpy()["g"], g)
    np.testing.assert_array_equal(grads.numpy()["t"], wide.T)
    squares = np.sum(g.astype(np.float64) ** 2) + np.sum(wide.astype(np.float64) ** 2)
    assert grads.norm() == pytest.approx(np.sqrt(squares), rel=1e-12)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("form", ["capsule", "producer"])
def test_dlpack_of_both_kinds(form, versioned):
    def given(array, **options):
        make = capsule if form == "capsule" else Producer
        return make(array, versioned=versioned, **options)

    acc = gradacc.GradientAccumulator({"f": ((3, 2), "float32"), "b": ((4,), "bfloat16")})
    array = np.arange(6, dtype=np.float32)
    acc.add({"f": given(array, shape=(3, 2), strides=(1, 3)), "b": given(producer.bf16_bits([1, -2, 0.5, 3]), code=4)})
    assert alive == {}
    grads = acc.take().numpy()
    np.testing.assert_array_equal(grads["f"], array.reshape(2, 3).T)
    assert grads["b"].tolist() == [1.0, -2.0, 0.5, 3.0]


REFUSED = {
    "another device": (gradacc.GradaccError, "device", {"device": 2}),
    "dtype": (gradacc.DtypeError, "int32", {"code": producer.INT}),
    "bits": (gradacc.DtypeError, "float8", {"bits": 8}),
    "shape": (gradacc.ShapeError, r"\(2, 1\)", {"shape": (2, 1)}),
    "negative size": (gradacc.GradaccError, "negative size", {"shape": (-2,)}),
    "negative rank": (gradacc.GradaccError, "negative number", {"ndim": -1}),
    "no memory": (gradacc.GradaccError, "no memory", {"data": 0}),
    "another major version": (gradacc.GradaccError, "DLPack 1", {"major": 2}),
}


@pytest.mark.parametrize(("error", "message", "options"), REFUSED.values(), ids=REFUSED)
def test_refused_capsules_are_released(error, message, options):
    acc = gradacc.GradientAccumulator({"layer.weight": ((2,), "float32")})
    with pytest.raises(error, match=f"layer.weight.*{message}"):
        acc.add({"layer.weight": capsule(np.ones(2, np.float32), versioned=True, **options)})
    assert alive == {}
    assert acc.count == 0


@pytest.mark.engine
def test_subclass_of_a_torch_tensor_that_has_no_memory():
    torch = pytest.importorskip("torch")

    class Wrapper(torch.Tensor):
        """As DTensor does, it keeps its values elsewhere."""

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return NotImplemented

    empty = torch.Tensor._make_wrapper_subclass(Wrapper, (2,), dtype=torch.float32)
    acc = gradacc.GradientAccumulator({"layer.weight": ((2,), "float32")})
    with pytest.raises(gradacc.GradaccError, match=r"layer.weight"):
        acc.add({"layer.weight": empty})
    assert acc.count == 0


def test_capsule_is_consumed_once():
    acc, once = gradacc.GradientAccumulator({"w": ((2,), "float32")}), capsule(np.ones(2, np.float32), versioned=True)
    acc.add({"w": once})
    with pytest.raises(gradacc.GradaccError, match=r"w.*consumed before"):
        acc.add({"w": once})
    assert acc.count == 1


class Failing:
    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, **_):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_producer_that_fails():
    acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
    with pytest.raises(gradacc.GradaccError, match=r"w.*on purpose") as caught:
        acc.add({"w": Failing(BufferError("on purpose"))})
    assert isinstance(caught.value.__cause__, BufferError)
    with pytest.raises(gradacc.GradaccError, match=r"w.*returned int"):
        acc.add({"w": Failing(7)})


def test_producer_that_calls_back():
    """No lock is held while it runs."""

    class Curious(Producer):
        def __dlpack__(self, **options):
            assert acc.count == 0
            acc.add({"w": self.array})
            return super().__dlpack__(**options)

    acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
    acc.add({"w": Curious(np.ones(2, np.float32))})
    assert acc.count == 2


@pytest.mark.parametrize(
    "array",
    [BASE.astype(">f4" if sys.byteorder == "little" else "<f4"), BASE.astype(np.longdouble), BASE.astype(object)],
    ids=["foreign byte order", "extended precision", "objects"],
)
def test_numpy_dtypes_that_are_refused(array):
    acc = gradacc.GradientAccumulator({"w": ((120,), "float32")})
    with pytest.raises(gradacc.DtypeError, match=r"w.*float32.*got"):
        acc.add({"w": array})


def test_packed_record_is_refused_with_advice():
    field = np.array([(0, x) for x in BASE], [("tag", "u1"), ("x", "f4")])["x"]
    acc = gradacc.GradientAccumulator({"w": ((120,), "float32")})
    with pytest.raises(gradacc.GradaccError, match="ascontiguousarray"):
        acc.add({"w": field})
    acc.add({"w": np.ascontiguousarray(field)})
    np.testing.assert_array_equal(acc.take().numpy()["w"], BASE)


MAPPINGS = [
    dict,
    collections.OrderedDict,
    types.MappingProxyType,
    collections.ChainMap,
    lambda mapping: dict(reversed(mapping.items())),
    lambda mapping: list(mapping.values()),
    lambda mapping: tuple(mapping.values()),
]


@pytest.mark.parametrize("make", MAPPINGS)
def test_mappings_and_sequences(make):
    acc = gradacc.GradientAccumulator([("z", BASE[:2]), (3, BASE[:1])])
    acc.add(make({"z": BASE[:2], 3: BASE[4:5]}))
    grads = acc.take().numpy()
    assert {id: array.tolist() for id, array in grads.items()} == {"z": [1.0, 2.0], 3: [5.0]}


def test_gradients_are_only_read_and_not_kept():
    g = BASE[:3].copy()
    g.flags.writeable = False
    before = sys.getrefcount(g)
    acc = gradacc.GradientAccumulator({"w": g})
    acc.add({"w": g}, 3)
    gc.collect()
    assert sys.getrefcount(g) == before
    assert acc.take().numpy()["w"].tolist() == [1.0, 2.0, 3.0]


def test_gradients_of_a_window_are_a_micro_batch():
    inner, outer = (gradacc.GradientAccumulator({"w": ((2,), "float32")}) for _ in range(2))
    for values in ([1.0, 1.0], [3.0, 5.0, 7.0]):
        for value in values:
            inner.add({"w": np.full(2, value, np.float32)})
        grads = inner.take()
        outer.add(grads, grads.weight)
    assert outer.take().numpy()["w"].tolist() == np.full(2, 3.4, np.float32).tolist()


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype(np.float64), "f8", "d"], ids=str)
def test_dtypes_by_any_name(dtype):
    acc = gradacc.GradientAccumulator({"w": ((2,), dtype)})
    acc.add({"w": np.ones(2)})
    assert acc.take()["w"].dtype == "float64"


class Reentrant:
    """A tensor whose `__dlpack__` uses the accumulator it is added to."""

    def __init__(self, array, use):
        self.array, self.use = array, use

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.use()
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_tensor_that_uses_the_accumulator_while_it_is_looked_at(in_parts):
    """No lock is held then: such a call is as good as one that came before."""
    one = np.ones(2, np.float32)

    def add(acc, use):
        tensor = {"w": Reentrant(one, use)}
        if not in_parts:
            return acc.add(tensor)
        with acc.micro_batch():
            acc.add_part(tensor)
        return acc.complete

    def plain():
        return gradacc.GradientAccumulator({"w": ((2,), "float32")}, every=2)

    acc = plain()
    for use in (lambda: acc.count, lambda: acc.register("late", ((2,), "float32")), lambda: repr(acc)):
        acc.reset()
        assert add(acc, use) is False
    if in_parts:
        for use in (lambda: acc.add({"w": one}), acc.take, acc.state_dict):
            with pytest.raises(gradacc.GradaccError, match="micro-batch is open"):
                add(acc, use)
            assert acc.count == 1
        return
    assert add(plain(), lambda: None) is False
    acc = plain()
    assert add(acc, lambda: acc.add({"w": one})) is True
    assert acc.take().numpy()["w"].tolist() == [1, 1]
    acc.add({"w": one})
    with pytest.raises(gradacc.WindowError, match="complete"):
        add(acc, lambda: acc.add({"w": one * 3}))
    assert acc.take().numpy()["w"].tolist() == [2, 2]


def test_eight_threads_that_use_everything_at_once():
    acc = gradacc.GradientAccumulator({"w": ((1 << 15,), "float32")}, every=lambda window: 1 << 20)
    one = np.ones(1 << 15, np.float32)
    failures, each = [], 50

    def work():
        try:
            for _ in range(each):
                acc.add({"w": one}, weight=2)
                assert acc.state_dict()["count"] >= 1
                assert acc.every == 1 << 20
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    grads = acc.take()
    assert (grads.count, grads.weight) == (8 * each, 16.0 * each)
    assert (grads.numpy()["w"] == 1).all()


def test_what_claims_to_be_very_long():
    acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
    for wrong in (range(10**18), np.broadcast_to(np.float32(0), 10**13)):
        with pytest.raises(TypeError, match="grads"):
            acc.add(wrong)


def test_memory_that_is_freed_while_another_gradient_is_looked_at():
    torch = pytest.importorskip("torch")
    t = torch.ones(1 << 22)

    class Evil:
        def __dlpack__(self, **options):
            t.set_(torch.ones(1))
            return torch.ones(2).__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

    acc = gradacc.GradientAccumulator({"t": ((1 << 22,), "float32"), "evil": ((2,), "float32")})
    with contextlib.suppress(gradacc.GradaccError):  # its shape is another by then
        acc.add({"t": t, "evil": Evil()})
        acc.take()
