"""What `take` hands over: a mapping, zero-copy, for as long as anybody holds it."""

import gc
import threading
from collections.abc import Mapping

import gradacc
import ml_dtypes
import numpy as np
import pytest

PARAMS = {"a": ((3, 5), "float32"), "d": ((6,), "float64"), "s": ((), "float32"), "h": ((9,), "float16")}


def window(**options):
    acc = gradacc.GradientAccumulator(PARAMS, **options)
    for value in (1, 3):
        acc.add({id: np.full(shape, value, dtype) for id, (shape, dtype) in PARAMS.items()})
    return acc.take()


def address(array):
    return array.__array_interface__["data"][0]


def test_mapping():
    grads = window()
    assert isinstance(grads, Mapping)
    assert list(grads) == list(PARAMS)
    assert len(grads) == 4
    assert {id: (gradient.shape, gradient.dtype) for id, gradient in grads.items()} == {
        "a": ((3, 5), "float32"),
        "d": ((6,), "float64"),
        "s": ((), "float32"),
        "h": ((9,), "float32"),
    }
    assert "a" in grads
    assert "nobody" not in grads
    assert grads.get("nobody") is None
    with pytest.raises(KeyError, match="nobody"):
        grads["nobody"]
    assert "4 parameters, 2 micro-batches" in repr(grads)
    assert repr(grads["a"]) == "Gradient(shape=(3, 5), dtype=float32)"


@pytest.mark.parametrize("id", PARAMS)
def test_every_export_is_the_same_memory(id):
    grads = window()
    arrays = [grads.numpy()[id], np.asarray(grads[id]), np.from_dlpack(grads[id])]
    assert len({address(array) for array in arrays}) == 1
    for array in arrays:
        assert array.flags.writeable
        assert (array == 2).all()
    assert address(arrays[0]) % 64 == 0


@pytest.mark.engine
def test_array_protocol():
    gradient = window()["a"]
    assert np.asarray(gradient, np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(gradient), np.asarray(gradient))
    assert np.shares_memory(np.array(gradient, copy=False), np.asarray(gradient))
    with pytest.raises(ValueError, match="without a copy"):
        np.array(gradient, np.float64, copy=False)


@pytest.mark.engine
def test_dlpack_arguments():
    gradient = window()["a"]
    copy = np.from_dlpack(gradient, copy=True)
    assert (copy == 2).all()
    assert not np.shares_memory(copy, np.asarray(gradient))
    assert "dltensor_versioned" in repr(gradient.__dlpack__(max_version=(1, 0)))
    assert "versioned" not in repr(gradient.__dlpack__())
    assert "versioned" not in repr(gradient.__dlpack__(max_version=(0, 8)))
    assert gradient.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="dl_device"):
        gradient.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="stream"):
        gradient.__dlpack__(stream=1)


def test_flat():
    grads = window()
    flats = grads.flat()
    assert [(flat.ndim, flat.dtype.name) for flat in flats] == [(1, "float32"), (1, "float64")]
    for array in grads.numpy().values():
        assert sum(np.shares_memory(flat, array) for flat in flats) == 1
    assert flats[0].sum() == 2 * (15 + 1 + 9)


def test_bfloat16_sums_in_every_form():
    acc = gradacc.GradientAccumulator({"w": ((3,), ml_dtypes.bfloat16)}, dtype="bfloat16")
    acc.add({"w": np.array([1.0, 2.0, 3.0], ml_dtypes.bfloat16)})
    grads = acc.take()
    assert grads["w"].dtype == "bfloat16"
    assert grads.numpy()["w"].dtype == ml_dtypes.bfloat16
    assert grads.flat()[0][:3].tolist() == [1.0, 2.0, 3.0]
    assert grads.torch()["w"].tolist() == grads.jax()["w"].tolist() == [1.0, 2.0, 3.0]


