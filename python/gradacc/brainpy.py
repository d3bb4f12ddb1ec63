"""BrainPy: the gradient of a batch in micro-batches, for functions of Variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainpy.math as bm

from .jax.stateful import accumulate_by


def accumulate_gradients(
    loss_fun: Callable[..., Any],
    grad_vars: Any,
    *,
    micro_batches: int,
    weight: Callable[..., Any] | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Make a function that evaluates a loss and its gradient, one micro-batch at a time.

    Like `bm.grad`, on `bm.scan`: only one micro-batch's intermediate values are in memory.
    Value and gradients are those of the whole batch within rounding. Variables that the loss changes see every
    micro-batch, one after the other; the first micro-batch of each size runs before the scan, so that hidden states
    which the loss resets have their shape in it.

    Args:
        loss_fun: A function of the batch that returns a scalar: a mean over its samples (or tokens, see `weight`). All
            its arguments are the batch: trees of arrays whose first dimension is the samples, all of the same number.
        grad_vars: The Variables to differentiate: one, a list or a dict, as for `bm.grad`.
        micro_batches: How many. Of k, micro-batch i has the samples i, i + k, i + 2k and so on; where k does not
            divide the samples, the first ones have one more. If there are fewer samples than k, each is one.
        weight: From the arguments of a micro-batch to what it counts for, such as its tokens: a scalar. By default its
            samples. At 0 what the loss returns is not looked at, and may be NaN.
        has_aux: Whether the loss returns a pair of the scalar and something else, which is stacked, with one entry per
            micro-batch, in a new first dimension.

    Returns:
        A function of the batch whose result is `(value, gradients)`, or `((value, aux), gradients)`; gradients are in
        the structure of `grad_vars` and in float32 at least. It is jitted, and may be called within
        `bm.jit`.

    Raises:
        ArgumentError: An option is out of its range; or, when it is called, the arrays of the batch have other numbers
            of samples, or aux has a shape that depends on their number, which differs.

    Example:
        >>> import brainpy.math as bm
        >>> import jax.numpy as jnp
        >>> from gradacc.brainpy import accumulate_gradients
        >>> w = bm.Variable(jnp.asarray(2.0))
        >>> gradients = accumulate_gradients(lambda x: jnp.mean(x * w.value), w, micro_batches=4)
        >>> value, gradient = gradients(jnp.arange(8.0))
        >>> float(value), float(gradient)
        (7.0, 3.5)
    """
    return accumulate_by(bm, loss_fun, grad_vars, micro_batches, weight, has_aux)
