"""`GradientAccumulation` in real fits of an unchanged Trainer and LightningModule."""

import logging
import pickle
import subprocess
import sys

import gradacc
import lightning.pytorch as L
import pytest
import torch
from gradacc.lightning import GradientAccumulation
from lightning.pytorch.plugins import MixedPrecision
from ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Slope(L.LightningModule):
    """One parameter whose gradient is the mean of the batch; keeps what each step was given."""

    def __init__(self, dtype=None):
        super().__init__()
        self.w, self.given = torch.nn.Parameter(torch.zeros((), dtype=dtype)), []

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean() if batch.numel() else None

    def validation_step(self, batch, batch_idx):
        assert self.w.grad is None

    def on_before_optimizer_step(self, optimizer):
        self.given.append(None if self.w.grad is None else self.w.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=1.0)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.given = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), []

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.given.append([p.grad.clone() for p in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Loader:
    """Batches in order, and its place among them, as Lightning wants it of a loader that resumes in mid-epoch."""

    def __init__(self, batches):
        self.batches, self.place = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.place %= len(self.batches)
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class At(L.Callback):
    """Calls a function at the end of a batch of the first epoch."""

    def __init__(self, index, do):
        self.index, self.do = index, do

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (0, self.index):
            self.do(trainer)


def trainer(*callbacks, epochs=1, **options):
    return L.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), **QUIET, **options)


def loader(*values):
    return Loader([torch.tensor(v if isinstance(v, list) else [v], dtype=torch.float32) for v in values])


def fit(*callbacks, on, model=None, **options):
    model, t = model or Slope(), trainer(*callbacks, **options)
    t.fit(model, loader(*on))
    return model, t


def data(*sizes):
    return [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in sizes]


@pytest.mark.parametrize(
    ("on", "options", "given"),
    [
        ([1, 3, 5, 8], {}, [2, 6.5]),
        ([1, 3, 5], {}, [2, 5]),  # a short last window
        ([1, 2], {"epochs": 3, "every": 8}, [1.5] * 3),  # epochs shorter than it
        ([[1, 2, 3], 4], {"weight": len}, [2.5]),
        ([1, [], 4, 6, 8, []], {"every": 3}, [2.5, 7]),  # [] is a training_step that returns None
        ([[], [], 2], {}, [None, 2]),
        (range(1, 11), {"every": None, "by_step": {0: 2, 1: 3, 2: 1, 3: 4}}, [1.5, 4, 6, 8.5]),
        ([1, 2, 3, 4], {"every": None, "schedule": {1: 2, 2: 3}, "epochs": 3}, [1, 2, 3, 4, 1.5, 3.5, 2, 4]),
    ],
)
def test_the_optimizer_is_given_the_mean_of_each_window(on, options, given):
    options = {"every": 2, **options}
    epochs = options.pop("epochs", 1)
    model, t = fit(GradientAccumulation(**options), on=on, epochs=epochs)
    assert model.given == given
    assert t.global_step == len(given)
    assert t.accumulate_grad_batches == 1


def test_windows_of_which_something_or_all_is_skipped():
    nan = float("nan")
    model, t = fit(GradientAccumulation(2, on_nonfinite="skip"), on=[1, nan, nan, nan, 2, 4])
    assert model.given == [1, None, 3]
    assert t.global_step == 3


@pytest.mark.parametrize("every", [2, 3, 4])
def test_unequal_batches_equal_the_full_batch(every):
    model, whole, given = Net(), Net(), data(1, 5, 2, 8, 3, 7)
    trainer(GradientAccumulation(every, weight=len)).fit(model, Loader(given))
    trainer().fit(whole, Loader([torch.cat(given[i : i + every]) for i in range(0, 6, every)]))
    torch.testing.assert_close(model.given, whole.given, rtol=2e-4, atol=1e-6)


def test_as_many_steps_as_lightnings_own_schedule():
    steps = {}
    for callback in (
        GradientAccumulation(schedule={1: 2, 3: 4}),
        L.callbacks.GradientAccumulationScheduler({1: 2, 3: 4}),
    ):
        steps[type(callback)] = fit(callback, on=[1, 2, 3, 4, 5], epochs=5)[1].global_step
    assert len(set(steps.values())) == 1


