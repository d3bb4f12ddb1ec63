"""An optimizer that steps once per window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

import torch

from .. import _core
from ..accumulator import GradientAccumulator
from .module import assign
from .state import from_tensors, to_tensors

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict
    from torch.utils.hooks import RemovableHandle

    from ..schedule import Every


class AccumulatingOptimizer(torch.optim.Optimizer):
    """An optimizer that accumulates gradients, and lets another one step once per window, on their weighted mean.

    Between the steps of the inner optimizer nothing moves: neither parameters nor moments, and no weight is decayed.
    It is a `torch.optim.Optimizer` whose parameter groups, state and defaults are those of the inner one, for learning
    rate schedulers (step them when `stepped` is true), `torch.amp.GradScaler`, and whoever asks for an instance.

    Each `step` takes the gradients out of `.grad`, which is None afterwards, so `zero_grad` may be called anywhere or
    nowhere. The inner optimizer finds the mean in `.grad`, in the dtype of the parameter (rounded to nearest even once,
    where that is a 16-bit one), and None where no micro-batch of the window had a gradient. Hooks for steps and states
    are those of the inner optimizer, and run when it does.

    Under a `GradScaler`, call its `scale`, `step` and `update` for every micro-batch, as without accumulation: the
    scale is divided out of each micro-batch by itself. If one of a window has overflowed, the others are dropped with
    it when the window is complete, and the inner optimizer does not step.

    Args:
        optimizer: The inner optimizer; not one whose step needs a closure, as that of `torch.optim.LBFGS` does.
        every: How many micro-batches complete a window, as for `GradientAccumulator`; None with `until_weight`, or to
            decide by `flush`.
        max_norm: Clip the mean to this norm, once per window, as `Gradients.clip_` does. Not for parameters that are
            sharded over processes.
        options: As for `GradientAccumulator`: `until_weight`, `reduction`, `dtype`, `on_nonfinite` and so on.

    Raises:
        ArgumentError: An option is out of its range.
        DtypeError: A parameter's dtype can't be summed.

    Example:
        >>> import torch
        >>> from gradacc.torch import AccumulatingOptimizer
        >>> w = torch.nn.Parameter(torch.zeros(()))
        >>> optimizer = AccumulatingOptimizer(torch.optim.SGD([w], lr=1.0), every=2)
        >>> for samples in torch.ones(1), torch.full((3,), 5.0):
        ...     (w * samples).mean().backward()
        ...     optimizer.step(weight=len(samples))
        >>> optimizer.stepped, w.item()
        (True, -4.0)
    """

    # Read by GradScaler, which then calls step for every micro-batch and leaves what its scale means to us.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: Every | None,
        *,
        max_norm: SupportsFloat | None = None,
        **options: Any,
    ) -> None:
        if max_norm is not None and not float(max_norm) >= 0:
            raise _core.ArgumentError(f"max_norm: expected a number of at least 0, got {max_norm}")
        self._set_up(optimizer, None if max_norm is None else float(max_norm), {"every": every, **options})

    def _set_up(self, optimizer: torch.optim.Optimizer, max_norm: float | None, options: dict[str, Any]) -> None:
        self._optimizer, self._max_norm, self._options = optimizer, max_norm, options
        self._accumulator = self._accumulator_of(self._parameters())
        self._stepped = self._overflowed = False
        # Whatever else the base class keeps, without groups and a state of its own.
        super().__setstate__({})

    def _accumulator_of(self, parameters: Sequence[torch.Tensor]) -> GradientAccumulator:
        """An accumulator of some parameters. Refuses those that can't be summed, or clipped by this process alone."""
        accumulator = GradientAccumulator(enumerate(parameters), **self._options)
        if self._max_norm is not None and accumulator._shards:
            raise _core.ArgumentError(
                "max_norm: a parameter is sharded over processes, whose norm one of them does not know: use a "
                "GradientAccumulator, and clip what its take(group=...) returns"
            )
        return accumulator

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._optimizer

    @property
    def accumulator(self) -> GradientAccumulator:
        """The accumulator. Its ids are the numbers of the parameters, in the order of the groups."""
        return self._accumulator

    @property
    def stepped(self) -> bool:
        """Whether the inner optimizer has stepped in the last call of `step` or `flush`."""
        return self._stepped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer, by parameter."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the inner optimizer."""
        return self._optimizer.defaults

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: SupportsFloat = 1.0,
        scale: SupportsFloat | None = None,
    ) -> Any:
        """Add the gradients in `.grad` as one micro-batch; if it completes the window, step the inner optimizer.

        Args:
            closure: Evaluates the model, calls backward and returns the loss. Called once, with gradients enabled.
            weight: As for `GradientAccumulator.add`.
            scale: As for `GradientAccumulator.add`; without the scale of a `GradScaler`, which is divided out.

        Returns:
            What the closure has returned; None without one.

        Raises:
            GradaccError: As for `GradientAccumulator.add`: nothing has changed then, and `.grad` is as it was. Or, of a
                window that is complete, as for `GradientAccumulator.take`, as if its weight is 0 with scales that are
                not: it is kept then, until `reset`.
        """
        try:
            return self._step(closure, weight, scale)
        except BaseException:
            # GradScaler leaves these here while it calls step, and takes them away only if that returns.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise

    def _step(self, closure: Callable[[], Any] | None, weight: SupportsFloat, scale: SupportsFloat | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepped = False
        loss_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            scale, overflowed = 0.0, True
        else:
            overflowed = False
            if loss_scale is not None:
                scale = float(weight if scale is None else scale) / float(loss_scale)
        parameters = self._parameters()
        grads = [parameter.grad for parameter in parameters]
        complete = self._accumulator._add(grads, weight, scale, fresh=True)
        self._overflowed |= overflowed
        for parameter in parameters:
            parameter.grad = None
        if complete:
            self._close(parameters)
        return loss

    # The inner optimizer is profiled and runs the hooks, once per window: the base class must not wrap this one.
    step.hooked = True  # type: ignore[attr-defined]

    def flush(self) -> None:
        """Close a window that is short, as at the end of the data: step on the mean of what it holds.

        An empty window is left alone.
        """
        self._stepped = False
        if self._accumulator.count:
            self._close(self._parameters())

    def _close(self, parameters: list[torch.nn.Parameter]) -> None:
        if self._overflowed:
            self.reset()
            return
        grads = self._accumulator.take()
        if self._max_norm is not None:
            grads.clip_(self._max_norm)
        try:
            for number, parameter in enumerate(parameters):
                assign(parameter, grads.get(number))
            del grads
            self._optimizer.step()
        finally:
            # It lies in memory that goes back to the accumulator, and is counted no second time.
            for parameter in parameters:
                parameter.grad = None
        self._stepped = True

    def reset(self) -> None:
        """Forget what the window holds. Parameters and the state of the inner optimizer stay as they are."""
        self._accumulator.reset()
        self._overflowed = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` of all parameters. What the window holds stays."""
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, also in the middle of a window: as the inner optimizer does.

        Raises:
            DtypeError: A parameter's dtype can't be summed. Nothing has changed then.
            ArgumentError: A parameter is sharded over processes, and there is a `max_norm`. Nothing has changed then.
        """
        if isinstance(param_group["params"], Iterator):  # which can be gone through once
            param_group["params"] = list(param_group["params"])
        given = param_group["params"]
        entries = [given] if isinstance(given, torch.Tensor) else given
        tensors = (entry[1] if isinstance(entry, tuple) else entry for entry in entries)
        # What is no tensor is for the inner optimizer to refuse.
        self._accumulator_of([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
        before = len(self._parameters())
        self._optimizer.add_param_group(param_group)
        for number, parameter in enumerate(self._parameters()[before:], before):
            self._accumulator.register(number, parameter)

    def state_dict(self) -> StateDict:
        """Return the state of the inner optimizer with what the window holds, under "accumulator".

        Tensors and plain values: `torch.load(weights_only=True)` reads it. Training that goes on from it is bit-equal.

        Raises:
            WindowError: The window is broken.
        """
        window = {"window": to_tensors(self._accumulator.state_dict()), "overflowed": self._overflowed}
        return {**self._optimizer.state_dict(), "accumulator": window}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` has returned; or the state of a bare inner optimizer, with an empty window.

        Raises:
            StateError: It is from another window: other parameters, shapes or dtypes of sums. Nothing has changed then.
            ValueError: It is not for this inner optimizer. Nothing has changed then.
        """
        inner = dict(state_dict)
        accumulator = inner.pop("accumulator", None)
        before = self._optimizer.state_dict()
        self._optimizer.load_state_dict(inner)
        if accumulator is None:
            self.reset()
            return
        try:
            window, overflowed = _parts(accumulator)
            self._accumulator.load_state_dict(window)
        except BaseException:
            self._optimizer.load_state_dict(before)
            raise
        self._overflowed = overflowed

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call a hook before each step of the inner optimizer: see `torch.optim.Optimizer.register_step_pre_hook`."""
        return self._optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Call a hook after each step of the inner optimizer: see `torch.optim.Optimizer.register_step_post_hook`."""
        return self._optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a hook before the inner optimizer's `state_dict`."""
        return self._optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a hook after the inner optimizer's `state_dict`."""
        return self._optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a hook before the inner optimizer's `load_state_dict`."""
        return self._optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call a hook after the inner optimizer's `load_state_dict`."""
        return self._optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        """Make copies and pickles hold the inner optimizer, the options, and the window."""
        options = {**self._options, **self._accumulator._schedule}
        state = {"optimizer": self._optimizer, "max_norm": self._max_norm, "options": options}
        return {**state, "overflowed": self._overflowed, "window": self._accumulator.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make another accumulator, and put the window into it."""
        self._set_up(state["optimizer"], state["max_norm"], state["options"])
        self._accumulator.load_state_dict(state["window"])
        self._overflowed = state["overflowed"]

    def __repr__(self) -> str:
        return f"AccumulatingOptimizer({self._accumulator!r}, {self._optimizer!r})"


def _parts(accumulator: Any) -> tuple[dict[str, Any], bool]:
    try:
        return from_tensors(cast("Mapping[str, Any]", accumulator["window"])), bool(accumulator["overflowed"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _core.StateError(
            "the state can't be loaded: its accumulator is none of an AccumulatingOptimizer"
        ) from error
