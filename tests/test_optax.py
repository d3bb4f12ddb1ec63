"""`gradacc.optax.accumulate`, beside the inner transformation run by hand on the mean of each window."""

import itertools

import gradacc
import gradacc.optax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from gradacc.optax import accumulate, has_updated

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(0.5)}
EAGER, JITTED = (lambda function: function), jax.jit


def filled(tree, value):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), tree)


def gradients(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), PARAMS)


def fed(tx, values, weights=None, state=None, params=PARAMS):
    """What the updates of "b" were, whether each was a step, and the last state."""
    update, state, updates, stepped = jax.jit(tx.update), state or tx.init(params), [], []
    for value, weight in zip(values, weights or itertools.repeat(1.0), strict=False):
        of_all, state = update(filled(params, value), state, params, weight=weight)
        updates.append(of_all["b"].item())
        stepped.append(bool(has_updated(state)))
    return updates, stepped, state


def counted(inner):
    """The same, and a list that grows whenever its update is evaluated, not merely traced."""
    evaluations = []

    def update(grads, state, params=None, **extra):
        jax.experimental.io_callback(lambda: evaluations.append(1), None)
        return inner.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update), evaluations


def assert_same(these, those):
    assert jax.tree.structure(these) == jax.tree.structure(those)
    jax.tree.map(np.testing.assert_array_equal, these, those)


@pytest.mark.parametrize("jit", [EAGER, JITTED], ids=["eager", "jitted"])
@pytest.mark.parametrize(
    "inner",
    [
        optax.adamw(optax.cosine_decay_schedule(0.3, 4), weight_decay=0.1),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9, nesterov=True)),
        optax.multi_transform({"a": optax.lion(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
        optax.masked(optax.adam(0.1), {"w": True, "b": False}),
        optax.apply_if_finite(optax.adam(0.1), 3),
        optax.contrib.schedule_free_sgd(0.1),
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 5), b2=0.9),
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
    ],
    ids=["adamw", "chain", "labels", "masked", "if finite", "schedule free", "injected", "noise"],
)
def test_it_is_the_inner_transformation_on_the_weighted_mean(inner, jit):
    inner, evaluations = counted(optax.with_extra_args_support(inner))
    tx, rng = accumulate(inner, 3), np.random.default_rng(0)
    update, plain_update = jit(tx.update), jax.jit(inner.update)
    params = plain = PARAMS
    state, plain_state = tx.init(PARAMS), inner.init(PARAMS)
    for window in range(3):
        weights = rng.integers(1, 100, 3)
        micro_batches = [gradients(3 * window + i) for i in range(3)]
        for g, weight in zip(micro_batches, weights, strict=True):
            updates, state = update(g, state, params, weight=weight)
            params = optax.apply_updates(params, updates)
            jax.effects_barrier()
            assert len(evaluations) == window + int(has_updated(state)), "once per window"
        evaluated = len(evaluations)
        mean = jax.tree.map(lambda *gs, w=weights: jnp.float32(np.average(np.float64(gs), 0, w)), *micro_batches)
        updates, plain_state = plain_update(mean, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        jax.effects_barrier()
        del evaluations[evaluated:]
        for ours, its in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(ours, its, rtol=1e-5, atol=1e-6)


def test_windows_scales_and_reductions():
    sgd = optax.sgd(1.0)
    assert fed(accumulate(sgd, 2), [5.0, 0.25, 1.0, 4.0], [2, 8, 4, 8])[:2] == (
        pytest.approx([0, -1.2, 0, -3]),
        [False, True] * 2,
    )
    assert fed(accumulate(sgd, 2, reduction="sum"), [5.0, 0.25], [2, 8])[0] == [0, -12]
    nan = float("nan")
    assert fed(accumulate(sgd, 2), [nan, 4, 2, nan], [0, 2, 1, 0])[0] == [0, -4, 0, -2]
    tx = accumulate(sgd, 2)
    _, state = tx.update(filled(PARAMS, 10.0), tx.init(PARAMS), PARAMS, weight=2, scale=1)
    updates, _ = tx.update(filled(PARAMS, 2.0), state, PARAMS, weight=8, scale=1)
    assert updates["b"] == pytest.approx(-1.2)


def test_the_length_is_that_at_the_first_micro_batch():
    sgd = optax.sgd(1.0)
    tx = accumulate(sgd, lambda step: jnp.where(step < 2, 2.0, 3))  # also where a function gives floats
    _, stepped, _ = fed(tx, range(10))
    assert [i for i, step in enumerate(stepped) if step] == [1, 3, 6, 9]
    for before, after in ((4, 2), (2, 4)):
        _, _, state = fed(accumulate(sgd, before), [1.0])
        assert fed(accumulate(sgd, after), [1.0] * (before - 1), state=state)[1][-1]
    skipped = accumulate(sgd, 2, skip_nonfinite=True)
    _, _, state = fed(skipped, [float("nan")])
    assert fed(accumulate(sgd, 4), [1.0, 3.0], state=state)[0] == [0, -2]


def test_what_is_not_finite_stays_in_its_window():
    nan, inf = float("nan"), float("inf")
    updates, _, _ = fed(accumulate(optax.sgd(1.0), 2), [1, nan, 2, 4, inf, 1, 3, 5])
    np.testing.assert_array_equal(updates, [0, nan, 0, -3, 0, -inf, 0, -4])
    updates, stepped, state = fed(
        accumulate(optax.sgd(1.0), 2, skip_nonfinite=True), [nan, 1, inf, 3, nan], [9, 1, 9, 3, 9]
    )
    assert (updates, stepped) == ([0, 0, 0, -2.5, 0], [False, False, False, True, False])
    assert (int(state.window_rejected), int(state.window_count), int(state.windows)) == (1, 0, 1)


def test_schedules_and_tree_utilities_see_gradient_steps():
    inner = optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.5)
    tx = accumulate(inner, 3)
    _, _, state = fed(tx, [1.0] * 7)
    before = {name: optax.tree.get(state, name) for name in ("mu", "nu", "hyperparams")}
    assert optax.tree.get_all_with_path(state, "learning_rate")
    assert optax.tree.get(state.inner.inner_state, "count") == 2
    _, _, state = fed(tx, [9.0], state=state)
    assert_same({name: optax.tree.get(state, name) for name in before}, before)
    assert_same(fed(accumulate(optax.adam(0.1), 3), [1.0] * 7)[2].inner[0].count, jnp.int32(2))


