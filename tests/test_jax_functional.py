"""`gradacc.jax.init`, `add`, `take`: beside float64 sums, and beside the engine."""

import subprocess
import sys

import gradacc
import gradacc.jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradacc.jax import add, init, take
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LIKE = {"w": jnp.zeros((2, 3)), "b": [jnp.zeros(3)]}
jitted_add, jitted_take = jax.jit(add), jax.jit(take, static_argnums=1)


def gradients(seed, like=LIKE):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), like)


def full(value, dtype=jnp.float32):
    return jnp.full(2, value, dtype)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


# XLA takes what is subnormal for 0.
WEIGHTS = st.just(0.0) | st.floats(2**-10, 1000, width=32)
SCALES = st.none() | WEIGHTS | WEIGHTS.map(lambda scale: -scale)


@given(st.lists(st.tuples(WEIGHTS, SCALES, st.booleans()), min_size=1, max_size=6), st.sampled_from(["mean", "sum"]))
@settings(deadline=None)
def test_it_is_what_the_engine_gives(batches, reduction):
    """Also of micro-batches that are skipped or masked, and of windows that have no mean."""
    state = init(LIKE)
    acc = gradacc.jax.GradientAccumulator(LIKE, reduction=reduction, on_nonfinite="skip")
    step = jax.jit(lambda state, g, weight, scale: add(state, g, weight, scale, skip_nonfinite=True))
    for seed, (weight, scale, is_finite) in enumerate(batches):
        g = gradients(seed)
        g["b"][0] = g["b"][0] if is_finite else g["b"][0].at[1].set(jnp.inf)
        acc.add(g, weight, scale=scale)
        state = step(state, g, weight, weight if scale is None else scale)
    assert (int(state.count), int(state.rejected)) == (acc.count, acc.rejected)
    assert float(state.weight) == pytest.approx(acc.weight)
    result, empty = jitted_take(state, reduction)
    assert [int(number) for number in empty[1:]] == [0, 0, 0, 0]
    if acc.count == 0:
        assert all((leaf == 0).all() for leaf in leaves(result))
        return
    try:
        expected = acc.take().tree()
    except gradacc.WindowError:  # a weight of 0, which inside jit is no error
        assert not any(np.isfinite(leaf).any() for leaf in leaves(result))
        return
    scales = [abs(w if s is None else s) for w, s, ok in batches if ok or (w if s is None else s) == 0]
    bound = 3e-6 * sum(scales) / (acc.weight if reduction == "mean" and acc.weight else 1)
    for ours, its in zip(leaves(result), leaves(expected), strict=True):
        np.testing.assert_allclose(ours, its, rtol=1e-5, atol=max(bound, 1e-30))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_sums_of_16_bits(dtype):
    state = init(full(0, dtype), dtype=dtype)
    for value in (1.0, 2.0):
        state = jitted_add(state, full(value, dtype), 3)
    mean, _ = take(state)
    assert (mean.dtype, mean.tolist()) == (dtype, [1.5, 1.5])
    wide = jitted_add(init(full(0, dtype)), full(1, dtype))
    assert wide.sums.dtype == jnp.float32


def test_dtypes_with_and_without_x64():
    with jax.enable_x64(True):
        like = {"d": jnp.zeros(2, float), "c": jnp.zeros(2, complex), "f": jnp.zeros(2, jnp.float32)}
        state = init(like)
        for _ in range(3):
            state = jitted_add(state, {"d": full(0.1, float), "c": full(1 + 0.1j, complex), "f": full(0.5)}, 0.1)
        mean, state = jitted_take(state, "mean")
        assert [mean[name].dtype for name in "dcf"] == [float, complex, jnp.float32]
        np.testing.assert_allclose(mean["d"], 0.1, rtol=1e-15)
        np.testing.assert_allclose(mean["c"], 1 + 0.1j, rtol=1e-15)
        assert init(like["f"], dtype=jnp.float64).sums.dtype == jnp.float64
    assert init(np.zeros(2, np.complex64)).sums.dtype == jnp.complex64


def test_parts_of_a_complex_number_are_numbers_of_their_own():
    state = jitted_add(init(full(0, jnp.complex64)), full(complex(jnp.inf, 2.0), jnp.complex64), 3.0)
    mean, _ = take(state)
    assert mean.tolist() == [complex(jnp.inf, 2.0)] * 2
    assert np.signbit(
        np.asarray(take(jitted_add(init(full(0, jnp.complex64)), -full(0j, jnp.complex64)))[0].real)
    ).all()


