"""`gradacc.jax.accumulate_gradients`, beside `jax.value_and_grad` of the whole batch."""

import functools
import re
import subprocess
import sys

import gradacc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradacc.jax import accumulate_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), "b": jnp.ones(2)}


def data(samples, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": jnp.asarray(rng.normal(size=(samples, 3)), jnp.float32), "n": jnp.asarray(rng.integers(0, 4, samples))}


def loss(params, batch):
    """A mean over tokens, of which a sample has n; 0/0 if there are none."""
    errors = jnp.mean(jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2, axis=-1)
    return jnp.sum(errors * batch["n"]) / jnp.sum(batch["n"])


def tokens(batch):
    return batch["n"].sum()


def assert_close(these, those, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(these) == jax.tree.structure(those)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), these, those)


@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_it_is_the_full_batch(samples, micro_batches, seed):
    batch = data(samples, seed)
    batch["n"] = batch["n"].at[0].set(2)
    result = accumulate_gradients(loss, micro_batches=micro_batches, weight=tokens)(PARAMS, batch)
    assert_close(result, jax.value_and_grad(loss)(PARAMS, batch))


@pytest.mark.parametrize(("samples", "micro_batches"), [(12, 4), (13, 5), (3, 7)])
def test_the_samples_of_a_micro_batch(samples, micro_batches):
    def samples_of(w, x):
        return (w * x).mean(), jnp.pad(x, (0, 4 - len(x)), constant_values=-1)

    accumulated = accumulate_gradients(samples_of, micro_batches=micro_batches, has_aux=True)
    (_, aux), _ = accumulated(1.0, jnp.arange(float(samples)))
    k = min(samples, micro_batches)
    assert [[x for x in row if x >= 0] for row in aux.tolist()] == [list(range(i, samples, k)) for i in range(k)]


def test_what_else_is_returned_is_stacked_or_reduced():
    def fun(w, x):
        return (w * x).mean(), {"mean": x.mean(), "count": len(x), "any": x.max() > 5}

    def aux_of(reduce_aux):
        accumulated = accumulate_gradients(fun, micro_batches=3, has_aux=True, reduce_aux=reduce_aux)
        return accumulated(1.0, jnp.arange(7.0))[0][1]

    stacked = aux_of(None)
    assert stacked["count"].tolist() == [3, 2, 2]
    assert stacked["any"].tolist() == [True, False, False]
    summed = aux_of("sum")
    assert summed["count"] == 7
    assert jnp.issubdtype(summed["count"].dtype, jnp.integer)
    assert summed["any"] == 1
    mean = accumulate_gradients(
        lambda w, x: ((w * x).mean(), x.mean()), micro_batches=3, has_aux=True, reduce_aux="mean"
    )
    assert mean(1.0, jnp.arange(7.0))[0][1] == 3.0


def test_stacking_what_has_as_many_entries_as_samples():
    fun = accumulate_gradients(lambda w, x: ((w * x).mean(), x), micro_batches=4, has_aux=True)
    assert fun(1.0, jnp.arange(8.0))[0][1].shape == (4, 2)
    with pytest.raises(gradacc.ArgumentError, match="depends on the number of samples"):
        fun(1.0, jnp.arange(9.0))


@pytest.mark.parametrize("argnums", [0, 2, -1, (0,), (2, 0), (-3, 2)])
def test_arguments_by_their_places(argnums):
    def fun(w, x, v):
        return jnp.mean(jnp.tanh(x @ w) * v)

    args = PARAMS["w"], data(7)["x"], jnp.asarray([1.0, 2.0])
    if argnums in (2, -1):
        args = data(7)["x"], data(7, 1)["x"], jnp.asarray(2.0)
        fun = lambda x, y, v: jnp.mean(x * y * v)  # noqa: E731
    if argnums in (0, (0,)):
        args = PARAMS["w"], data(7)["x"], data(7)["x"][:, :2]
    result = accumulate_gradients(fun, micro_batches=3, argnums=argnums)(*args)
    assert_close(result, jax.value_and_grad(fun, argnums)(*args))


def test_keyword_arguments_go_to_every_micro_batch():
    def fun(w, x, *, power, shift, reverse=False):
        return jnp.mean((w * (-x if reverse else x) + shift["by"]) ** power)

    keywords = {"power": 3, "shift": {"by": jnp.ones(())}, "reverse": True}
    result = accumulate_gradients(fun, micro_batches=2)(2.0, jnp.arange(5.0), **keywords)
    assert_close(result, jax.value_and_grad(fun)(2.0, jnp.arange(5.0), **keywords))


