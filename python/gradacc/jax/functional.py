"""A window as a pytree, and pure functions of it: for inside `jit`, `scan`, `vmap`, `shard_map`."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jax.typing import ArrayLike, DTypeLike

from .. import _core
from .tree import Structure

SUMMED = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


class State(NamedTuple):
    """What a window holds. Every leaf is an array of numbers that add up.

    So the sum of the states of several devices, as of `jax.lax.psum`, is the window of all of them.
    """

    sums: Any
    """Sums of scale times gradient, in the structure of the parameters. -0.0 where nothing was added."""
    weight: jax.Array
    """The weight so far; 0-d, of JAX's default float: without x64 that is float32, which has whole numbers to 2**24."""
    count: jax.Array  # type: ignore[assignment]  # shadows the method of tuples, as fields of optax's states do
    """How many micro-batches were added; 0-d int32."""
    rejected: jax.Array
    """How many more were dropped for being non-finite; 0-d int32."""
    unmasked: jax.Array
    """How many of those that were added had another scale than 0; 0-d int32."""


def init(tree: Any, dtype: DTypeLike = jnp.float32) -> State:
    """Return an empty window.

    Args:
        tree: Parameters, or anything with their structure, shapes and dtypes, such as what `jax.eval_shape` returns.
            None is no parameter.
        dtype: What to sum in: that which this and the dtype of a parameter are promoted to. So by default 16 and 32
            bits are summed in float32, float64 in float64, complex64 in complex64; bfloat16 in bfloat16 only if that is
            given here.

    Returns:
        A state whose sums lie where the parameters lie.

    Raises:
        DtypeError: A leaf is no array, or of a dtype that can't be summed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradacc.jax import add, init, take
        >>> params = {"w": jnp.array([1.0, 2.0])}
        >>> loss = lambda params, batch: jnp.mean(batch @ params["w"])
        >>> step = jax.jit(lambda state, batch: add(state, jax.grad(loss)(params, batch), len(batch)))
        >>> state = init(params)
        >>> for batch in jnp.ones((3, 2)), 5 * jnp.ones((1, 2)):
        ...     state = step(state, batch)
        >>> mean, state = take(state)
        >>> mean["w"].tolist(), int(state.count)
        ([2.0, 2.0], 0)
    """
    structure = Structure(tree)
    sums = [_empty(id, leaf, dtype) for id, leaf in zip(structure.ids, structure.flatten(tree), strict=True)]
    # Arrays of their own, each: a state may be donated.
    count, rejected, unmasked = (jnp.zeros((), jnp.int32) for _ in range(3))
    return State(structure.unflatten(sums), jnp.zeros((), float), count, rejected, unmasked)


def add(
    state: State,
    grads: Any,
    weight: ArrayLike = 1.0,
    scale: ArrayLike | None = None,
    skip_nonfinite: bool = False,
) -> State:
    """Return the window with one more micro-batch in it.

    Args:
        state: As of `init`, `add` or `take`. Donate it to a jitted function, and it is updated in place.
        grads: Gradients in the structure of the parameters. None in place of a leaf adds nothing to it.
        weight: What the micro-batch counts for in the divisor, such as its samples or tokens; at least 0.
        scale: What its gradients are multiplied with; the weight by default. At 0 they are not looked at.
        skip_nonfinite: Drop the micro-batch as a whole, and count it as rejected, if a gradient is NaN or infinite.

    Raises:
        GradaccError: `grads` has another structure or shape.
        DtypeError: A gradient is no array, or of a wider dtype than its sums.
        ArgumentError: Weight or scale is not one number, or a plain number that is out of its range. The values of JAX
            arrays are not looked at.
    """
    weight = scalar("weight", weight, least=0)
    scale = weight if scale is None else scalar("scale", scale)
    structure = Structure(state.sums)
    new = structure.flatten(grads)
    pairs = list(zip(structure.ids, structure.flatten(state.sums), new, strict=True))
    for id, sums, gradient in pairs:
        _check(id, sums, gradient)
    is_read = jnp.asarray(scale != 0)
    is_kept = jnp.asarray(True)
    if skip_nonfinite:
        finite = [jnp.isfinite(gradient).all() for gradient in new if gradient is not None]
        is_kept = jnp.stack(finite).all() | ~is_read if finite else is_kept
        is_read &= is_kept
        weight = jnp.where(is_kept, weight, 0)
    total = [sums if gradient is None else _added(sums, gradient, scale, is_read) for _, sums, gradient in pairs]
    one, none = is_kept.astype(jnp.int32), (~is_kept).astype(jnp.int32)
    return State(
        structure.unflatten(total),
        state.weight + weight,
        state.count + one,
        state.rejected + none,
        state.unmasked + is_read.astype(jnp.int32),
    )


