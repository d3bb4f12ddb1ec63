"""What a window counts, what it gives, and what is refused."""

import gc
import math
import weakref

import gradacc
import numpy as np
import pytest


def accumulator(**options):
    return gradacc.GradientAccumulator({"a": ((2,), "float32"), "b": ((3,), "float64")}, **options)


def f32(*values):
    return np.array(values, np.float32)


def add(acc, value, weight=1.0, **options):
    return acc.add({"a": f32(value, value)}, weight, **options)


def state(acc):
    return acc.count, acc.weight, acc.rejected, acc.complete, acc.window


def test_mean_is_weighted_by_tokens():
    acc = accumulator(every=2)
    assert add(acc, 5.0, 2) is False
    assert add(acc, 0.25, 8) is True
    grads = acc.take()
    assert (grads.count, grads.weight) == (2, 10.0)
    assert grads.numpy()["a"].tolist() == f32(1.2, 1.2).tolist()


def test_sum_losses_auxiliary_losses_and_loss_scales():
    acc = accumulator()
    add(acc, 10.0, 2, scale=1)
    add(acc, 65536.0, 3, scale=3 / 65536)
    add(acc, 8.0, 0, scale=0.5)
    assert acc.weight == 5
    assert acc.take().numpy()["a"].tolist() == f32(17 / 5, 17 / 5).tolist()


def test_sum_is_not_divided():
    acc = accumulator(reduction="sum")
    for value in (1.0, 2.0, 3.0):
        add(acc, value)
    assert acc.take().numpy()["a"].tolist() == [6.0, 6.0]


def test_short_window_is_divided_by_what_it_holds():
    acc = accumulator(every=4)
    for _ in range(3):
        add(acc, 1.0)
    assert acc.take().numpy()["a"].tolist() == [1.0, 1.0]


def test_complete_window_takes_no_more_and_is_kept():
    acc = accumulator(every=2)
    add(acc, 1.0)
    add(acc, 3.0)
    before = state(acc)
    with pytest.raises(gradacc.WindowError, match="complete"):
        add(acc, 9.0)
    assert state(acc) == before
    assert acc.take().numpy()["a"].tolist() == [2.0, 2.0]
    assert state(acc) == (0, 0.0, 0, False, 1)


def test_empty_window_is_not_taken():
    acc = accumulator()
    with pytest.raises(gradacc.WindowError, match="empty"):
        acc.take()
    add(acc, 1.0)
    acc.reset()
    with pytest.raises(gradacc.WindowError, match="empty"):
        acc.take()
    assert acc.window == 0


def test_mean_over_weight_zero_is_refused_and_the_window_kept():
    acc = accumulator()
    add(acc, 6.0, 0, scale=1)
    with pytest.raises(gradacc.WindowError, match="weight"):
        acc.take()
    add(acc, 0.0, 3)
    assert acc.take().numpy()["a"].tolist() == [2.0, 2.0]


def test_masked_micro_batches_are_not_read():
    acc = accumulator(on_nonfinite="raise")
    add(acc, math.nan, 0)
    grads = acc.take()
    assert grads.weight == 0
    assert grads.numpy()["a"].tolist() == [0.0, 0.0]


def test_missing_ids_contribute_nothing_and_unseen_ones_are_absent():
    acc = accumulator(every=2)
    acc.add({"a": f32(4, 4), "b": None})
    acc.add({"a": f32(0, 0)})
    assert {id: array.tolist() for id, array in acc.take().numpy().items()} == {"a": [2.0, 2.0]}


def test_on_missing_error_names_the_parameter():
    acc = accumulator(on_missing="error")
    with pytest.raises(gradacc.GradaccError, match="b"):
        add(acc, 1.0)
    assert acc.count == 0


def test_skip_drops_the_micro_batch_and_tells():
    acc = accumulator(every=2, on_nonfinite="skip", micro_norms=True)
    assert acc.last is None
    add(acc, 3.0)
    assert acc.last.finite
    assert acc.last.norm == pytest.approx(18**0.5)
    assert add(acc, math.inf, 5) is False
    assert not acc.last.finite
    assert state(acc) == (1, 1.0, 1, False, 0)
    assert "finite=False" in repr(acc.last)
    assert add(acc, 1.0) is True
    assert acc.take().numpy()["a"].tolist() == [2.0, 2.0]


