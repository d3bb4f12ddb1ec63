"""Lightning: a callback that accumulates in place of the Trainer, for an unchanged module and Trainer.

For `lightning` and for `pytorch_lightning`: whichever is imported already, or else installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

import torch

from . import _core
from .accumulator import GradientAccumulator
from .schedule import every_
from .torch.module import assign
from .torch.state import from_tensors, to_tensors


def _base() -> Any:
    """`Callback` of the Lightning that is in use."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).Callback
    raise ModuleNotFoundError("gradacc.lightning needs lightning or pytorch_lightning: neither is installed")


Callback: Any = _base()


class GradientAccumulation(Callback):  # type: ignore[misc]
    """A callback that steps once per window on the exact weighted mean of its micro-batches.

    Takes each batch's gradients after its backward, adds them up in float32, and puts the mean into `.grad` before the
    Trainer unscales, clips and steps. Everything of Lightning's sees the mean: clipping, hooks, other callbacks and
    loggers, `global_step`, learning rate schedulers, and the scaler of `16-mixed`, which drops a window that overflowed
    in any of its batches. Under DDP the processes exchange their gradients once per window, and the mean is over the
    weights of all. A checkpoint that is written in mid-window goes on from there, bit for bit, if the loader can go on
    too, that is, has a `state_dict`.

    What Lightning itself fixes: a window ends with its epoch, and is divided by what it holds. A batch whose
    `training_step` returned None takes a place in the window, and nothing of its mean. Stopping in mid-window drops the
    window. Logged losses are divided by the length of the window, or, where a `by_step` schedule has shifted windows
    against the epoch, by another small number; gradients are not. `estimated_stepping_batches` knows one length only.
    Under a scaler, a window whose last `training_step` returned None is dropped, since the Trainer does not step then.

    Args:
        every: How many batches are a window.
        schedule: `{epoch: length}`, each holding from an epoch on, in place of `every`. Before the first of them, 1.
        by_step: `{optimizer step: length}`, each holding from a number of optimizer steps on, in place of `every`.
        weight: From a batch to what it counts for, such as its samples or tokens. By default every batch counts 1.
        options: As for `GradientAccumulator`: `dtype`, `on_nonfinite` and so on.

    Raises:
        ArgumentError: Not exactly one of the three lengths is given, or it makes no sense.

    Example:
        >>> import lightning.pytorch as L, torch
        >>> from gradacc.lightning import GradientAccumulation
        >>> callback = GradientAccumulation(every=8, weight=len)
        >>> trainer = L.Trainer(accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        every: SupportsIndex | None = None,
        *,
        schedule: Mapping[Any, Any] | None = None,
        by_step: Mapping[Any, Any] | None = None,
        weight: Callable[[Any], SupportsFloat] | None = None,
        **options: Any,
    ) -> None:
        given = [length for length in (every, schedule, by_step) if length is not None]
        if len(given) != 1 or isinstance(every, Mapping) or callable(every):
            raise _core.ArgumentError("every: expected one of every=number, schedule={epoch: ...}, by_step={step: ...}")
        for option in ("until_weight", "reduction"):
            if option in options:
                raise _core.ArgumentError(f"{option}: the Trainer closes windows, and steps on their mean")
        lengths = given[0] if isinstance(given[0], Mapping) else {0: given[0]}
        self._given, self._lengths = lengths, _core.Lengths(every_(lengths))  # type: ignore[arg-type]
        self._goes_by_epoch, self._weight, self._options = schedule is not None, weight, options
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        """Make it go to other processes, as of `strategy="ddp_spawn"`, before a fit."""
        state = self.__dict__.copy()
        del state["_lengths"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look lengths up as before."""
        self.__dict__.update(state)
        self._lengths = _core.Lengths(every_(self._given))  # type: ignore[arg-type]

    def _close(self) -> None:
        """Let go of a fit, or start with none."""
        self._loaded: Mapping[str, Any] | None = None
        self._accumulator: GradientAccumulator | None = None
        self._places, self._length, self._divisor, self._batch = 0, 1, 1, None
        # Whether a batch has begun of which nothing has been added.
        self._is_pending = False
        self._ddp: Any = None
        self._no_sync = contextlib.ExitStack()

    # ---- a fit

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put this callback first, and tell the Trainer of a length that it can estimate with."""
        if stage != "fit":
            return
        self._close()
        others = [callback for callback in trainer.callbacks if callback is not self]
        owners = [type(callback).__name__ for callback in others]
        if trainer.accumulate_grad_batches != 1 or "GradientAccumulationScheduler" in owners:
            raise _core.GradaccError(
                "expected a Trainer with accumulate_grad_batches=1 and no GradientAccumulationScheduler, since "
                "gradacc.lightning.GradientAccumulation decides when it steps"
            )
        if not pl_module.automatic_optimization:
            raise _core.GradaccError("expected a module with automatic optimization: use a GradientAccumulator by hand")
        # So that the others find the mean in .grad.
        trainer.callbacks = [self, *others]
        trainer.accumulate_grad_batches = self._lengths.at(0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the accumulator, with what a checkpoint has of its window."""
        model = trainer.strategy.model
        if trainer.world_size > 1 or trainer.strategy.handles_gradient_accumulation:
            if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
                strategy = type(trainer.strategy).__name__
                raise _core.GradaccError(f"expected one process, or DDP over several, got strategy {strategy}")
            self._ddp = model
            # Also at the end of a window: what is exchanged there is its mean, and not its last batch.
            self._no_sync.enter_context(model.no_sync())
        self._accumulator = GradientAccumulator(pl_module.named_parameters(), **self._options)
        if self._loaded is not None:
            self._accumulator.load_state_dict(from_tensors(self._loaded["window"]))
            self._places, self._length = self._loaded["places"], self._loaded["length"]
            self._loaded = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Tell the Trainer whether it is to step after this batch."""
        if self._places == 0:
            position = trainer.current_epoch if self._goes_by_epoch else trainer.global_step
            self._length = self._lengths.at(position)
        self._places += 1
        self._batch, self._is_pending = batch, True
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._divisor = _divisor(ready, self._length, is_last=self._places >= self._length)
        trainer.accumulate_grad_batches = self._divisor

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Undo the division of the loss, and clear what the last step has left."""
        divisor = self._divisor
        if divisor != 1 and loss.requires_grad:
            # The gradient of the quotient is 1; divided by the divisor, this is 1 again.
            loss.register_hook(lambda gradient: gradient * divisor)
        for parameter in pl_module.parameters():
            parameter.grad = None

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Add the gradients of a batch, and put the mean in their place if it was the last of its window."""
        accumulator = self._opened()
        parameters = [(name, p) for name, p in pl_module.named_parameters() if p.grad is not None]
        weight = 1.0 if self._weight is None else self._weight(self._batch)
        accumulator.add({name: parameter.grad for name, parameter in parameters}, weight)
        self._is_pending = False
        for _, parameter in parameters:
            parameter.grad = None
        if not trainer.fit_loop._should_accumulate():
            self._hand_over(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Put the mean into `.grad`, if the last batch of a window had no backward."""
        if self._places == 0:  # that has been done
            return
        if getattr(trainer.precision_plugin, "scaler", None) is not None and self._opened().count:
            warnings.warn(
                "the last training_step of a window returned None: the Trainer does not step under a scaler then, and "
                "the gradients of the window are dropped",
                stacklevel=2,
            )
            self._drop()
            return
        for parameter in pl_module.parameters():
            parameter.grad = None
        self._hand_over(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let go of the batch."""
        self._batch, self._is_pending = None, False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drop a window that the Trainer was told to stop in."""
        self._drop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the Trainer as it was."""
        if stage == "fit":
            self._leave(trainer)
            self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the Trainer as it was. Other callbacks may still write a checkpoint: the window is kept for it."""
        self._leave(trainer)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the window and its place, in tensors and plain values."""
        if self._accumulator is None:
            return {}
        window = to_tensors(self._accumulator.state_dict())
        # A batch that was broken off is done again.
        return {"window": window, "places": self._places - self._is_pending, "length": self._length}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a state for the start of the fit."""
        self._loaded = state_dict or None

    # ---- a window

    def _opened(self) -> GradientAccumulator:
        assert self._accumulator is not None, "Lightning calls on_train_start first"
        return self._accumulator

    def _hand_over(self, pl_module: Any) -> None:
        """Close the window. One in which no process had a gradient leaves every `.grad` None."""
        accumulator = self._opened()
        group = None if self._ddp is None else self._ddp.process_group
        try:
            grads: Mapping[Any, Any] = accumulator.take(group)
        except _core.WindowError:
            if accumulator.count:
                raise
            # Empty, here and everywhere: every training_step returned None, or its gradients were skipped.
            accumulator.reset()
            grads = {}
        for name, parameter in pl_module.named_parameters():
            assign(parameter, grads.get(name))
        self._places = 0
        if self._ddp is not None:
            # Under no_sync it forgets to broadcast buffers, such as those of batch normalization.
            self._ddp.require_forward_param_sync = True

    def _drop(self) -> None:
        if self._accumulator is not None:
            self._accumulator.reset()
        self._places = 0

    def _leave(self, trainer: Any) -> None:
        trainer.accumulate_grad_batches = 1
        self._no_sync.close()


def _divisor(ready: int, length: int, *, is_last: bool) -> int:
    """What makes the Trainer step after batch `ready` of an epoch, counted from 1, or not: it does where this divides.

    The length of the window, if that will do, since the Trainer divides the loss it logs by this; another otherwise.
    """
    if (ready % length == 0) == is_last:
        return length
    return 1 if is_last else next(n for n in range(2, ready + 2) if ready % n)
