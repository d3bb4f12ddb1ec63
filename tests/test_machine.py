"""Any sequence of calls, against a model in float64. Values are small integers, so that every sum is exact."""

import math
import pickle

import gradacc
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

PARAMS = {"a": ((3,), "float32"), "b": ((2, 2), "float64"), 3: ((), "float16"), "z": ((2,), "complex64")}
LATE = ["late", "later"]
SCHEDULES = [{}, {"every": 1}, {"every": 3}, {"every": {0: 2, 2: 1}}, {"every": lambda window: window % 3 + 1}]
SCHEDULES += [{"until_weight": 5}]


def kind(id):
    return PARAMS.get(id, ((2,), "float32"))


def tensor(id, value):
    """A gradient whose elements differ, in a layout that is not always the plain one."""
    shape, dtype = kind(id)
    plain = np.full(shape, value, dtype)
    plain.reshape(-1)[:1] += 1
    return plain.T.copy().T


def pairs(array):
    """Complex numbers as pairs: NumPy makes NaN of the other part if one is infinite."""
    return array.view(np.float32).reshape(*array.shape, 2) if array.dtype == np.complex64 else array


class Window:
    """What a window should hold."""

    def __init__(self, goal):
        self.goal, self.is_fixed = goal, False
        self.count, self.weight, self.rejected, self.has_sums, self.sums = 0, 0.0, 0, False, {}

    @property
    def complete(self):
        every, until_weight = self.goal
        return self.is_fixed and (
            (every is not None and self.count >= every) or (until_weight is not None and self.weight >= until_weight)
        )


