"""A batch in micro-batches: the gradient of the whole, with the memory of one of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jax.typing import DTypeLike

from .. import _core
from .batch import Batch, number_of
from .functional import add, init, scalar, take

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
            all of the same number. Keyword arguments are handed on as they are, to every micro-batch. Arrays in them
            are traced; everything else has to be hashable, and another value is compiled anew.
        micro_batches: How many. Of k, micro-batch i has the samples i, i + k, i + 2k and so on; where k does not
            divide the samples, the first ones have one more. If there are fewer samples than k, each is one.
        weight: From the batch arguments of a micro-batch, in their order, to what it counts for, such as its tokens: a
            scalar. By default its samples. At 0 what `fun` returns is not looked at, and may be NaN, unless it is
            stacked.
        argnums: Which positional arguments to differentiate, as for `jax.value_and_grad`.
        has_aux: Whether `fun` returns a pair of the scalar and something else.
        dtype: What to sum in, as for `gradacc.jax.init`.
        reduction: "mean" divides by the weight of the batch; "sum" does not.
        reduce_aux: None stacks what else `fun` returns, with one entry per micro-batch, in a new first dimension; "sum"
            adds it up, in 32 bits at least, and "mean" is its mean, weighted as the gradients are.

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
    def run(keywords: _Keywords, arrays: list[Any], *args: Any) -> Any:
        given = keywords.with_arrays(arrays)
        chosen = [_place(place, len(args)) for place in (argnums if isinstance(argnums, Sequence) else [argnums])]
        places = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
        differentiated = jax.value_and_grad(fun, places, has_aux=has_aux)
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
        keywords = _Keywords(kwargs)
        return run(keywords, keywords.arrays, *args)

    return accumulated


class _Keywords:
    """Keyword arguments: arrays, which are traced, and everything else, which the compiled program is one of."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._leaves, self._treedef = jax.tree.flatten(given)
        self._is_array = tuple(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in self._leaves)
        pairs = list(zip(self._leaves, self._is_array, strict=True))
        self.arrays = [leaf for leaf, is_array in pairs if is_array]
        self._leaves = [None if is_array else leaf for leaf, is_array in pairs]
        # 1, True and 1.0 are equal, and so are 0.0 and -0.0; NaN is not even equal to itself.
        others = tuple((type(leaf), repr(leaf) if isinstance(leaf, float) else leaf) for leaf in self._leaves)
        self._key = (self._treedef, self._is_array, others)

    def with_arrays(self, arrays: list[Any]) -> Any:
        """All, with these arrays in their places."""
        rest = iter(arrays)
        leaves = [next(rest) if is_array else leaf for leaf, is_array in zip(self._leaves, self._is_array, strict=True)]
        return jax.tree.unflatten(self._treedef, leaves)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keywords) and self._key == other._key


def _place(given: Any, count: int) -> int:
    place = operator.index(given)
    if not -count <= place < count:
        raise _core.ArgumentError(f"argnums: expected places among {count} positional arguments, got {given}")
    return place % count


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
        of_batch = scalar("weight", size if weight is None else weight(*micro_batch), least=0)
        means, totals, stacked = (None, None, aux)
        if reduce_aux == "mean":
            means, stacked = jax.tree.map(_widened, aux), None
        elif reduce_aux == "sum":
            # In 32 bits at least, and masked as the gradients are.
            terms = jax.tree.map(lambda leaf: jnp.asarray(leaf, _wide(leaf)), aux)
            totals = jax.tree.map(lambda term: jnp.where(of_batch == 0, jnp.zeros_like(term), term), terms)
            stacked = None
        summed = {"aux": means, "gradient": gradient, "value": jax.tree.map(_widened, value)}
        return summed, (stacked, totals), of_batch

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
    result, _ = take(carry[0], reduction)
    aux = _joined(stacks) if reduce_aux is None else result["aux"] if reduce_aux == "mean" else carry[1]
    return result["value"], aux, result["gradient"]


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


def _wide(leaf: Any) -> Any:
    """The dtype to add up in: 16 bits in float32, and what are no fractions in JAX's default int."""
    dtype = jnp.asarray(leaf).dtype
    wide = jnp.promote_types(dtype, jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else int)
    return dtypes.canonicalize_dtype(wide)


def _widened(leaf: Any) -> jax.Array:
    """What is to be averaged, in float32 at least."""
    array = jnp.asarray(leaf)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
