"""JAX: gradients from it, and hand-over to it."""

import gradacc
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def test_micro_batches_are_the_full_batch():
    params = {"w": jnp.linspace(-1.0, 1.0, 15).reshape(5, 3), "b": jnp.linspace(0.0, 1.0, 3)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 5)), jnp.float32)
    acc = gradacc.GradientAccumulator(params, every=3)
    for batch in (x[:7], x[7:8], x[8:]):
        complete = acc.add(jax.grad(loss)(params, batch), weight=len(batch))
    assert complete
    mean, full = acc.take().jax(), jax.grad(loss)(params, x)
    assert mean.keys() == full.keys()
    for id, expected in full.items():
        assert isinstance(mean[id], jax.Array)
        np.testing.assert_allclose(mean[id], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_every_dtype(dtype):
    acc = gradacc.GradientAccumulator({"w": jnp.zeros(3, dtype)}, reduction="sum")
    for value in (256, 1):
        acc.add({"w": jnp.full(3, value, dtype)})
    assert acc.take().jax()["w"].tolist() == [257.0, 257.0, 257.0]


def test_arrays_alias_and_never_change():
    acc, held = gradacc.GradientAccumulator({"w": jnp.zeros(1000)}), []
    for window in range(4):
        acc.add({"w": jnp.full(1000, float(window))}, weight=3)
        grads = acc.take()
        array = grads.jax()["w"]
        assert array.unsafe_buffer_pointer() == grads.numpy()["w"].ctypes.data
        grads.scale_(10)
        held.append(array)
    for window, array in enumerate(held):
        assert (np.asarray(array) == window).all()