class Machine(RuleBasedStateMachine):
    @initialize(
        schedule=st.sampled_from(SCHEDULES),
        policy=st.sampled_from(["propagate", "raise", "skip"]),
        reduction=st.sampled_from(["mean", "sum"]),
    )
    def build(self, schedule, policy, reduction):
        self.schedule, self.options = schedule, {"on_nonfinite": policy, "reduction": reduction}
        self.ids, self.held, self.index = list(PARAMS), [], 0
        self.acc = self.fresh()
        self.model = Window(self.goal())

    def fresh(self):
        params = {id: kind(id) for id in self.ids}
        return gradacc.GradientAccumulator(params, **self.schedule, **self.options)

    def goal(self):
        every = self.schedule.get("every")
        if isinstance(every, dict):
            every = every[max(start for start in every if start <= self.index)]
        elif callable(every):
            every = every(self.index)
        return every, self.schedule.get("until_weight")

    def opened(self):
        self.model.is_fixed = True

    @rule()
    def register(self):
        late = [id for id in LATE if id not in self.ids]
        if late:
            self.acc.register(late[0], kind(late[0]))
            self.ids.append(late[0])
        with pytest.raises(gradacc.GradaccError):
            self.acc.register("a", ((3,), "float32"))

    @rule(
        data=st.data(),
        value=st.integers(-8, 8),
        weight=st.sampled_from([0, 1, np.int64(2), np.float32(3), np.array(4.0)]),
        scale=st.sampled_from([None, None, 0, 0.5, -1]),
        how=st.sampled_from(["whole", "whole", "sequence", "parts"]),
        number=st.sampled_from([None, None, None, math.nan, -math.inf]),
    )
    def add(self, data, value, weight, scale, how, number):
        ids = data.draw(st.lists(st.sampled_from(self.ids), unique=True, min_size=1))
        factor = float(weight if scale is None else scale)
        grads = {id: tensor(id, value) for id in ids}
        if number is not None:
            grads[ids[-1]] = np.full_like(grads[ids[-1]], number)
        given = [grads.get(id) for id in self.ids] if how == "sequence" else grads
        is_bad, policy = number is not None and factor != 0, self.options["on_nonfinite"]
        if how == "parts" and (policy == "skip" or is_bad):
            how = "whole"

        def call():
            if how != "parts":
                return self.acc.add(given, weight, scale=scale)
            with self.acc.micro_batch(weight, scale=scale):
                for id in ids:
                    self.acc.add_part({id: grads[id]})
                self.acc.add_part(grads)
            return self.acc.complete

        if self.model.complete:
            with pytest.raises(gradacc.WindowError):
                call()
            return
        if is_bad and policy == "raise":
            with pytest.raises(gradacc.NonFiniteError):
                call()
            return
        complete = call()
        self.opened()
        if is_bad and policy == "skip":
            self.model.rejected += 1
        else:
            self.model.count += 1
            self.model.weight += float(weight)
            self.model.has_sums |= factor != 0
            for id in ids:
                gradient = pairs(grads[id]).astype(np.float64)
                with np.errstate(invalid="ignore"):
                    term = gradient * (factor * (2 if how == "parts" else 1)) if factor else 0
                    self.model.sums[id] = self.model.sums.get(id, np.zeros(gradient.shape)) + term
        assert complete is self.model.complete

    @rule(bad=st.sampled_from(["shape", "dtype", "id", "weight", "length", "object"]))
    def refused(self, bad):
        grads, weight = {id: tensor(id, 9) for id in self.ids}, 1
        if bad == "shape":
            grads["z"] = np.ones((1, 2), np.complex64)
        elif bad == "dtype":
            grads["z"] = np.ones(2, np.float32)
        elif bad == "id":
            grads["none"] = np.ones(2, np.float32)
        elif bad == "object":
            grads["z"] = "text"
        elif bad == "weight":
            weight = math.nan
        else:
            grads = list(grads.values())[:-1]
        with pytest.raises(gradacc.GradaccError):
            self.acc.add(grads, weight)

    @rule()
    def fail_in_parts(self):
        """A part that is refused, in a micro-batch of nothing else, leaves the window as it was."""
        if self.options["on_nonfinite"] != "skip" and not self.model.complete:
            with pytest.raises(gradacc.ShapeError), self.acc.micro_batch():
                self.acc.add_part({"a": np.ones(4, np.float32)})

    @rule(data=st.data(), c=st.sampled_from([1, 2, -0.5]), late=st.booleans())
    def take(self, data, c, late):
        model, is_mean = self.model, self.options["reduction"] == "mean"
        if model.count == 0 or (is_mean and model.weight == 0 and model.has_sums):
            with pytest.raises(gradacc.WindowError):
                self.acc.take()
            return
        grads = self.acc.take()
        assert (grads.count, grads.weight, grads.rejected) == (model.count, model.weight, model.rejected)
        divisor = model.weight if is_mean and model.weight else 1
        expected = {id: model.sums[id] / divisor * c for id in self.ids if id in model.sums}
        grads.scale_(c)
        self.held.append((expected, grads if late else grads.numpy()))
        self.index += 1
        self.model = Window(self.goal())

    @rule()
    def reset(self):
        self.acc.reset()
        self.model = Window(self.goal())

    @rule(schedule=st.sampled_from(SCHEDULES))
    def set_schedule(self, schedule):
        self.acc.set_schedule(**schedule)
        self.schedule = schedule
        if not self.model.is_fixed:
            self.model.goal = self.goal()

    @rule(way=st.sampled_from(["file", "dict"]), is_used=st.booleans())
    def save_and_load(self, way, is_used):
        other = self.fresh()
        if is_used:
            other.add({id: tensor(id, 77) for id in self.ids})
        if way == "file":
            self.acc.save(self.path)
            other.load(self.path)
        else:
            other.load_state_dict(pickle.loads(pickle.dumps(self.acc.state_dict())))
        self.acc = other

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        check(*self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def agrees(self):
        acc, model = self.acc, self.model
        assert (acc.window, acc.count, acc.weight, acc.rejected) == (
            self.index,
            model.count,
            model.weight,
            model.rejected,
        )
        assert ((acc.every, acc.until_weight), acc.complete) == (model.goal, model.complete)
        assert acc.ids == self.ids
        for expected, held in self.held:
            if isinstance(held, dict):
                check(expected, held)


def check(expected, held):
    arrays = held if isinstance(held, dict) else held.numpy()
    assert list(arrays) == list(expected)
    for id, value in expected.items():
        np.testing.assert_allclose(pairs(arrays[id]), value, rtol=1e-6)


def test_any_sequence_of_calls_agrees_with_the_model(tmp_path, backend):
    Machine.path = tmp_path / "window"
    # Runs of 50 steps; torch takes longer for each.
    runs = 60 if backend == "torch" else 200
    some = settings(max_examples=runs, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=some)
