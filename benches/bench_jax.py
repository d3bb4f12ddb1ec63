"""One micro-batch, against how JAX users add gradients up."""

import functools

import gradacc.jax
import gradacc.optax
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import GPT2_SMALL, count

ADD_BYTES = 12 * count(GPT2_SMALL)


@pytest.fixture(scope="module")
def gradients():
    return {f"p{i}": jnp.ones(shape) for i, shape in enumerate(GPT2_SMALL)}


class Carried:
    """Calls a jitted function of a state that is donated, over and over."""

    def __init__(self, function, state):
        # Unused or not: what is returned goes where what was given lay.
        self.function, self.state = jax.jit(function, donate_argnums=0, keep_unused=True), state

    def __call__(self, *arguments):
        self.state = jax.block_until_ready(self.function(self.state, *arguments))


def trained(optimizer, params):
    """A training step of parameters and the state of an optimizer, both in the place of those before."""

    def step(carry, gradients):
        params, state = carry
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return Carried(step, (jax.tree.map(jnp.zeros_like, params), optimizer.init(params)))


class TestAddGpt2SmallJax:
    """Add the float32 gradients of GPT-2 small, 148 arrays of 124 M elements."""

    def test_gradacc(self, timed, gradients):
        """The engine."""
        acc = gradacc.jax.GradientAccumulator(gradients)
        acc.add(gradients)
        timed(acc.add, gradients, len_bytes=ADD_BYTES)

    def test_jitted_tree_add_donated(self, timed, gradients):
        add = Carried(functools.partial(jax.tree.map, jnp.add), jax.tree.map(jnp.zeros_like, gradients))
        timed(add, gradients, len_bytes=ADD_BYTES)

    def test_optax_multi_steps(self, timed, gradients):
        """An update in mid-window."""
        optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=10**6)
        update = jax.jit(optimizer.update, donate_argnums=1)
        states = [optimizer.init(gradients)]

        def step():
            _, state = jax.block_until_ready(update(gradients, states.pop()))
            states.append(state)

        timed(step, len_bytes=ADD_BYTES)

    def test_optax_multi_steps_in_a_training_step(self, timed, gradients):
        """The same with its parameters, which stay as they are, all in place."""
        timed(trained(optax.MultiSteps(optax.sgd(0.1), every_k_schedule=10**6), gradients), gradients)


class TestAddGpt2SmallInsideJit:
    """The same in a scan over two micro-batches that are made there; per scan."""

    @staticmethod
    def scan(add, state):
        """Gradients that differ between micro-batches, so that they can't be made before the scan."""
        sizes = {f"p{i}": shape for i, shape in enumerate(GPT2_SMALL)}

        def step(state, weight):
            return add(state, {name: jnp.full(shape, weight) for name, shape in sizes.items()}, weight), None

        return Carried(lambda state, weights: jax.lax.scan(step, state, weights)[0], state)

    def test_gradacc(self, timed, gradients):
        timed(self.scan(gradacc.jax.add, gradacc.jax.init(gradients)), jnp.arange(2.0))

    def test_written_by_hand(self, timed, gradients):
        def add(state, new, weight):
            sums, total = state
            return jax.tree.map(lambda s, g: s + weight * g, sums, new), total + weight

        timed(self.scan(add, (jax.tree.map(jnp.zeros_like, gradients), jnp.zeros(()))), jnp.arange(2.0))


class TestTrainingStepInMidWindow:
    """AdamW's step in mid-window, which leaves parameters as they are; float32 gradients of GPT-2 small."""

    def test_gradacc(self, timed, gradients):
        timed(trained(gradacc.optax.accumulate(optax.adamw(1e-3), 10**6), gradients), gradients)

    def test_optax_multi_steps(self, timed, gradients):
        timed(trained(optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=10**6), gradients), gradients)
