"""Flax: a TrainState whose optimizer steps once per window, on the mean of unequal micro-batches.

python examples/flax_train_state.py [--steps 100]
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from digits import cross_entropy, micro_batches
from flax import linen as nn
from flax.training.train_state import TrainState
from gradacc.optax import accumulate, has_updated


class Network(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """From images to logits."""
        return nn.Dense(10)(nn.tanh(nn.Dense(32)(pixels)))


@jax.jit
def step(state: TrainState, pixels: jax.Array, digits: jax.Array) -> tuple[TrainState, jax.Array]:
    """One micro-batch. `apply_gradients` has no weight, so the transformation is called here as it would."""
    loss = lambda params: cross_entropy(state.apply_fn(params, pixels), digits)  # noqa: E731
    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params, weight=len(digits))
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value


def main(steps: int) -> list[float]:
    """Train, and return the loss of the first micro-batch of each window."""
    network = Network()
    tx = accumulate(optax.adamw(optax.cosine_decay_schedule(0.02, steps)), every=4)  # the schedule counts windows
    params = network.init(jax.random.key(0), jnp.ones((1, 64)))
    state, losses, is_first = TrainState.create(apply_fn=network.apply, params=params, tx=tx), [], True
    for pixels, digits in micro_batches():
        state, value = step(state, pixels, digits)
        if is_first:
            losses.append(float(value))
        is_first = bool(has_updated(state.opt_state))
        if is_first and len(losses) == steps:
            break
    print(f"loss {losses[0]:.3f} in the first window, {losses[-1]:.3f} in window {steps}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
