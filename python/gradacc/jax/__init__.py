"""JAX: gradients in pytrees, the same window as pure functions for inside `jit`, and micro-batches of one batch.

`GradientAccumulator` is the engine, for gradients that come out of `jit` and lie in host memory. `init`, `add` and
`take` are functions of a state, to be jitted, scanned, vmapped, donated and sharded. `accumulate_gradients` is
`jax.value_and_grad` with the memory of one micro-batch.
"""

from .accumulator import GradientAccumulator, Gradients
from .functional import State, add, init, take
from .micro_batches import accumulate_gradients

__all__ = ["GradientAccumulator", "Gradients", "State", "accumulate_gradients", "add", "init", "take"]
