"""A batch in micro-batches: the gradient of the whole, with the memory of one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .. import _core
from .batch import Batch, number_of
from .functional import add, init, take

Scan = Callable[[Callable[[Any, Any], tuple[Any, Any]], Any, jax.Array], tuple[Any, Any]]


def accumulate_gradients(
    fun: Callable[..., Any],
    *,
    micro_batches: int,
    weight: Callable[..., Any] | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float32,
    reduction: Literal["mean", "sum"] = "mean",
    reduce_aux: Literal["mean", "sum"] | None = None,
) -> Callable[..., Any]:
    """Make a function that evaluates `fun` and its gradient like `jax.value_and_grad`, one micro-batch at a time.

    `fun` runs in a `jax.lax.scan`, so that only one micro-batch's intermediate values are in memory. Value and gradient
    are those of the whole batch within rounding: the means of what the micro-batches give, weighted.

    Args:
        fun: As for `jax.value_and_grad`: returns a scalar that is a mean over its samples (or tokens, see `weight`).
            Arguments that are not in `argnums` are the batch: trees of arrays whose first dimension is the samples,
            all of the same number. Keyword arguments are handed on as they are, to every micro-batch; those that are no
            arrays have to be hashable.
        micro_batches: How many. Of k, micro-batch i has the samples i, i + k, i + 2k and so on; where k does not
            divide the samples, the first ones have one more. If there are fewer samples than k, each is one.
        weight: From the batch arguments of a micro-batch, in their order, to what it counts for, such as its tokens: a
            scalar. By default its samples. At 0 what `fun` returns is not looked at, and may be NaN.
        argnums: Which positional arguments to differentiate, as for `jax.value_and_grad`.
        has_aux: Whether `fun` returns a pair of the scalar and something else.
        dtype: What to sum in, as for `gradacc.jax.init`.
        reduction: "mean" divides by the weight of the batch; "sum" does not.
        reduce_aux: None stacks what else `fun` returns, with one entry per micro-batch, in a new first dimension; "sum"
            adds it up, and "mean" is its mean, weighted as the gradients are.

    Returns:
        A function of the same arguments, whose result is `(value, gradient)`, or `((value, aux), gradient)`. Gradients
        have the dtypes of the sums. It may be jitted, is compiled once per shape in any case, and reads the
        batch where it lies: arrays that are spread over devices by sample are not exchanged.

    Raises:
        ArgumentError: An option is out of its range; or, when it is called, the arrays of the batch have other numbers
            of samples, or what is to be stacked has a shape that depends on their number, which differs.

    Example:
        >>> import jax.numpy as jnp
        >>> from gradacc.jax import accumulate_gradients
        >>> loss = lambda w, x, y: jnp.mean((x * w - y) ** 2)
        >>> value, gradient = accumulate_gradients(loss, micro_batches=3)(1.0, jnp.arange(7.0), jnp.zeros(7))
        >>> float(value), float(gradient)
        (13.0, 26.0)
    """
    number = number_of(micro_batches)
    for name, given in (("reduction", reduction), ("reduce_aux", reduce_aux)):
        if given not in ("mean", "sum") and (given is not None or name == "reduction"):
            raise _core.ArgumentError(f'{name}: expected "mean" or "sum", got {given!r}')

    @functools.partial(jax.jit, static_argnums=0)
    def run(options: tuple[Any, ...], arrays: dict[str, Any], *args: Any) -> Any:
        given = {**dict(options), **arrays}
        numbers = [argnums] if isinstance(argnums, int) else argnums
        chosen = {number % len(args) for number in numbers}
        differentiated = jax.value_and_grad(fun, argnums, has_aux=has_aux)
        batch = Batch([arg for place, arg in enumerate(args) if place not in chosen], number)

        def one(micro_batch: Sequence[Any]) -> tuple[Any, Any, Any]:
            rest = iter(micro_batch)
            result, gradient = differentiated(
                *(arg if place in chosen else next(rest) for place, arg in enumerate(args)), **given
            )
            value, aux = result if has_aux else (result, None)
            return value, aux, gradient

        value, aux, gradient = accumulate(one, batch, weight, lax.scan, dtype, reduction, reduce_aux)
        return ((value, aux), gradient) if has_aux else (value, gradient)

    @functools.wraps(fun)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        # Only arrays can be traced.
        arrays = {name: given for name, given in kwargs.items() if _is_of_arrays(given)}
        options = tuple(sorted((name, given) for name, given in kwargs.items() if name not in arrays))
        return run(options, arrays, *args)

    return accumulated


def accumulate(
    one: Callable[[Sequence[Any]], tuple[Any, Any, Any]],
    batch: Batch,
    weight: Callable[..., Any] | None,
    scan: Scan,
    dtype: DTypeLike,
    reduction: Literal["mean", "sum"],
    reduce_aux: Literal["mean", "sum"] | None = None,
    *,
    is_stateful: bool = False,
) -> tuple[Any, Any, Any]:
    """Run micro-batches one after the other.

    Args:
        one: From a micro-batch to value, aux and gradients.
        batch: What to take them from.
        weight: From a micro-batch to its weight; None: its samples.
        scan: As `jax.lax.scan`.
        dtype: What to sum in.
        reduction: What to make of the sums.
        reduce_aux: What to make of aux; None stacks it.
        is_stateful: Whether `one` changes variables, of which some get the shape of a micro-batch when it runs: the
            first micro-batch of each size is not a part of the scan then.

    Returns:
        Value, aux and gradients of the whole batch.
    """

    def step(size: int, index: Any) -> tuple[Any, Any, Any]:
        """What to sum of a micro-batch, what to stack of it, and its weight."""
        micro_batch = batch.at(index, size)
        value, aux, gradient = one(micro_batch)
        of_batch = jnp.asarray(size if weight is None else weight(*micro_batch), float)
        means, totals, stacked = (None, None, aux)
        if reduce_aux == "mean":
            means, stacked = aux, None
        elif reduce_aux == "sum":
            totals, stacked = jax.tree.map(jnp.asarray, aux), None
        return (value, gradient, means), (stacked, totals), of_batch.reshape(())

    def body(size: int, carry: Any, index: Any) -> tuple[Any, Any]:
        state, totals = carry
        new, (stacked, more), of_batch = step(size, index)
        totals = jax.tree.map(lambda total, value: total + value, totals, more)
        return (add(state, new, of_batch), totals), stacked

    def empty(size: int, index: int) -> tuple[Any, Any]:
        """An empty carry, for a scan of such micro-batches."""
        like, (_, totals), of_batch = jax.eval_shape(functools.partial(step, size), index)
        # Like what will be added to them, as the types of a scan demand: also in how they vary over devices.
        zeros = functools.partial(lax.full_like, of_batch, 0)
        state = init(like, dtype)._replace(weight=zeros(dtype=float), unmasked=zeros(dtype=jnp.int32))
        return state, jax.tree.map(lambda total: lax.full_like(total, 0), totals)

    carry: Any = None
    stacks = []
    for first, number, size in batch.groups:
        if is_stateful:
            new, (stacked, totals), of_batch = step(size, first)
            if carry is None:
                carry = init(new, dtype), jax.tree.map(jnp.zeros_like, totals)
            carry = add(carry[0], new, of_batch), jax.tree.map(jnp.add, carry[1], totals)
            stacks.append(jax.tree.map(lambda entry: jnp.asarray(entry)[None], stacked))
            first, number = first + 1, number - 1
        elif carry is None:
            carry = empty(size, first)
        if number:
            carry, stacked = scan(functools.partial(body, size), carry, first + jnp.arange(number))
            stacks.append(stacked)
    (value, gradient, means), _ = take(carry[0], reduction)
    if reduce_aux is not None:
        return value, means if reduce_aux == "mean" else carry[1], gradient
    return value, _joined(stacks), gradient


def _joined(stacks: list[Any]) -> Any:
    if len(stacks) == 1:
        return stacks[0]
    try:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)
    except (TypeError, ValueError) as error:
        raise _core.ArgumentError(
            "micro_batches: what fun returns beside its value has a shape that depends on the number of samples, which "
            f"differs between the micro-batches, so that it can't be stacked: {error}"
        ) from error


def _is_of_arrays(given: Any) -> bool:
    leaves = jax.tree.leaves(given)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)
