"""The engine, for gradients in pytrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsFloat, cast

import jax

from .. import _core
from ..accumulator import GradientAccumulator as Base
from ..gradients import Gradients as BaseGradients
from .tree import Structure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..schedule import Every


class GradientAccumulator(Base):
    """`gradacc.GradientAccumulator` for gradients in a pytree, that come out of `jit` and lie in host memory.

    Sums them in place, in memory of its own: jax arrays are only read, and without a copy. All of the contract is that
    of the base class; a micro-batch is given as a tree, and the ids are key paths such as `layers/0/w`. Keys are joined
    by `/`; within a key, `~` is written `~0` and `/` is written `~1`. Should two keys of one node read the same, as the
    int 3 and the str "3" do, the id of the later leaf ends in `~2`.

    Args:
        tree: Parameters, or anything with their structure, shapes and dtypes, such as what `jax.eval_shape` returns:
            dicts, lists, tuples, namedtuples, dataclasses, variables of flax and states of its nnx, modules of equinox.
            None is no parameter.
        every: As for `gradacc.GradientAccumulator`.
        until_weight: As for `gradacc.GradientAccumulator`.
        reduction: As for `gradacc.GradientAccumulator`.
        dtype: As for `gradacc.GradientAccumulator`; also a dtype of JAX.
        on_nonfinite: As for `gradacc.GradientAccumulator`.
        on_missing: As for `gradacc.GradientAccumulator`.
        micro_norms: As for `gradacc.GradientAccumulator`.

    Raises:
        ArgumentError: An option is out of its range.
        DtypeError: A leaf is no array, or of a dtype that can't be summed.

    Example:
        >>> import gradacc.jax, jax, jax.numpy as jnp
        >>> params = {"w": jnp.zeros(2), "b": [jnp.zeros(())]}
        >>> loss = lambda params, batch: jnp.mean(batch @ params["w"] + params["b"][0])
        >>> acc = gradacc.jax.GradientAccumulator(params, every=2)
        >>> for batch in jnp.ones((3, 2)), 5 * jnp.ones((1, 2)):
        ...     complete = acc.add(jax.jit(jax.grad(loss))(params, batch), weight=len(batch))
        >>> complete, acc.ids, acc.take().tree()["w"].tolist()
        (True, ['b/0', 'w'], [2.0, 2.0])
    """

    def __init__(
        self,
        tree: Any,
        *,
        every: Every | None = None,
        until_weight: SupportsFloat | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        dtype: Any = None,
        on_nonfinite: Literal["propagate", "raise", "skip"] = "propagate",
        on_missing: Literal["ignore", "error"] = "ignore",
        micro_norms: bool = False,
    ) -> None:
        self._structure = Structure(tree)
        super().__init__(
            zip(self._structure.ids, self._structure.flatten(tree), strict=True),
            every=every,
            until_weight=until_weight,
            reduction=reduction,
            dtype=dtype,
            on_nonfinite=on_nonfinite,
            on_missing=on_missing,
            micro_norms=micro_norms,
            backend="engine",
        )

    def add(self, grads: Any, weight: SupportsFloat = 1.0, *, scale: SupportsFloat | None = None) -> bool:
        """Add the gradients of one micro-batch. Copies nothing, and keeps nothing of them.

        Waits until they are there. Inside `jit` there are none to be waited for: use `gradacc.jax.add` there.

        Args:
            grads: A tree of the parameters' structure, of jax or NumPy arrays in host memory. None in place of a leaf
                is a missing gradient.
            weight: As for `gradacc.GradientAccumulator.add`.
            scale: As for `gradacc.GradientAccumulator.add`.

        Returns:
            Whether the window is now complete.

        Raises:
            GradaccError: The tree has another structure; a gradient is traced, or not in host memory, or spread over
                devices: use `gradacc.jax.add` there.
            ShapeError: A gradient has another shape than its parameter.
            DtypeError: A gradient is no array, or of a dtype that its buffer does not take.
            WindowError: The window is complete or broken, or a micro-batch is open.
            NonFiniteError: A gradient holds NaN or infinity, and `on_nonfinite` is "raise".
            ArgumentError: The weight or the scale is out of its range.
        """
        for name, number in (("weight", weight), ("scale", scale)):
            if isinstance(number, jax.core.Tracer):
                _refuse(f"{name}: it is traced")
        return super().add(self._in_host_memory(grads), weight, scale=scale)

    def add_part(self, grads: Any) -> None:
        """Add part of the micro-batch that is open: a tree of the parameters' structure, with None where none came.

        Raises:
            WindowError: No micro-batch is open.
            GradaccError: What does not fit, as for `add`. Nothing of this part has been written then.
        """
        super().add_part(self._in_host_memory(grads))

    def _in_host_memory(self, grads: Any) -> list[Any]:
        leaves = self._structure.flatten(grads)
        for id, leaf in zip(self._structure.ids, leaves, strict=True):
            if isinstance(leaf, jax.core.Tracer):
                _refuse(f"parameter {id!r}: its gradient is traced: inside jit there is none yet")
            if isinstance(leaf, jax.Array) and not _is_in_host_memory(leaf):
                devices = ", ".join(map(str, sorted(leaf.devices(), key=str)))
                _refuse(f"parameter {id!r}: its gradient lies on {devices}, not in host memory alone")
        return leaves

    def take(self, group: ProcessGroup | None = None) -> Gradients:
        """Close the window and hand its gradients over; the next one opens.

        Args:
            group: As for `gradacc.GradientAccumulator.take`.

        Raises:
            WindowError: The window is empty or broken, a micro-batch is open, or the window's weight is 0 though
                something was added and a mean is asked for. It is kept then.
        """
        return cast("Gradients", super().take(group))

    def _hand_over(self, core: _core.Gradients, norm: Callable[[], float] | None = None) -> Gradients:
        return Gradients(core, norm=norm, structure=self._structure)

    def register(self, id: Any, like: Any) -> None:
        """Refuse it: the parameters are those of the tree.

        Raises:
            ArgumentError: Always.
        """
        raise _core.ArgumentError("id: the parameters are those of the tree that the accumulator was made of")

    def attach(self, module: Any) -> NoReturn:
        """Refuse it: JAX has no backward pass to hook.

        Raises:
            ArgumentError: Always.
        """
        raise _core.ArgumentError("module: only modules of torch can be attached")


class Gradients(BaseGradients):
    """The gradients of one window: as `gradacc.Gradients`, and as a tree."""

    __slots__ = ("_structure",)

    def __init__(self, core: _core.Gradients, *, norm: Callable[[], float] | None = None, structure: Structure) -> None:
        super().__init__(core, norm=norm)
        self._structure = structure

    def clip_(self, max_norm: SupportsFloat) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before.

        As `optax.clip_by_global_norm`: by `max_norm / norm` where that is below 1, and not at all elsewhere. What was
        handed out before keeps its values.

        Raises:
            ArgumentError: `max_norm` is negative or NaN.
        """
        norm, limit = self.norm(), float(max_norm)
        if math.isfinite(norm) and 0 <= limit < norm:
            self.scale_(limit / norm)
        elif not norm <= limit:
            super().clip_(limit)  # which refuses the limit, or multiplies with what is not finite
        return norm

    def tree(self) -> Any:
        """Return the gradients in the structure of the parameters, as JAX arrays that alias the memory.

        None in place of those that the window did not see. As for `jax`, don't write to the memory by other ways.
        """
        arrays = self.jax()
        return self._structure.unflatten([arrays.get(id) for id in self._structure.ids])


def _is_in_host_memory(array: jax.Array) -> bool:
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _refuse(why: str) -> NoReturn:
    raise _core.GradaccError(f"{why}: use the functional form there, gradacc.jax.init, add and take")
