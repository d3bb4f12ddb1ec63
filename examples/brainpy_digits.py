"""BrainPy: a recurrent classifier reads digits row by row, in micro-batches.

python examples/brainpy_digits.py [--steps 60]
"""

from __future__ import annotations

import argparse
from typing import Any

import brainpy as bp
import brainpy.math as bm
import jax
import jax.numpy as jnp
import numpy as np
from digits import cross_entropy, images
from gradacc.brainpy import accumulate_gradients


class Classifier(bp.DynamicalSystem):
    """From a row of 8 pixels to 10 logits, by way of 100 hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = bp.dyn.RNNCell(8, 100, mode=bm.training_mode)
        self.out = bp.dnn.Dense(100, 10, mode=bm.training_mode)

    def update(self, row: jax.Array) -> Any:
        """One step in time."""
        return self.out(self.rnn(row))


def main(steps: int) -> list[float]:
    """Train, and return the losses."""
    bm.random.seed(0)
    model = Classifier()

    def loss(pixels: jax.Array, digits: jax.Array) -> jax.Array:
        """A mean over images; the largest logits over all rows decide."""
        bp.reset_state(model, len(pixels))
        outputs = bm.for_loop(model.update, jnp.swapaxes(pixels, 0, 1))
        return cross_entropy(bm.as_jax(outputs).max(axis=0), digits)

    variables = model.train_vars().unique()
    optimizer = bp.optim.Adam(0.01, train_vars=variables)
    gradients = accumulate_gradients(loss, variables, micro_batches=4)

    @bm.jit
    def step(pixels: jax.Array, digits: jax.Array) -> Any:
        value, grads = gradients(pixels, digits)
        optimizer.update(grads)
        return value

    pixels, digits = images()
    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        rows = rng.choice(len(digits), 128, replace=False)
        value: Any = step(jnp.asarray(pixels[rows]), jnp.asarray(digits[rows]))
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in step {steps}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