def test_hyperparameters_that_are_set_in_mid_window():
    tx = accumulate(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), 2)
    _, _, state = fed(tx, [2.0])
    for rate in (jnp.asarray(0.25), 0.25):
        changed = optax.tree.set(state, learning_rate=rate)
        assert fed(tx, [4.0, 8.0, 8.0], state=changed)[0] == [-0.75, 0, -2]


def test_chains_on_either_side_and_extra_arguments():
    clip, sgd = optax.clip(1.0), optax.sgd(1.0)
    for tx, expected in (
        (optax.chain(clip, accumulate(sgd, 2)), [0, -0.75]),
        (accumulate(optax.chain(clip, sgd), 2), [0, -1.0]),
        (optax.chain(accumulate(sgd, 2), optax.scale(2.0), clip), [0, -1.0]),
        (optax.named_chain(("clip", clip), ("sgd", accumulate(sgd, 2))), [0, -0.75]),
    ):
        assert fed(tx, [0.5, 30.0], [3.0, 3.0])[:2] == (expected, [False, True])
    inner = optax.chain(sgd, optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.1))
    plateau, one = accumulate(inner, 2), {"value": jnp.asarray(1.0)}
    state, plain_state, update = plateau.init(PARAMS), inner.init(PARAMS), jax.jit(plateau.update)
    for _ in range(4):
        for _ in range(2):
            updates, state = update(filled(PARAMS, 1.0), state, PARAMS, weight=2.0, **one)
        plain, plain_state = inner.update(filled(PARAMS, 1.0), plain_state, PARAMS, **one)
        assert updates["b"] == plain["b"]
    assert updates["b"] > -1


def test_two_accumulations_in_one_state_have_no_common_answer():
    tx = optax.chain(accumulate(optax.sgd(1.0), 2), accumulate(optax.sgd(1.0), 2))
    for state in (tx.init(PARAMS), optax.sgd(1.0).init(PARAMS)):
        with pytest.raises(gradacc.ArgumentError, match="single"):
            has_updated(state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_parameters_are_stepped_in_float32(dtype):
    params = filled({"b": jnp.zeros((), dtype)}, 1.0)
    tx = accumulate(optax.adam(0.01), 4)
    state = tx.init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.inner[0].mu, state.sums))} == {jnp.dtype(jnp.float32)}
    updates, _, _ = fed(accumulate(optax.scale(1.0), 256, reduction="sum"), [1.0] * 256, params=params)
    assert updates[-1] == 256
    updates, stepped, state = fed(tx, [1.0] * 8, params=params)
    assert stepped == [False, False, False, True] * 2


