"""Micro-batches for functions that change variables, as those of brainstate and BrainPy do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .batch import Batch, number_of
from .micro_batches import accumulate


def accumulate_by(
    transforms: Any,
    loss_fun: Callable[..., Any],
    grad_vars: Any,
    micro_batches: int,
    weight: Callable[..., Any] | None,
    has_aux: bool,
) -> Callable[..., Any]:
    """`accumulate_gradients` by means of a library's own `grad`, `scan` and `jit`, which keep track of variables."""
    number = number_of(micro_batches)
    differentiated = transforms.grad(loss_fun, grad_vars, has_aux=has_aux, return_value=True)

    def one(micro_batch: Sequence[Any]) -> tuple[Any, Any, Any]:
        gradients, value, *aux = differentiated(*micro_batch)
        return value, aux[0] if has_aux else None, gradients

    def accumulated(*batch: Any) -> Any:
        value, aux, gradients = accumulate(
            one, Batch(batch, number), weight, transforms.scan, jnp.float32, "mean", is_stateful=True
        )
        return ((value, aux), gradients) if has_aux else (value, gradients)

    jitted: Callable[..., Any] = transforms.jit(accumulated)
    return jitted
