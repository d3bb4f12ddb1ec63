"""The examples: their hand-written gradients, and that they run."""

import importlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import numpy_language_model

    return numpy_language_model


def test_gradients_written_out_in_numpy_are_those_of_autograd(model):
    corpus, characters = model.documents()
    batch = sorted(corpus, key=len)[:3]
    params = model.initial(len(characters), np.float64)
    loss, gradients = model.loss_and_gradients(params, batch)
    context, target = (torch.from_numpy(array.astype(np.int64)) for array in model.examples(batch))
    tensors = {id: torch.from_numpy(values).requires_grad_() for id, values in params.items()}
    embedded = tensors["embedding"][context].flatten(1)
    hidden = torch.tanh(embedded @ tensors["hidden.weight"] + tensors["hidden.bias"])
    logits = hidden @ tensors["output.weight"] + tensors["output.bias"]
    expected = torch.nn.functional.cross_entropy(logits, target)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for id, tensor in tensors.items():
        np.testing.assert_allclose(gradients[id], tensor.grad, rtol=1e-9, atol=1e-12)


def test_numpy_language_model_runs(tmp_path):
    command = [sys.executable, EXAMPLES / "numpy_language_model.py", "--steps", "2", "--plot", tmp_path / "plot.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines() if "MiB" in line}
    assert list(rows) == ["full batch", "mean of means", "gradacc"]
    assert float(rows["gradacc"][0]) < 1e-4 < 1e-2 < float(rows["mean of means"][0])
    assert rows["gradacc"][1] == rows["full batch"][1] != rows["mean of means"][1]
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["torch_plain_loop", "accelerate_loop", "chunked_losses"])
def test_a_loop_trains(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    losses = importlib.import_module(name).main(8)
    assert sum(losses[-2:]) / 2 < sum(losses[:2]) / 2 - 0.5


@pytest.mark.parametrize("name", ["jax_plain", "flax_train_state", "equinox_loop", "brainpy_digits"])
def test_a_loop_learns_digits(name, monkeypatch):
    if name.startswith("brainpy"):
        pytest.importorskip("brainpy")
    monkeypatch.syspath_prepend(EXAMPLES)
    losses = importlib.import_module(name).main(40)
    assert sum(losses[-4:]) / 4 < losses[0] / 2


def test_chunks_of_a_loss_are_the_whole(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import chunked_losses
    import transformer

    net, (text, targets) = transformer.model(), next(transformer.batches(4))
    total = chunked_losses.backward(net, text, targets)
    loss = transformer.loss_of(net(text), targets, reduction="sum")
    assert total == pytest.approx(loss.item(), rel=1e-5)
    for parameter, expected in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-3)


def test_torch_language_model_runs():
    command = [sys.executable, EXAMPLES / "torch_language_model.py", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    rows = {line[:12].strip(): line[12:].split() for line in done.stdout.splitlines() if "MiB" in line}
    assert list(rows) == ["full batch", "plain loop", "gradacc"]
    assert float(rows["gradacc"][0]) < 1e-4 < 1e-2 < float(rows["plain loop"][0])