def test_under_vmap_and_in_a_scan():
    tx = accumulate(optax.adam(0.1), 2)
    ensemble = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)

    def run(params, values):
        def step(carry, value):
            params, state = carry
            updates, state = tx.update(filled(PARAMS, value), state, params)
            return (optax.apply_updates(params, updates), state), has_updated(state)

        (params, _), stepped = jax.lax.scan(step, (params, tx.init(params)), values)
        return params, stepped

    together, stepped = jax.jit(jax.vmap(run, (0, None)))(ensemble, jnp.arange(6.0))
    assert stepped.tolist() == [[False, True] * 3] * 2
    one, _ = jax.jit(run)(jax.tree.map(lambda p: p[1], ensemble), jnp.arange(6.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-6), together, one)


@pytest.mark.parametrize("jit", [EAGER, JITTED], ids=["eager", "jitted"])
def test_training_can_be_differentiated(jit):
    """By a learning rate that the inner transformation closes over, beside optax's own."""

    def trained(rate, wrap):
        tx, params = wrap(optax.adam(rate)), jnp.array([1.0, 2.0])
        state = tx.init(params)
        for factor in (1.0, 2.0, 3.0, 4.0):
            grads = jax.grad(lambda p, factor=factor: factor * jnp.sum(p**3))(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params**2)

    ours, its = (
        jit(jax.value_and_grad(lambda rate, wrap=wrap: trained(rate, wrap)))(0.1)
        for wrap in (lambda inner: accumulate(inner, 2), lambda inner: optax.MultiSteps(inner, 2))
    )
    np.testing.assert_allclose(ours, its, rtol=1e-5)
    _, slope = jax.jvp(jit(lambda rate: trained(rate, lambda inner: accumulate(inner, 2))), (0.1,), (1.0,))
    np.testing.assert_allclose(slope, ours[1], rtol=1e-5)


def test_a_donated_state_stays_where_it_is():
    """Between steps nothing of it is copied: there are no more temporaries than updates."""
    params = {"w": jnp.ones((512, 512)), "v": jnp.ones((500, 500))}
    tx = accumulate(optax.adamw(0.1), 2)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=0).lower((params, tx.init(params)), params).compile()
    len_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    used = compiled.memory_analysis()
    assert used.alias_size_in_bytes >= 4 * len_bytes
    assert used.temp_size_in_bytes < 2.2 * len_bytes


def test_traces_and_donated_states():
    traces, tx = [], accumulate(optax.adam(0.1), lambda step: step + 1)

    def step(grads, state, params, weight):
        traces.append(1)
        return tx.update(grads, state, params, weight=weight)

    update, state = jax.jit(step, donate_argnums=1), tx.init(PARAMS)
    for weight in (1.0, 2, 3.0, 0.5):
        before = state
        _, state = update(gradients(0), state, PARAMS, jnp.float32(weight))
    assert len(traces) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.ndim)


def test_it_is_saved_in_mid_window_by_orbax_and_flax(tmp_path):
    tx = accumulate(optax.adamw(0.1), 3)
    _, _, state = fed(tx, [0.1, 0.7, 0.3, 1.1], [0.3, 0.6, 5.0, 0.7])
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, PARAMS))
    read = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    expected = fed(tx, [0.9, 0.2], [1.3, 0.7], state=state)
    for other in (restored, read):
        assert_same(fed(tx, [0.9, 0.2], [1.3, 0.7], state=other), expected)


def test_a_train_state_of_flax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)), jnp.float32)
    loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"] - x.sum(-1)) ** 2)  # noqa: E731
    new = lambda tx: TrainState.create(apply_fn=None, params=PARAMS, tx=tx)  # noqa: E731
    step = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(loss)(state.params, x)))
    plain, state = new(optax.adam(0.1)), new(accumulate(optax.adam(0.1), 4))
    for _ in range(5):
        plain = step(plain, x)
        for batch in x.reshape(4, 8, 3):
            state = step(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, plain.params)


@pytest.mark.parametrize("every", [0, -1, 2.5, True, None, "2"])
def test_lengths_that_make_no_sense(every):
    with pytest.raises(gradacc.ArgumentError, match="every"):
        accumulate(optax.sgd(1.0), every)


def test_options_and_gradients_that_make_no_sense():
    with pytest.raises(gradacc.ArgumentError, match="reduction"):
        accumulate(optax.sgd(1.0), 2, reduction="max")
    tx = accumulate(optax.sgd(1.0), 2)
    state = tx.init(PARAMS)
    with pytest.raises(gradacc.GradaccError, match="'b' missing"):
        tx.update({"w": PARAMS["w"]}, state, PARAMS)
    with pytest.raises(gradacc.ArgumentError, match="weight"):
        tx.update(PARAMS, state, PARAMS, weight=-1)