def test_numpy_arrays_and_shapes_alone():
    state = init(jax.eval_shape(lambda: LIKE))
    state = add(state, jax.tree.map(np.asarray, gradients(0)), np.float64(2), np.int64(3))
    for ours, its in zip(leaves(take(state, "sum")[0]), leaves(gradients(0)), strict=True):
        np.testing.assert_allclose(ours, 3 * its, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_float64_arrays_of_numpy_without_x64_are_what_jax_makes_of_them():
    state = add(init(np.zeros(2)), np.ones(2))
    assert (state.sums.dtype, take(state)[0].tolist()) == (jnp.float32, [1, 1])


def test_a_nan_does_not_outlive_its_window_and_windows_are_compiled_once():
    traces = []

    @jax.jit
    def window(state, values):
        traces.append(1)
        state, _ = jax.lax.scan(lambda state, value: (add(state, jnp.full(2, value)), None), state, values)
        return take(state)

    state, means = init(full(0)), []
    for values in ([1.0, 3.0], [jnp.nan, 1.0], [jnp.inf, -jnp.inf], [5.0, 7.0]):
        mean, state = window(state, jnp.asarray(values))
        means.append(mean[0].item())
    np.testing.assert_array_equal(means, [2, np.nan, np.nan, 6])
    assert len(traces) == 1


def test_vmap_scan_and_donation_together():
    like, weights = jnp.arange(6.0).reshape(3, 2), jnp.asarray([1.0, 2.0, 0.0])
    step = jax.jit(jax.vmap(lambda state, g, w: take(add(add(state, g, w), 3 * g, w))[::-1]), donate_argnums=0)
    state = jax.vmap(init)(like)
    for _ in range(2):
        state, mean = step(state, like, weights)
        np.testing.assert_allclose(mean, like.at[2].set(0) * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        ({"w": full(1)}, gradacc.GradaccError, "'v' missing"),
        ({"w": full(1), "v": jnp.ones((1, 2))}, gradacc.ShapeError, r"'v'.*\(2,\).*\(1, 2\)"),
        ({"w": full(1), "v": full(1, int)}, gradacc.DtypeError, "'v'.*int"),
        ({"w": full(1), "v": full(1, jnp.complex64)}, gradacc.DtypeError, "'v'.*complex64"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(grads, error, message):
    state = init({"w": full(0), "v": full(0)})
    for function in (add, jitted_add):
        with pytest.raises(error, match=message):
            function(state, grads)


def test_options_that_make_no_sense():
    state = init(full(0))
    for options in ({"weight": -1}, {"weight": float("nan")}, {"scale": np.float32("inf")}):
        with pytest.raises(gradacc.ArgumentError, match=next(iter(options))):
            add(state, full(1), **options)
    for wrong in (jnp.ones(2), jnp.ones((1, 1)), "2"):
        with pytest.raises(gradacc.ArgumentError, match="weight: expected one number"):
            add(state, full(1), wrong)
    with pytest.raises(gradacc.ArgumentError, match="at least 0"):
        add(state, full(1), np.array(-1.0))
    for dtype in (jnp.int32, jnp.float8_e4m3fn):
        with pytest.raises(gradacc.DtypeError, match="sums of"):
            init(full(0), dtype=dtype)
    with pytest.raises(gradacc.DtypeError, match="float8"):
        init(full(0, jnp.float8_e4m3fn))
    with pytest.raises(gradacc.DtypeError, match="array"):
        add(state, 1.0)
    with pytest.raises(gradacc.ArgumentError, match="reduction"):
        take(state, "median")
    for wrong in (jnp.zeros(2, int), 1.0, "w"):
        with pytest.raises(gradacc.DtypeError):
            init({"w": wrong})


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import test_jax_functional
test_jax_functional.{}()
print("done")
"""


def on_two_devices(name):
    code = SHARDED.format(name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="tests", check=False)
    assert done.stdout.split() == ["done"], done.stderr


def states_add_up():
    """Inside shard_map: one exchange per window, of sums and weights."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    values, weights = jnp.arange(8.0), jnp.asarray([1.0, 2, 3, 4, 5, 0, 7, 8])

    def window(state, values, weights):
        state, _ = jax.lax.scan(
            lambda state, pair: (add(state, jnp.full(2, pair[0]), pair[1]), None), state, (values, weights)
        )
        mean, _ = take(jax.lax.psum(state, "data"))
        return mean, jax.tree.map(lambda leaf: leaf[None], take(state)[1])

    def windows(values, weights):
        state = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), init(full(0)))
        mean, states = window(state, values, weights)
        again, _ = window(jax.tree.map(lambda leaf: leaf[0], states), values, weights)
        return mean, again

    spread = jax.jit(jax.shard_map(windows, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P(), P())))
    for mean in spread(values, weights):
        np.testing.assert_allclose(mean, np.average(values, weights=weights), rtol=1e-6)
    loops, entry = spread.lower(values, weights).compile().as_text().split("ENTRY")
    assert "all-reduce" not in loops
    assert "all-reduce(" in entry


def sums_lie_where_parameters_lie():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
        spread = NamedSharding(mesh, P("data"))
        w = jax.device_put(jnp.arange(8.0), spread)
        state = init(w)
        for _ in range(2):
            mean, state = jax.jit(take)(jax.jit(add)(state, w, 3.0))
            assert mean.sharding.is_equivalent_to(spread, 1)
            assert state.sums.sharding.is_equivalent_to(spread, 1)
        np.testing.assert_allclose(mean, w, rtol=1e-6)


@pytest.mark.parametrize("name", ["states_add_up", "sums_lie_where_parameters_lie"])
def test_on_two_devices(name):
    on_two_devices(name)
