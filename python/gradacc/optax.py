"""optax: a gradient transformation that evaluates another one once per window."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _core
from .jax.functional import State, add, init, nothing, take

Every: TypeAlias = int | Callable[[jax.Array], ArrayLike]


class AccumulateState(NamedTuple):
    """What a window holds, and the state of the inner transformation.

    Arrays, in a plain pytree. No field is called as optax calls its own, so that `optax.tree.get` and `optax.tree.set`
    find those of the inner transformation.
    """

    inner: Any
    """The state of the inner transformation, for parameters in the dtypes of the sums."""
    sums: Any
    """As in `gradacc.jax.State`."""
    window_weight: jax.Array
    window_count: jax.Array
    window_rejected: jax.Array
    window_unmasked: jax.Array
    window_length: jax.Array
    """How many micro-batches complete the open window; 0 if it has none yet. 0-d int32."""
    windows: jax.Array
    """How many windows were completed: the number of the gradient step. 0-d int32."""
    updated: jax.Array
    """Whether the last update was a step of the inner transformation. 0-d bool."""

    @property
    def window(self) -> State:
        """The open window, as the functions of `gradacc.jax` take it."""
        counters = (self.window_weight, self.window_count, self.window_rejected, self.window_unmasked)
        return State(self.sums, *counters)


def accumulate(
    inner: optax.GradientTransformation,
    every: Every,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    skip_nonfinite: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
    """Accumulate gradients, and let another transformation see their weighted mean, once per window.

    In between, updates are zeros, and the inner transformation is not evaluated: no moment moves, no weight decays, no
    schedule counts. Its schedules count windows. Under `jax.vmap` both are evaluated, and one is chosen.

    `update(grads, state, params, weight=1.0, scale=None, **extra)` takes a micro-batch's weight, and its scale, as
    `gradacc.jax.add` does, and keeps these to itself; other keyword arguments go to the inner transformation, from the
    micro-batch that completes the window. That is given the mean in the dtypes of the sums, and parameters in these;
    where parameters have 16 bits, `optax.apply_updates` rounds them after the step.

    Args:
        inner: A transformation of optax, or a chain of some.
        every: How many micro-batches complete a window; or a function from the number of gradient steps so far, a 0-d
            int32 array that may be traced, to that, at least 1. It is fixed when a window's first micro-batch comes, so
            that a window which is open keeps its length when this changes.
        reduction: "mean" divides by the weight of the window, "sum" does not.
        skip_nonfinite: Drop a micro-batch with NaN or infinity in it as a whole; the window waits for one more.
            Otherwise they are in the window's mean, and in no later one.
        dtype: What to sum in, as for `gradacc.jax.init`.

    Returns:
        A transformation. Its state is a pytree of arrays, `AccumulateState`, that can be saved and restored in the
        middle of a window.

    Raises:
        ArgumentError: An option is out of its range.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from gradacc.optax import accumulate, has_updated
        >>> params = jnp.zeros(2)
        >>> tx = accumulate(optax.sgd(1.0), every=2)
        >>> state = tx.init(params)
        >>> for gradient, tokens in (jnp.array([5.0, 1.0]), 2), (jnp.array([0.25, 1.0]), 8):
        ...     updates, state = tx.update(gradient, state, params, weight=tokens)
        ...     params = optax.apply_updates(params, updates)
        >>> bool(has_updated(state)), params.round(3).tolist()
        (True, [-1.2000000476837158, -1.0])
    """
    length_of = every if callable(every) else _always(every)
    if reduction not in ("mean", "sum"):
        raise _core.ArgumentError(f'reduction: expected "mean" or "sum", got {reduction!r}')
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> AccumulateState:
        window = init(params, dtype)
        state = jax.tree.map(_strong, inner.init(_like(window.sums, params)))
        length, windows = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return AccumulateState(state, *window, length, windows, jnp.zeros((), bool))

    def update_fn(
        grads: Any,
        state: AccumulateState,
        params: Any = None,
        *,
        weight: ArrayLike = 1.0,
        scale: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[Any, AccumulateState]:
        length = jnp.where(state.window_length == 0, length_of(state.windows), state.window_length).astype(jnp.int32)
        window = add(state.window, grads, weight, scale, skip_nonfinite)
        of_inner = jax.tree.map(_strong, state.inner)
        wide = None if params is None else _like(window.sums, params)
        extra_tree: Any
        extra_leaves, extra_tree = jax.tree.flatten(extra)
        arrays = {place: leaf for place, leaf in enumerate(extra_leaves) if isinstance(leaf, jax.Array | np.ndarray)}

        def step(sums: Any, of_inner: Any, counters: Any, wide: Any, arrays: dict[int, Any]) -> tuple[Any, Any]:
            """From the sums of a complete window, and a state, to updates and the next state, of the same dtypes."""
            given = [arrays.get(place, leaf) for place, leaf in enumerate(extra_leaves)]
            mean, _ = take(State(sums, *counters), reduction)
            new = inner.update(mean, of_inner, wide, **extra_tree.unflatten(given))
            kept: tuple[Any, Any] = jax.tree.map(lambda new, old: _strong(new, old.dtype), new, (sums, of_inner))
            return kept

        is_complete = window.count >= length
        stepped, of_inner = _only_if(is_complete, step, window.sums, of_inner, window[1:], wide, arrays)
        # The updates are where the sums were, so that both are read and written once, by whoever needs them.
        updates = jax.tree.map(lambda leaf: jnp.where(is_complete, leaf, jnp.zeros_like(leaf)), stepped)
        sums = jax.tree.map(lambda leaf: jnp.where(is_complete, nothing(leaf.dtype), leaf), stepped)
        window = State(sums, *(jnp.where(is_complete, jnp.zeros_like(number), number) for number in window[1:]))
        length, windows = jnp.where(is_complete, 0, length), state.windows + is_complete
        return updates, AccumulateState(of_inner, *window, length, windows.astype(jnp.int32), is_complete)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _only_if(is_complete: Any, step: Any, sums: Any, of_inner: Any, *rest: Any) -> Any:
    """What a step makes of sums and a state, if the window is complete; else these."""
    if not isinstance(is_complete, jax.core.Tracer):
        # Outside of jit, `cond` would be compiled again for every call.
        return step(sums, of_inner, *rest) if is_complete else (sums, of_inner)

    # What the inner transformation closes over, such as a learning rate that is differentiated, becomes an argument.
    step, hoisted = jax.closure_convert(step, sums, of_inner, *rest)
    rest = (*rest, *hoisted)

    # A loop of at most one turn leaves a donated state where it is; `cond` copies it. But only `cond` has a gradient.
    @jax.custom_jvp
    def chosen(is_complete: Any, sums: Any, of_inner: Any, *rest: Any) -> Any:
        def turn(carry: Any) -> Any:
            return jnp.zeros_like(carry[0]), step(*carry[1], *rest)

        return lax.while_loop(lambda carry: carry[0], turn, (is_complete, (sums, of_inner)))[1]

    def branched(is_complete: Any, sums: Any, of_inner: Any, *rest: Any) -> Any:
        return lax.cond(is_complete, step, lambda *held: held[:2], sums, of_inner, *rest)

    chosen.defjvp(functools.partial(jax.jvp, branched))
    return chosen(is_complete, sums, of_inner, *rest)


def has_updated(state: Any) -> jax.Array:
    """Whether the last update was a step of the inner transformation, and not zeros in mid-window.

    Args:
        state: Of `accumulate`, or of a transformation that has one within it, such as a chain.

    Returns:
        A 0-d array of bool.

    Raises:
        ArgumentError: There is not exactly one state of `accumulate` in it.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, AccumulateState))
    found = [node for node in nodes if isinstance(node, AccumulateState)]
    if len(found) != 1:
        raise _core.ArgumentError(f"state: expected one with a single state of accumulate in it, got {len(found)}")
    return found[0].updated


def _always(every: Any) -> Callable[[jax.Array], int]:
    try:
        length = 0 if isinstance(every, bool) else operator.index(every)
    except TypeError:
        length = 0
    if length < 1:
        raise _core.ArgumentError(f"every: expected an int of at least 1 or a function, got {every!r}")
    return lambda _: length


def _like(sums: Any, params: Any) -> Any:
    """Parameters in the dtypes of their sums."""
    return jax.tree.map(lambda of, param: jnp.asarray(param, of.dtype), sums, params)


def _strong(leaf: Any, dtype: DTypeLike | None = None) -> Any:
    """An array that is not weakly typed, so that its dtype is the same in every branch and window."""
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return lax.convert_element_type(array, array.dtype if dtype is None else dtype)