def test_keyword_arguments_that_are_equal_and_not_the_same():
    def fun(w, x, *, c):
        return jnp.mean(w * x) * (10 if c is True else 1) * (2 if isinstance(c, float) else 1) * np.copysign(1.0, c)

    accumulated, x = accumulate_gradients(fun, micro_batches=2), jnp.arange(5.0)
    assert [float(accumulated(1.0, x, c=c)[0]) for c in (1, True, 1.0, 0.0, -0.0)] == [2, 20, 4, 4, -4]


def test_keyword_arguments_of_all_kinds():
    def fun(w, x, *, options):
        return jnp.mean(w * x).astype(options["dtype"]) * options["by"] * len(options["names"])

    options = {"dtype": np.float32, "by": jnp.asarray(2.0), "names": ["a", ()]}
    accumulated, traces = accumulate_gradients(fun, micro_batches=2), []
    assert accumulated(1.0, jnp.arange(5.0), options=options)[0] == 8
    counted = accumulate_gradients(lambda w, x, nan: (traces.append(1), jnp.mean(w * x))[1], micro_batches=2)
    for _ in range(3):
        counted(1.0, jnp.arange(4.0), nan=float("nan"))
    assert len(traces) == 2  # once for the shapes, once for the scan


def test_what_is_reduced_is_wide_enough_and_masked():
    def reduced(how, aux, samples=512, **options):
        fun = accumulate_gradients(
            lambda w, x: (jnp.mean(w * x), aux(x)), micro_batches=samples, has_aux=True, reduce_aux=how, **options
        )
        return fun(2.0, jnp.arange(float(samples)))[0][1]

    assert reduced("sum", lambda x: jnp.bfloat16(1)) == 512
    assert reduced("sum", lambda x: jnp.uint8(1)) == 512
    assert reduced("sum", lambda x: x[0] > 3, 7) == 3
    assert reduced("mean", lambda x: x[0] > 3, 8) == 0.5
    assert reduced("mean", lambda x: {"a": len(x)}, 8)["a"] == 1
    nan_at_0 = lambda x: jnp.where(x[0] == 0, jnp.nan, 1.0)  # noqa: E731
    assert reduced("sum", nan_at_0, 7, weight=lambda x: x.sum()) == 6


def test_a_loss_of_16_bits_is_summed_in_float32():
    fun = accumulate_gradients(lambda w, x: jnp.mean(w * x), micro_batches=512, dtype=jnp.bfloat16)
    value, _ = fun(jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16))
    assert value == 1


def test_weights_and_places_that_make_no_sense():
    x = jnp.arange(6.0)
    for weight in (lambda x: -2.0, lambda x: float("nan"), lambda x: x):
        with pytest.raises(gradacc.ArgumentError, match="weight"):
            accumulate_gradients(lambda w, x: jnp.mean(w * x), micro_batches=2, weight=weight)(1.0, x)
    for argnums in (2, -3, (0, 5)):
        with pytest.raises(gradacc.ArgumentError, match="argnums"):
            accumulate_gradients(lambda w, x: jnp.mean(w * x), micro_batches=2, argnums=argnums)(1.0, x)
    assert accumulate_gradients(lambda w, x: jnp.mean(w * x), micro_batches=2, argnums=np.int64(0))(1.0, x)[1] == 2.5


def test_random_keys_are_a_batch_like_another():
    def fun(w, x, key):
        return jnp.mean(w * x * jax.vmap(jax.random.uniform)(key))

    for keys in (jax.random.split(jax.random.key(0), 7), jax.random.split(jax.random.PRNGKey(0), 7)):
        args = 2.0, jnp.arange(7.0), keys
        assert_close(accumulate_gradients(fun, micro_batches=3)(*args), jax.value_and_grad(fun)(*args))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_are_summed_in_float32(dtype):
    x = jnp.asarray([256.0] + [1.0] * 255, dtype)
    value, gradient = accumulate_gradients(lambda w, x: jnp.mean(w * x), micro_batches=256, reduction="sum")(
        jnp.ones((), dtype), x
    )
    assert (gradient.dtype, float(gradient), float(value)) == (jnp.float32, 511.0, 511.0)
    sums = accumulate_gradients(lambda w, x: jnp.mean(w * x), micro_batches=2, dtype=dtype)(jnp.ones((), dtype), x)
    assert sums[1].dtype == dtype


