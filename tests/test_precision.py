"""The mean does not depend on how samples are dealt out, and sums don't lose what is small."""

import gradacc
import ml_dtypes
import numpy as np
import pytest


def taken(acc):
    return acc.take().numpy()["w"]


def accumulator(shape, dtype, **options):
    return gradacc.GradientAccumulator({"w": (shape, dtype)}, **options)


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [1] * 12, [7, 1, 4], [4, 1, 7], [1, 11]], ids=str)
def test_the_same_samples_give_the_same_mean_however_they_are_dealt_out(sizes):
    samples = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
    acc, start = accumulator((5,), "float32"), 0
    for size in sizes:
        acc.add({"w": samples[start : start + size].mean(0)}, weight=size)
        start += size
    np.testing.assert_allclose(taken(acc), samples.astype("float64").mean(0), rtol=1e-5, atol=1e-7)


def test_equal_batches_give_equal_windows_and_a_short_one_too():
    acc, windows = accumulator((2,), "float32", every=2), []
    for i in range(5):
        if acc.add({"w": np.float32([1, 3])}) or i == 4:
            windows.append((acc.count, taken(acc).tolist()))
    assert windows == [(2, [1, 3]), (2, [1, 3]), (1, [1, 3])]


def test_two_accumulators_are_independent():
    two, three = (accumulator((), "float32", every=every) for every in (2, 3))
    results = {2: [], 3: []}
    for i in range(6):
        for acc in (two, three):
            if acc.add({"w": np.float32(i)}):
                results[acc.every].append(float(taken(acc)))
    assert results == {2: [0.5, 2.5, 4.5], 3: [1.0, 4.0]}


def test_the_division_is_one_and_comes_last():
    """Not a division of each micro-batch: the two differ in the last bit."""
    values = np.float32([0.1, 0.2, 0.3])
    acc = accumulator((), "float32")
    for value in values:
        acc.add({"w": value})
    total = values[0] + values[1] + values[2]
    assert taken(acc) == np.float32(np.float64(total) * (1 / 3))


def bf16(values):
    return np.asarray(values).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("gradients", "total"),
    [
        ([256, 1], 257.0),
        ([1] + [2**-9] * 256, 1.5),
        ([0.3] * 1024, 1024 * float(ml_dtypes.bfloat16(0.3))),
    ],
    ids=["large and small", "many small ones", "many equal ones"],
)
def test_bfloat16_gradients_do_not_stop_growing(gradients, total):
    acc = accumulator((1,), "bfloat16", reduction="sum")
    for gradient in gradients:
        acc.add({"w": bf16([gradient])})
    assert taken(acc).tolist() == [total]


@pytest.mark.parametrize(("gradients", "total"), [([1.0] * 4096, 4096.0), ([40000.0, 40000.0], 80000.0)])
def test_float16_gradients_neither_stop_growing_nor_overflow(gradients, total):
    acc = accumulator((1,), "float16", reduction="sum")
    for gradient in gradients:
        acc.add({"w": np.float16([gradient])})
    assert taken(acc).tolist() == [total]


def test_random_bfloat16_gradients_are_summed_to_float32s_precision():
    gradients = bf16(np.random.default_rng(1).uniform(0.5, 2, size=(64, 1000)))
    acc = accumulator((1000,), "bfloat16", reduction="sum")
    for gradient in gradients:
        acc.add({"w": gradient})
    exact = gradients.astype("float64").sum(0)
    assert np.max(np.abs(taken(acc) - exact) / exact) < 1e-7