def test_nan_ends_with_its_window():
    acc = accumulator()
    add(acc, math.nan)
    assert not acc.last.finite
    assert math.isnan(acc.take().norm())
    add(acc, 1.0)
    assert acc.take().numpy()["a"].tolist() == [1.0, 1.0]


def test_late_registration():
    acc = accumulator(every=2)
    add(acc, 2.0)
    acc.register("late", ((2,), "bfloat16"))
    acc.register(7, np.zeros((2, 1)))
    acc.add({"a": f32(4, 4), "late": f32(4, 8), 7: np.ones((2, 1))})
    grads = acc.take()
    assert list(grads) == ["a", "late", 7]
    assert grads.numpy()["late"].tolist() == [2.0, 4.0]
    assert grads.numpy()[7].tolist() == [[0.5], [0.5]]


BAD_GRADIENTS = {
    "unknown id": (gradacc.UnknownParameterError, "nobody", {"a": f32(9, 9), "nobody": f32(9)}),
    "shape": (gradacc.ShapeError, r"b.*\(3,\).*\(1, 3\)", {"a": f32(9, 9), "b": np.ones((1, 3))}),
    "dtype": (
        gradacc.DtypeError,
        "b.*float16, bfloat16, float32, float64.*int64",
        {"a": f32(9, 9), "b": np.ones(3, int)},
    ),
    "no tensor": (gradacc.DtypeError, "b.*__dlpack__.*list", {"a": f32(9, 9), "b": [1.0, 2.0, 3.0]}),
    "sequence length": (gradacc.GradaccError, "2.*3", [f32(9, 9), np.ones(3), None]),
    "no mapping": (TypeError, "mapping", "a"),
}


@pytest.mark.parametrize(("error", "message", "grads"), BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
def test_refused_gradients_change_nothing(error, message, grads):
    acc = accumulator(every=2)
    add(acc, 2.0)
    before = state(acc)
    with pytest.raises(error, match=message):
        acc.add(grads, 7)
    assert state(acc) == before
    assert add(acc, 4.0) is True
    grads = acc.take()
    assert list(grads) == ["a"]
    assert grads.numpy()["a"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1, np.float32(-0.5)])
@pytest.mark.parametrize("options", [{}, {"scale": 1.0}])
def test_weight_out_of_range(weight, options):
    acc = accumulator()
    with pytest.raises(gradacc.ArgumentError, match="weight") as caught:
        add(acc, 1.0, weight, **options)
    assert isinstance(caught.value, ValueError)
    assert acc.count == 0


@pytest.mark.parametrize("scale", [math.nan, -math.inf, 1e300])
def test_scale_out_of_range(scale):
    acc = accumulator()
    with pytest.raises(gradacc.ArgumentError, match="scale"):
        add(acc, 1.0, scale=scale)
    assert acc.count == 0


@pytest.mark.parametrize("weight", ["2", None, f32(1, 2)])
def test_weight_that_is_no_number(weight):
    acc = accumulator()
    with pytest.raises(TypeError):
        add(acc, 1.0, weight)
    assert acc.count == 0


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "2", np.float64(2)])
def test_every_that_is_no_length(every):
    with pytest.raises(gradacc.ArgumentError, match="every"):
        accumulator(every=every)


def test_every_may_be_a_numpy_integer():
    acc = accumulator(every=np.int64(2))
    assert acc.every == 2
    assert "0 of 2" in repr(acc)


@pytest.mark.parametrize(
    "options",
    [{"reduction": "avg"}, {"on_nonfinite": "drop"}, {"on_missing": "zero"}, {"dtype": "int32"}, {"dtype": "float8"}],
    ids=str,
)
def test_option_out_of_range(options):
    with pytest.raises(gradacc.ArgumentError, match=next(iter(options))):
        accumulator(**options)


BAD_PARAMS = {
    "twice": (gradacc.GradaccError, "twin", [("twin", ((2,), "float32")), ("twin", ((3,), "float32"))]),
    "dtype": (gradacc.DtypeError, "counter.*int64", {"counter": ((2,), "int64")}),
    "no array": (gradacc.DtypeError, "w", {"w": [1.0, 2.0]}),
    "no shape": (gradacc.DtypeError, "w", {"w": (3, "float32")}),
    "negative": (gradacc.ArgumentError, "w", {"w": ((-1,), "float32")}),
    "id": (gradacc.ArgumentError, "1.5", {1.5: ((2,), "float32")}),
    "bool": (gradacc.ArgumentError, "True", {True: ((2,), "float32")}),
}