def test_float64_and_complex_parameters():
    with jax.enable_x64(True):
        args = jnp.asarray([1.0, 2.0]), jnp.linspace(0.0, 1.0, 14).reshape(7, 2)
        fun = lambda w, x: jnp.mean((x @ w) ** 3)  # noqa: E731
        assert_close(accumulate_gradients(fun, micro_batches=3)(*args), jax.value_and_grad(fun)(*args), 1e-14, 1e-15)
    fun = lambda w, x: jnp.mean(jnp.abs(x * w - 1j) ** 2)  # noqa: E731
    args = jnp.asarray(1 + 2j), jnp.arange(5.0)
    assert_close(accumulate_gradients(fun, micro_batches=2)(*args), jax.value_and_grad(fun)(*args))


def test_it_is_compiled_once_also_outside_of_jit():
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss(params, batch)

    accumulated = accumulate_gradients(counted, micro_batches=3, weight=tokens)
    accumulated(PARAMS, data(8))
    before = len(traces)
    for seed in range(1, 4):
        accumulated(PARAMS, data(8, seed))
    assert len(traces) == before


def test_memory_is_that_of_one_micro_batch():
    def deep(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def temporary(function):
        shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    full = temporary(jax.value_and_grad(deep))
    for micro_batches, least in ((4, 3), (16, 8), (61, 12)):
        assert temporary(accumulate_gradients(deep, micro_batches=micro_batches)) < full / least


def test_under_vmap_and_within_a_scan():
    xs = jnp.arange(24.0).reshape(2, 12)
    fun = lambda w, x: jnp.mean((w * x) ** 2)  # noqa: E731
    accumulated = accumulate_gradients(fun, micro_batches=4)
    ws = jnp.asarray([1.0, 2.0])
    assert_close(jax.vmap(accumulated)(ws, xs), jax.vmap(jax.value_and_grad(fun))(ws, xs))

    def step(w, x):
        value, gradient = accumulated(w, x)
        return w - 1e-3 * gradient, value

    w, _ = jax.lax.scan(step, jnp.asarray(1.0), xs)
    assert jnp.isfinite(w)


@pytest.mark.parametrize("micro_batches", [0, -1, 2.0, True, None, "2"])
def test_the_number_of_micro_batches_is_checked(micro_batches):
    with pytest.raises(gradacc.ArgumentError, match="micro_batches"):
        accumulate_gradients(loss, micro_batches=micro_batches)


def test_a_batch_that_makes_no_sense():
    accumulated = accumulate_gradients(lambda w, *batch: w, micro_batches=2)
    for batch in ((), (jnp.ones(3), jnp.ones(4)), (jnp.ones(3), jnp.ones(())), (jnp.ones((0, 2)),)):
        with pytest.raises(gradacc.ArgumentError, match="first dimension is the samples"):
            accumulated(1.0, *batch)
    for options in ({"reduction": "max"}, {"reduce_aux": "max"}):
        with pytest.raises(gradacc.ArgumentError, match=next(iter(options))):
            accumulate_gradients(loss, micro_batches=2, **options)


def arrays_that_are_spread():
    w = np.random.default_rng(0).normal(size=(3, 2)).astype("f")
    batch = data(16)
    fun = lambda w, batch: loss({"w": w, "b": jnp.ones(2)}, batch)  # noqa: E731
    accumulated = accumulate_gradients(fun, micro_batches=4, weight=tokens)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
        with jax.set_mesh(mesh):
            args = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(batch, NamedSharding(mesh, P("data")))
            program = jax.jit(accumulated).lower(*args).compile()
            assert_close(jax.device_get(program(*args)), jax.device_get(jax.value_and_grad(fun)(w, batch)))
        assert not re.search("all-gather|all-to-all|collective-permute", program.as_text())


def within_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    batch = data(14)

    def train(params, batch):
        params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
        accumulated = accumulate_gradients(loss, micro_batches=3, weight=tokens, reduction="sum")
        return jax.lax.psum((accumulated(params, batch), tokens(batch)), "data")

    spread = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    sums, weight = spread(PARAMS, batch)
    assert_close(jax.tree.map(lambda leaf: leaf / weight, sums), jax.value_and_grad(loss)(PARAMS, batch))
    loops, entry = spread.lower(PARAMS, batch).compile().as_text().split("ENTRY")
    assert "all-reduce" not in loops
    assert "all-reduce(" in entry


@pytest.mark.parametrize("name", ["arrays_that_are_spread", "within_shard_map"])
def test_on_two_devices(name):
    code = f"""
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import test_jax_micro_batches
test_jax_micro_batches.{name}()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="tests", check=False)
    assert done.stdout.split() == ["done"], done.stderr