def take(state: State, reduction: Literal["mean", "sum"] = "mean") -> tuple[Any, State]:
    """Close the window.

    Args:
        state: As of `add`.
        reduction: "mean" divides by the weight of the window, "sum" does not.

    Returns:
        The gradients, in the structure of the parameters and the dtypes of the sums, and an empty window. What no
        micro-batch had is zeros, and so is everything if there was none, or all were masked. The mean of micro-batches
        that were not masked over a weight of 0 is NaN or infinite: inside `jit` nothing can be raised.

    Raises:
        ArgumentError: There is no such reduction.
    """
    if reduction not in ("mean", "sum"):
        raise _core.ArgumentError(f'reduction: expected "mean" or "sum", got {reduction!r}')
    divisor = jnp.where((state.unmasked == 0) & (state.weight == 0), 1, state.weight) if reduction == "mean" else None
    grads = jax.tree.map(lambda sums: _divided(sums, divisor), state.sums)
    # Never true, which the compiler can't know: so the empty window lies where, and is spread as, this one is.
    never = state.count < 0
    sums = jax.tree.map(lambda leaf: jnp.where(never, leaf, nothing(leaf.dtype)), state.sums)
    return grads, State(sums, *(jnp.where(never, number, jnp.zeros_like(number)) for number in state[1:]))


def _empty(id: str, leaf: Any, dtype: DTypeLike) -> jax.Array:
    try:
        own = dtypes.canonicalize_dtype(leaf.dtype)
    except (AttributeError, TypeError) as error:
        raise _core.DtypeError(f"parameter {id!r}: expected an array, got {leaf!r}") from error
    for what, given in (("numbers", own), ("sums", jnp.dtype(dtype))):
        if given.name not in SUMMED:
            raise _core.DtypeError(f"parameter {id!r}: expected {what} of {', '.join(SUMMED)}, got {given}")
    wide = dtypes.canonicalize_dtype(jnp.promote_types(own, dtype))
    return lax.full_like(leaf, nothing(wide), wide)


def nothing(dtype: DTypeLike) -> jax.Array:
    """The identity of addition: -0.0 + x is x for every x, -0.0 itself too, while 0.0 + -0.0 is 0.0."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.asarray(complex(-0.0, -0.0) if is_complex else -0.0, dtype)


def _check(id: str, sums: jax.Array, gradient: Any) -> None:
    if gradient is None:
        return
    try:
        shape, dtype = tuple(gradient.shape), dtypes.canonicalize_dtype(gradient.dtype)
    except (AttributeError, TypeError) as error:
        raise _core.DtypeError(f"parameter {id!r}: expected an array, got {gradient!r}") from error
    if shape != sums.shape:
        raise _core.ShapeError(f"parameter {id!r}: expected a gradient of shape {sums.shape}, got {shape}")
    if dtype.name not in SUMMED or jnp.promote_types(dtype, sums.dtype) != sums.dtype:
        raise _core.DtypeError(f"parameter {id!r}: sums of {sums.dtype} take no gradient of {dtype}")


def scalar(name: str, given: Any, least: float = -math.inf) -> jax.Array:
    """A weight or scale as a scalar of JAX's default float. Plain numbers are checked."""
    if isinstance(given, np.ndarray) and given.ndim == 0:
        given = given.item()
    if isinstance(given, numbers.Real) and not (math.isfinite(given) and float(given) >= least):
        of = "" if math.isinf(least) else f" of at least {least}"
        raise _core.ArgumentError(f"{name}: expected a finite number{of}, got {given}")
    if isinstance(given, str) or jnp.shape(given):
        raise _core.ArgumentError(f"{name}: expected one number, got {given!r}")
    return jnp.asarray(given, float)


def _added(sums: jax.Array, gradient: jax.Array, scale: jax.Array, is_read: jax.Array) -> jax.Array:
    """The sum with a scaled gradient in it; computed in float32 at least, and rounded once."""
    wide = jnp.promote_types(sums.dtype, jnp.float32)
    gradient = jnp.asarray(gradient, wide)
    if jnp.issubdtype(wide, jnp.complexfloating):
        # As pairs: multiplied as complex numbers, a NaN in one part would be in the other too.
        factor = scale.astype(gradient.real.dtype)
        scaled = lax.complex(gradient.real * factor, gradient.imag * factor)
    else:
        scaled = gradient * scale.astype(wide)
    return (sums + jnp.where(is_read, scaled, nothing(wide))).astype(sums.dtype)


def _divided(sums: jax.Array, divisor: jax.Array | None) -> jax.Array:
    if divisor is None:
        return sums
    if jnp.issubdtype(sums.dtype, jnp.complexfloating):
        factor = divisor.astype(sums.real.dtype)
        return lax.complex(sums.real / factor, sums.imag / factor)
    wide = jnp.promote_types(sums.dtype, jnp.float32)
    return (sums.astype(wide) / divisor.astype(wide)).astype(sums.dtype)
