"""One micro-batch, against how JAX users add gradients up."""

import functools

import gradacc
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import GPT2_SMALL, count

ADD_BYTES = 12 * count(GPT2_SMALL)


@pytest.fixture(scope="module")
def gradients():
    return {f"p{i}": jnp.ones(shape) for i, shape in enumerate(GPT2_SMALL)}


class TestAddGpt2SmallJax:
    """Add the float32 gradients of GPT-2 small, 148 arrays of 124 M elements."""

    def test_gradacc(self, timed, gradients):
        acc = gradacc.GradientAccumulator(gradients)
        acc.add(gradients)
        timed(acc.add, gradients, len_bytes=ADD_BYTES)

    def test_jitted_tree_add_donated(self, timed, gradients):
        add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)
        sums = [jax.tree.map(jnp.zeros_like, gradients)]
        timed(lambda: sums.append(jax.block_until_ready(add(sums.pop(), gradients))), len_bytes=ADD_BYTES)

    def test_optax_multi_steps(self, timed, gradients):
        """An update in mid-window."""
        optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=10**6)
        update = jax.jit(optimizer.update, donate_argnums=1)
        states = [optimizer.init(gradients)]

        def step():
            _, state = jax.block_until_ready(update(gradients, states.pop()))
            states.append(state)

        timed(step, len_bytes=ADD_BYTES)