def test_norm_clip_and_scale():
    acc = gradacc.GradientAccumulator({"a": ((), "float32"), "b": ((), "float64")})
    acc.add({"a": np.array(6.0, np.float32), "b": np.array(8.0)}, 2, scale=1)
    grads = acc.take()
    assert grads.clip_(100) == grads.norm() == 5.0
    assert grads.clip_(np.float32(1.0)) == 5.0
    assert grads.norm() == pytest.approx(1.0, rel=1e-6)
    grads.scale_(10)
    assert {id: float(array) for id, array in grads.numpy().items()} == pytest.approx({"a": 6.0, "b": 8.0}, rel=1e-5)
    for wrong in (-1, float("nan")):
        with pytest.raises(gradacc.ArgumentError, match="max_norm"):
            grads.clip_(wrong)
    with pytest.raises(gradacc.ArgumentError, match="factor"):
        grads.scale_(float("inf"))


def test_earlier_exports_keep_their_values():
    grads = window()
    before = grads.numpy()["a"]
    grads.scale_(0.5)
    after = grads.numpy()["a"]
    assert (before == 2).all()
    assert (after == 1).all()


def test_scaling_after_an_export_and_a_late_registration():
    acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
    acc.add({"w": np.ones(2, np.float32)})
    grads = acc.take()
    before = grads.numpy()["w"]
    acc.register("late", ((200,), "float32"))
    grads.scale_(2)
    assert grads.numpy()["w"].tolist() == [2.0, 2.0]
    assert before.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("how", ["flat", "masked"])
def test_what_a_holder_wrote_is_zero_where_the_next_window_sees_nothing(how):
    acc = gradacc.GradientAccumulator({"a": ((20,), "float32"), "b": ((3,), "float32")})
    acc.add({"b": np.ones(3, np.float32)})
    if how == "masked":
        acc.add({"a": np.ones(20, np.float32)}, 0)
    grads = acc.take()
    (grads.flat()[0] if how == "flat" else grads.numpy()["a"])[:] = np.nan
    del grads
    gc.collect()
    acc.add({"b": np.full(3, 5, np.float32)})
    flat = acc.take().flat()[0]
    assert acc._core.mapped_buffers == 1
    assert flat.sum() == 15


def test_exports_outlive_everything():
    acc = gradacc.GradientAccumulator({"w": ((100_000,), "float32")})
    g = np.arange(100_000, dtype=np.float32)
    acc.add({"w": g})
    grads = acc.take()
    exports = [grads["w"], grads.numpy()["w"], np.from_dlpack(grads["w"]), grads.flat()[0][:100_000]]
    del acc, grads
    gc.collect()
    noise = [np.full(100_000, np.nan, np.float32) for _ in range(8)]
    for export in exports:
        np.testing.assert_array_equal(np.asarray(export), g)
    assert len(noise) == 8


def test_held_windows_do_not_change_and_a_steady_state_maps_nothing():
    acc = gradacc.GradientAccumulator({"w": ((1000,), "float32")})
    held = []
    for value in range(40):
        acc.add({"w": np.full(1000, value, np.float32)})
        held = [*held[-1:], acc.take().numpy()["w"]]
        assert [float(array[0]) for array in held] == [float(v) for v in range(max(value - 1, 0), value + 1)]
    assert acc._core.mapped_buffers <= 3


def test_released_on_another_thread():
    acc = gradacc.GradientAccumulator({"w": ((1000,), "float32")})
    for value in range(10):
        acc.add({"w": np.full(1000, value, np.float32)})
        held = [np.from_dlpack(acc.take()["w"])]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    assert acc._core.mapped_buffers == 1


def test_threads_that_register_at_once():
    """While another thread adds: each parameter keeps its number."""
    g = np.ones(3_000_000, np.float32)
    acc = gradacc.GradientAccumulator({"g": g}, reduction="sum")

    def register(first):
        for i in range(first, first + 50):
            acc.register(i, ((1,), "float32"))

    threads = [threading.Thread(target=register, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        acc.add({"g": g})
    acc.reset()
    acc.add({i: np.full(1, i, np.float32) for i in acc.ids if i != "g"})
    assert {id: float(array[0]) for id, array in acc.take().numpy().items()} == {
        i: float(i) for i in acc.ids if i != "g"
    }
    assert len(acc.ids) == 151


def test_eight_threads():
    acc = gradacc.GradientAccumulator({"w": ((50_000,), "float32")}, reduction="sum")

    def work(value):
        g = np.full(50_000, value, np.float32)
        for _ in range(20):
            acc.add({"w": g})

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acc.count == 160
    assert (acc.take().numpy()["w"] == 28 * 20).all()