@pytest.mark.parametrize(("error", "message", "params"), BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_refused_parameters(error, message, params):
    with pytest.raises(error, match=message):
        gradacc.GradientAccumulator(params)


def test_16_bit_sums_take_their_own_dtype_only():
    with pytest.raises(gradacc.DtypeError, match=r"a.*float16.*float32"):
        accumulator(dtype="float16")
    acc = gradacc.GradientAccumulator({"h": ((1,), "float16")}, dtype=np.float16, reduction="sum")
    acc.add({"h": np.array([2048], np.float16)})
    acc.add({"h": np.array([1], np.float16)})
    assert acc.take().numpy()["h"].tolist() == [2048.0]  # a tie, to even


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (gradacc.ArgumentError, ValueError),
        (gradacc.ShapeError, ValueError),
        (gradacc.DtypeError, TypeError),
        (gradacc.UnknownParameterError, KeyError),
        (gradacc.WindowError, RuntimeError),
        (gradacc.NonFiniteError, ArithmeticError),
        (gradacc.StateError, ValueError),
    ],
)
def test_errors_are_the_matching_builtin_too(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, gradacc.GradaccError)
    assert error.__module__ == "gradacc"
    assert str(error("as it is")) == "as it is"


@pytest.mark.parametrize("weight", [2, 2.0, np.int32(2), np.float32(2), np.array(2), np.array(2.0)])
def test_weight_and_scale_may_be_any_number(weight):
    acc = accumulator()
    add(acc, 3.0, weight)
    add(acc, 1.0, 0, scale=weight)
    assert (acc.weight, acc.take().numpy()["a"].tolist()) == (2.0, [4.0, 4.0])


@pytest.mark.parametrize(
    "every",
    [{}, {-1: 2}, {True: 2}, {0.5: 2}, {"0": 2}, {0: 0}, {0: -1}, {0: True}, {0: None}, {0: 2.0}, [], [(0, 2)], "4", 0],
    ids=repr,
)
def test_what_is_no_schedule(every):
    acc = accumulator(every=3)
    for use in (lambda: accumulator(every=every), lambda: acc.set_schedule(every=every)):
        with pytest.raises(gradacc.ArgumentError, match="every"):
            use()
    assert acc.every == 3


@pytest.mark.parametrize("until_weight", [0, -1, math.nan, math.inf, True])
def test_what_is_no_budget(until_weight):
    with pytest.raises(gradacc.ArgumentError, match="until_weight"):
        accumulator(until_weight=until_weight)


def test_a_window_has_a_length_or_a_budget():
    with pytest.raises(gradacc.ArgumentError, match="both"):
        accumulator(every=2, until_weight=3)


def test_every_lowered_within_a_window_holds_from_the_next():
    acc = accumulator(every=4)
    for _ in range(3):
        add(acc, 1.0)
    acc.set_schedule(every=2)
    assert (acc.every, acc.complete) == (4, False)
    assert add(acc, 1.0)
    acc.take()
    assert [add(acc, 1.0), add(acc, 1.0)] == [False, True]


def test_a_schedule_is_copied():
    schedule = {0: 1, 1: 2}
    acc = accumulator(every=schedule)
    schedule[1] = 5
    add(acc, 1.0)
    acc.take()
    assert acc.every == 2


def test_windows_follow_the_epoch():
    schedule = gradacc.EpochSchedule({10: 4, 0: 1, 5: 2})
    acc, lengths = accumulator(every=schedule), []
    for epoch in range(12):
        schedule.start_epoch(epoch)
        assert schedule.epoch == epoch
        lengths.append(acc.every)
    assert lengths == [1] * 5 + [2] * 5 + [4] * 2
    add(acc, 1.0)
    schedule.start_epoch(0)
    assert acc.every == 4
    for wrong in (-1, True, 1.5):
        with pytest.raises(gradacc.ArgumentError, match="epoch"):
            schedule.start_epoch(wrong)


@pytest.mark.parametrize("returned", [0, 1.5, None, True])
def test_a_function_that_gives_no_length(returned):
    acc = accumulator(every=lambda window: returned)
    with pytest.raises(gradacc.ArgumentError, match="every"):
        add(acc, 1.0)
    assert acc.count == 0


def test_a_function_that_fails_or_uses_the_accumulator():
    def every(window):
        if fails:
            raise KeyError("on purpose")
        return acc.count + acc.window + 1

    acc, fails = accumulator(every=every), True
    with pytest.raises(KeyError, match="on purpose"):
        add(acc, 1.0)
    fails = False
    assert add(acc, 1.0)