def test_the_division_of_the_loss_is_undone_exactly_in_16_bits():
    model, _ = fit(GradientAccumulation(3), on=[257, 1, 1], model=Slope(torch.bfloat16), precision="bf16-true")
    assert model.given == [torch.tensor((256 + 2) / 3).bfloat16().item()]  # 257 is no bfloat16


def test_validation_stopping_and_fitting_again():
    model, accumulation = Slope(), GradientAccumulation(2)
    t = trainer(accumulation, val_check_interval=1)
    t.fit(model, loader(1, 3, 5, 8), loader(1))
    assert model.given == [2, 6.5]
    stop = At(2, lambda trainer: setattr(trainer, "should_stop", True))
    model, t = fit(stop, accumulation, on=[1, 3, 5, 8])
    assert model.given == [2]
    assert model.w.grad is None
    t.fit_loop.max_epochs += 1
    t.should_stop = False
    t.fit(model, loader(1, 3))
    assert model.given == [2, 2]


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("options", [{"every": 3}, {"by_step": {0: 1, 1: 3}}], ids=str)
def test_a_checkpoint_in_mid_window_resumes_bit_for_bit(tmp_path, index, options):
    model, resumed, given = Net(), Net(), data(1, 5, 2, 8, 3)
    save = At(index, lambda trainer: trainer.save_checkpoint(tmp_path / "mid"))
    trainer(save, GradientAccumulation(**options, weight=len), epochs=2).fit(model, Loader(given))
    t = trainer(GradientAccumulation(**options, weight=len), epochs=2)
    t.fit(resumed, Loader(given), ckpt_path=tmp_path / "mid", weights_only=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_any_batch_of_a_window_drops_it(bad):
    values, scaler = [1.0, 3.0, 2.0, 2.0, 5.0, 7.0], torch.amp.GradScaler("cpu", init_scale=1024.0)
    values[2 + bad] = float("inf")
    model, _ = fit(GradientAccumulation(2), on=values, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert model.w == -8.0
    assert scaler.get_scale() == 512.0


@pytest.mark.filterwarnings("default:the last training_step")
def test_under_a_scaler_a_window_that_ends_with_none_is_dropped():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    with pytest.warns(UserWarning, match="dropped"):
        model, _ = fit(GradientAccumulation(2), on=[1, [], 5, 7], plugins=[plugin])
    assert model.w == -6.0


def test_bf16_mixed():
    model, whole, given = Net(), Net(), data(1, 5, 2)
    trainer(GradientAccumulation(3, weight=len), precision="bf16-mixed").fit(model, Loader(given))
    trainer(precision="bf16-mixed").fit(whole, Loader([torch.cat(given)]))
    torch.testing.assert_close(model.given, whole.given, rtol=0.05, atol=0.005)


def test_clipping_and_other_callbacks_see_the_mean():
    seen = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append(module.w.grad.item())

    model, _ = fit(Watch(), GradientAccumulation(2), on=[100, -99, 3], gradient_clip_val=1.0)
    assert seen == [0.5, 3]
    assert model.given == [0.5, 3]  # clipped after it
    assert model.w.item() == pytest.approx(-1.5, rel=1e-5)


def test_layers_unfrozen_by_a_callback():
    class Finetuning(L.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.layers[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.layers[0], optimizer, train_bn=True)

    class Half(Net):
        def on_before_optimizer_step(self, optimizer):
            self.given.append(sum(p.grad is not None for p in self.parameters()))

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    model = Half()
    trainer(Finetuning(), GradientAccumulation(2), epochs=2).fit(model, Loader(data(1, 2)))
    assert model.given == [2, 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 0},
        {"every": True},
        {"every": 2.5},
        {"every": {0: 2}},
        {"every": 2, "schedule": {0: 2}},
        {"schedule": {}},
        {"by_step": {-1: 2}},
        {"every": 2, "until_weight": 3},
        {"every": 2, "reduction": "sum"},
    ],
    ids=str,
)
def test_lengths_and_options_that_make_no_sense(options):
    with pytest.raises(gradacc.ArgumentError):
        GradientAccumulation(**options)


def test_who_else_wants_to_accumulate_is_refused():
    with pytest.raises(gradacc.GradaccError, match="accumulate_grad_batches"):
        fit(GradientAccumulation(2), on=[1], accumulate_grad_batches=4)
    with pytest.raises(gradacc.GradaccError, match="GradientAccumulationScheduler"):
        fit(GradientAccumulation(2), L.callbacks.GradientAccumulationScheduler({0: 2}), on=[1])

    class Manual(Slope):
        automatic_optimization = False

    with pytest.raises(gradacc.GradaccError, match="automatic optimization"):
        fit(GradientAccumulation(2), on=[1], model=Manual())


def test_a_fit_that_raised_leaves_the_trainer_as_it_was():
    accumulation = GradientAccumulation(2)
    t = trainer(At(0, lambda trainer: 1 / 0), accumulation)
    with pytest.raises(ZeroDivisionError):
        t.fit(Slope(), loader(1, 3))
    assert t.accumulate_grad_batches == 1
    assert fit(accumulation, on=[3, 5])[0].given == [4]


@pytest.mark.parametrize("index", range(5))
def test_a_checkpoint_of_an_exception_holds_the_window(tmp_path, index):
    class Interrupted(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == index:
                raise KeyError("on purpose")
            return super().training_step(batch, batch_idx)

    class Redo(Loader):
        def load_state_dict(self, state):
            self.place = state["place"] - 1

    model, resumed, given = Net(), Net(), data(1, 5, 2, 8, 3)
    trainer(GradientAccumulation(3, weight=len)).fit(model, Loader(given))
    save = L.callbacks.OnExceptionCheckpoint(tmp_path)
    options = {**QUIET, "enable_checkpointing": True}
    t = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[save, GradientAccumulation(3, weight=len)], **options)
    with pytest.raises(KeyError):
        t.fit(Interrupted(), Redo(given))
    t = trainer(GradientAccumulation(3, weight=len))
    t.fit(resumed, Redo(given), ckpt_path=save.ckpt_path, weights_only=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_fit_that_ended_before_it_began_leaves_no_window_to_the_next(tmp_path):
    class Fails(Slope):
        def on_fit_start(self):
            raise KeyError("on purpose")

    save, accumulation = At(0, lambda trainer: trainer.save_checkpoint(tmp_path / "mid")), GradientAccumulation(2)
    fit(save, accumulation, on=[100, 3])
    t = trainer(accumulation)
    with pytest.raises(KeyError):
        t.fit(Fails(), loader(100, 3), ckpt_path=tmp_path / "mid", weights_only=True)
    assert fit(accumulation, on=[3, 5])[0].given == [4]


def test_a_callback_can_be_sent_to_another_process():
    for given in ({"every": 2}, {"schedule": {0: 2}}, {"by_step": {0: 2}}):
        accumulation = pickle.loads(pickle.dumps(GradientAccumulation(**given, weight=len)))
        assert fit(accumulation, on=[[1, 2, 3], 6])[0].given == [3]


def test_pytorch_lightning():
    code = """
import logging, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl, torch
from gradacc.lightning import GradientAccumulation
assert issubclass(GradientAccumulation, pl.Callback)

class Slope(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=1.0)

model = Slope()
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[GradientAccumulation(2, weight=len)], logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
batches = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([7.0])]
trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
assert model.w.item() == -9.5, model.w
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ddp(rank):
    import os

    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")

    class Normed(Slope):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * self.norm(batch[:, None]).sum()

    given = [torch.full((2 + 4 * rank,), value) for value in (1.0, 4.0 * rank, 5.0)]
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    ours, own = Normed(), Normed()
    trainer(GradientAccumulation(2, weight=len), **options).fit(ours, Loader(given))
    trainer(accumulate_grad_batches=2, **options).fit(own, Loader(given))
    return ours.given, ours.norm.running_mean.item(), own.norm.running_mean.item()


def test_ddp_gives_the_mean_over_all_processes_and_broadcasts_buffers_as_before():
    ranks = Ranks(2)
    answers = ranks(ddp)
    ranks.stop()
    for given, ours, own in answers:
        assert given == pytest.approx([2.0, 5.0])  # (1 + 0 + 3 * (1 + 4)) / 8
        assert ours == own
