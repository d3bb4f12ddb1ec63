"""Plain JAX: micro-batches of one batch, inside jit, in the memory of one of them.

python examples/jax_plain.py [--steps 100]
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from digits import cross_entropy, images
from gradacc.jax import accumulate_gradients


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """A mean over images."""
    hidden = jnp.tanh(batch["pixels"] @ params["hidden"])
    return cross_entropy(hidden @ params["output"], batch["digits"])


@jax.jit
def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One step of gradient descent on a whole batch."""
    value, gradients = accumulate_gradients(loss, micro_batches=4)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value


def main(steps: int) -> list[float]:
    """Train, and return the losses."""
    pixels, digits = images()
    keys = jax.random.split(jax.random.key(0), steps + 2)
    params = {
        "hidden": jax.random.normal(keys[-1], (64, 32)) / 8,
        "output": jax.random.normal(keys[-2], (32, 10)) / 8,
    }
    losses = []
    for key in keys[:steps]:
        rows = jax.random.choice(key, len(digits), (130,), replace=False)  # which 4 does not divide
        params, value = step(params, {"pixels": pixels.reshape(-1, 64)[rows], "digits": digits[rows]})
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in step {steps}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
