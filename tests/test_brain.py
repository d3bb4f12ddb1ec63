"""Micro-batches for functions of Variables and states, on the rows of handwritten digits."""

from types import SimpleNamespace

import gradacc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

IMAGES, TARGETS = (jnp.asarray(a) for a in (load_digits().images.astype("f") / 16, load_digits().target))
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def cross_entropy(outputs, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs.max(axis=0)), targets[:, None], axis=1)[:, 0]


def brainpy():
    bp = pytest.importorskip("brainpy")
    import brainpy.math as bm
    import gradacc.brainpy

    class Classifier(bp.DynamicalSystem):
        def __init__(self):
            super().__init__()
            self.rnn = bp.dyn.RNNCell(8, 20, mode=bm.training_mode)
            self.out = bp.dnn.Dense(20, 10, mode=bm.training_mode)
            self.seen = bm.Variable(jnp.zeros((), int))

        def update(self, row):
            return self.out(self.rnn(row))

    def errors(images, targets):
        bp.reset_state(model, len(images))
        model.seen.value = model.seen.value + len(images)
        return cross_entropy(bm.as_jax(bm.for_loop(model.update, jnp.swapaxes(images, 0, 1))), targets)

    model = Classifier()
    variables = model.train_vars().unique()
    return SimpleNamespace(
        errors=errors,
        variables=variables,
        all=lambda: model.vars().values(),
        seen=model.seen,
        jit=bm.jit,
        accumulate=gradacc.brainpy.accumulate_gradients,
        gradient=lambda loss, variables: bm.grad(loss, variables, return_value=True),
        noise=lambda shape: bm.as_jax(bm.random.rand(*shape)),
        variable=lambda value: bm.Variable(jnp.asarray(value)),
    )


def brainstate():
    bs = pytest.importorskip("brainstate")
    import gradacc.brainstate

    class Classifier(bs.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = bs.nn.ValinaRNNCell(8, 20)
            self.out = bs.nn.Linear(20, 10)
            self.seen = bs.ShortTermState(jnp.zeros((), int))

        def update(self, row):
            return self.out(self.rnn(row))

    def errors(images, targets):
        bs.nn.reset_all_states(model, batch_size=len(images))
        model.seen.value = model.seen.value + len(images)
        return cross_entropy(bs.transform.for_loop(model.update, jnp.swapaxes(images, 0, 1)), targets)

    model = bs.nn.init_all_states(Classifier(), batch_size=1)
    return SimpleNamespace(
        errors=errors,
        variables=model.states(bs.ParamState),
        all=lambda: model.states().values(),
        seen=model.seen,
        jit=bs.transform.jit,
        accumulate=gradacc.brainstate.accumulate_gradients,
        gradient=lambda loss, variables: bs.transform.grad(loss, variables, return_value=True),
        noise=lambda shape: bs.random.rand(*shape),
        variable=lambda value: bs.ParamState(jnp.asarray(value)),
    )


@pytest.fixture(scope="module", params=[brainpy, brainstate], ids=["brainpy", "brainstate"])
def net(request):
    net = request.param()
    net.loss = lambda images, targets: jnp.mean(net.errors(images, targets))
    return net


def assert_close(these, those):
    assert jax.tree.structure(these) == jax.tree.structure(those)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), these, those)


@pytest.mark.parametrize(("samples", "micro_batches"), [(12, 3), (13, 4), (5, 1), (3, 7)])
@pytest.mark.parametrize("jitted", [False, True])
def test_it_is_the_full_batch_and_variables_see_every_micro_batch(net, samples, micro_batches, jitted):
    batch = IMAGES[:samples], TARGETS[:samples]
    grads, value = net.gradient(net.loss, net.variables)(*batch)
    accumulated = net.accumulate(net.loss, net.variables, micro_batches=micro_batches)
    before = int(net.seen.value)
    assert_close((net.jit(accumulated) if jitted else accumulated)(*batch), (value, grads))
    assert net.seen.value == before + samples
    for variable in net.all():
        jax.tree.map(np.asarray, variable.value)  # none holds a tracer


def test_lists_and_single_variables(net):
    variables = list(net.variables.values())
    batch = IMAGES[:7], TARGETS[:7]
    grads, _ = net.gradient(net.loss, variables)(*batch)
    _, accumulated = net.accumulate(net.loss, variables, micro_batches=2)(*batch)
    assert_close(list(accumulated), list(grads))
    grad, _ = net.gradient(net.loss, variables[0])(*batch)
    _, accumulated = net.accumulate(net.loss, variables[0], micro_batches=2)(*batch)
    assert_close(accumulated, grad)


def test_weights_and_what_else_is_returned(net):
    tokens = jnp.asarray([3.0, 0, 1, 2, 5])

    def loss(batch):
        errors = net.errors(batch["images"], batch["targets"])
        return jnp.sum(errors * batch["tokens"]) / jnp.sum(batch["tokens"]), len(errors)

    batch = {"images": IMAGES[:5], "targets": TARGETS[:5], "tokens": tokens}
    accumulated = net.accumulate(
        loss, net.variables, micro_batches=4, weight=lambda batch: batch["tokens"].sum(), has_aux=True
    )
    (value, aux), grads = net.jit(accumulated)(batch)
    expected, whole = net.gradient(lambda batch: loss(batch)[0], net.variables)(batch)
    assert_close((value, grads), (whole, expected))
    assert aux.tolist() == [2, 1, 1, 1]


def test_random_numbers_differ_between_micro_batches(net):
    w = net.variable(1.0)
    accumulated = net.accumulate(
        lambda x: (jnp.mean(w.value * x * net.noise(x.shape)), net.noise(())), w, micro_batches=3, has_aux=True
    )
    (_, aux), _ = accumulated(jnp.arange(7.0))
    assert len(set(aux.tolist())) == 3


def test_it_is_traced_once(net):
    traces = []

    def loss(images, targets):
        traces.append(1)
        return net.loss(images, targets)

    accumulated = net.accumulate(loss, net.variables, micro_batches=3)
    for function in (accumulated, net.jit(accumulated)):
        for first in range(4):
            if first == 2:
                before = len(traces)
            function(IMAGES[first : first + 8], TARGETS[first : first + 8])
        assert len(traces) == before


def test_what_makes_no_sense(net):
    for wrong in (0, True, 2.5):
        with pytest.raises(gradacc.ArgumentError, match="micro_batches"):
            net.accumulate(net.loss, net.variables, micro_batches=wrong)
    with pytest.raises(gradacc.ArgumentError, match="samples"):
        net.accumulate(net.loss, net.variables, micro_batches=2)(IMAGES[:3], TARGETS[:4])
