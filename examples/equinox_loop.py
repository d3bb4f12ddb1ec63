"""Equinox: gradients that come out of jit, added up in place by the engine; the optimizer steps once per window.

python examples/equinox_loop.py [--steps 100]
"""

from __future__ import annotations

import argparse

import equinox as eqx
import gradacc.jax
import jax
import optax
from digits import SIZES, cross_entropy, micro_batches


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(model: eqx.nn.MLP, pixels: jax.Array, digits: jax.Array) -> jax.Array:
    """A mean over images."""
    return cross_entropy(jax.vmap(model)(pixels), digits)


def main(steps: int) -> list[float]:
    """Train, and return the mean loss of each window."""
    model = eqx.nn.MLP(64, 10, 32, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    optimizer = optax.adam(0.01)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    acc = gradacc.jax.GradientAccumulator(params, every=len(SIZES))
    losses, total = [], 0.0
    for pixels, digits in micro_batches():
        value, gradients = loss(model, pixels, digits)
        total += float(value) * len(digits)
        if acc.add(gradients, weight=len(digits)):
            grads = acc.take()
            grads.clip_(1.0)
            updates, state = update(grads.tree(), state)
            model = eqx.apply_updates(model, updates)
            losses.append(total / grads.weight)
            total = 0.0
            if len(losses) == steps:
                break
    print(f"loss {losses[0]:.3f} in the first window, {losses[-1]:.3f} in window {steps}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
