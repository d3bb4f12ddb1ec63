"""What the JAX examples train on: scikit-learn's handwritten digits, in micro-batches of unequal size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

# Of the 4 micro-batches of a window; 128 images in all.
SIZES = (64, 32, 24, 8)


def images() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """1,797 images of 8 by 8 pixels between 0 and 1, and which digit each shows."""
    digits = load_digits()
    return digits.images.astype(np.float32) / 16, digits.target


def micro_batches() -> Iterator[tuple[jax.Array, jax.Array]]:
    """Micro-batches without end, each of some images, flat, and their digits."""
    pixels, targets = images()
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(targets))
        for window in np.split(order[: len(order) // sum(SIZES) * sum(SIZES)], len(order) // sum(SIZES)):
            for rows in np.split(window, np.cumsum(SIZES)[:-1]):
                yield jnp.asarray(pixels[rows].reshape(len(rows), 64)), jnp.asarray(targets[rows])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over images."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1).mean()
