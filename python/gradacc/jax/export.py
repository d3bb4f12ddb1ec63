"""Hand-over of gradients as JAX arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from ..gradients import Gradients


def to_jax(grads: Gradients) -> dict[Any, jax.Array]:
    """Arrays that alias the memory of the gradients."""
    return {id: jax.dlpack.from_dlpack(gradient) for id, gradient in grads.items()}