def test_a_micro_batch_in_parts_counts_once():
    acc = accumulator(every=2, micro_norms=True)
    with acc.micro_batch(weight=2):
        acc.add_part({"a": f32(1, 1)})
        acc.add_part({"b": np.ones(3)})
        with pytest.raises(gradacc.ShapeError):
            acc.add_part({"a": f32(9, 9, 9)})
        assert acc.count == 0
    assert acc.last.norm == pytest.approx(5**0.5)
    with acc.micro_batch(weight=2, scale=1):
        acc.add_part({"a": f32(3, 3)})
        acc.add_part({"a": f32(5, 5)})
    assert (state(acc), acc.last.norm) == ((2, 4.0, 0, True, 0), None)
    grads = acc.take().numpy()
    assert (grads["a"].tolist(), grads["b"].tolist()) == ([2.5, 2.5], [0.5, 0.5, 0.5])


def test_nothing_comes_between_the_parts():
    acc = accumulator(every=2)
    with acc.micro_batch():
        acc.add_part({"a": f32(1, 1)})
        for between in (acc.take, lambda: add(acc, 1.0), lambda: acc.micro_batch().__enter__()):
            with pytest.raises(gradacc.WindowError, match="micro-batch is open"):
                between()
    with pytest.raises(gradacc.WindowError, match="micro_batch"):
        acc.add_part({"a": f32(1, 1)})
    assert state(acc) == (1, 1.0, 0, False, 0)


@pytest.mark.parametrize("policy", ["propagate", "raise"])
def test_a_failure_after_a_part_breaks_the_window(policy):
    acc = accumulator(on_nonfinite=policy, on_missing="error")
    with pytest.raises(KeyError), acc.micro_batch():
        raise KeyError
    acc.add([f32(1, 1), np.ones(3)])  # nothing had been added
    failures = {"missing": {"a": f32(1, 1)}, "raise": {"a": f32(1, math.nan), "b": np.ones(3)}}
    for kind, part in failures.items():
        if kind == "raise" and policy != "raise":
            continue
        with pytest.raises(gradacc.GradaccError), acc.micro_batch():
            acc.add_part(part)
        for use in (acc.take, lambda: acc.add([f32(1, 1), np.ones(3)]), acc.state_dict):
            with pytest.raises(gradacc.WindowError, match=r"reset\(\)"):
                use()
        acc.reset()
        acc.add([f32(2, 2), np.ones(3)])
        assert acc.take().numpy()["a"].tolist() == [2, 2]


def test_what_skips_a_micro_batch_wants_it_whole():
    acc = accumulator(on_nonfinite="skip")
    with pytest.raises(gradacc.ArgumentError, match="skip"), acc.micro_batch():
        pass


def test_a_stale_micro_batch_neither_ends_nor_breaks_another():
    acc = gradacc.GradientAccumulator({"w": ((1,), "float32")})
    part = {"w": np.ones(1, "float32")}
    stale, staler = acc.micro_batch(weight=1), acc.micro_batch(weight=1)
    stale.__enter__()
    acc.reset()
    staler.__enter__()
    acc.reset()
    with acc.micro_batch(weight=8):
        acc.add_part(part)
        with pytest.raises(gradacc.WindowError, match="no micro-batch is open"):
            stale.__exit__(None, None, None)
        assert not staler.__exit__(KeyError, KeyError(), None)
        acc.add_part(part)
    assert (acc.count, acc.weight, acc.take().numpy()["w"].item()) == (1, 8.0, 2.0)


@pytest.mark.parametrize("every", [2**63, 2**64, {0: 2**64}, {2**64: 1}])
def test_lengths_beyond_all_bounds(every):
    with pytest.raises(gradacc.ArgumentError, match="every"):
        gradacc.GradientAccumulator({"w": ((1,), "float32")}, every=every)


def test_a_micro_batch_without_gradients_adds_nothing_to_divide():
    acc = gradacc.GradientAccumulator({"w": ((1,), "float32")})
    acc.add({}, weight=0, scale=1)
    assert len(acc.take()) == 0


def test_a_schedule_of_an_object_that_holds_its_accumulator_is_collected():
    class Trainer:
        def __init__(self):
            self.acc = gradacc.GradientAccumulator({"w": ((1,), "float32")}, every=self.length)

        def length(self, window):
            return window + 1

    trainer = Trainer()
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
