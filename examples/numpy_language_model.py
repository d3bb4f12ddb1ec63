"""A character-level language model in plain NumPy, trained on real text three ways.

Each document is a sample, and documents differ a hundredfold in length. One optimizer step takes a batch of documents:

- "full batch": all their characters at once;
- "mean of means": in micro-batches, whose gradients are averaged as most hand-written loops do;
- "gradacc": in the same micro-batches, through a `GradientAccumulator` with each micro-batch's characters as weight.

The data, the seed and the order are the same in all three. Prints a table and saves a plot of the losses. Every figure
is measured in this run; each way runs in a process of its own, so that its peak memory is its own.

    python examples/numpy_language_model.py [--steps 120] [--plot demo/losses.png]
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import gradacc
import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from topics import Document, documents
from tqdm import tqdm

CONTEXT, EMBEDDING, HIDDEN = 6, 8, 64
BATCH, MICRO_BATCHES = 8, 4  # documents to a batch, and micro-batches it is split into
LEARNING_RATE = 0.01
tqdm.set_lock(threading.RLock())  # its own would be one for processes, and outlive them
WAYS = ["full batch", "mean of means", "gradacc"]

Array = npt.NDArray[Any]
Params = dict[str, Array]


# ---- the model: characters before -> embedding -> one hidden layer -> softmax over the next character


def initial(vocabulary: int, dtype: npt.DTypeLike = np.float32) -> Params:
    """Parameters as they are before training, always the same."""
    rng = np.random.default_rng(0)
    inputs = CONTEXT * EMBEDDING
    params = {
        "embedding": rng.normal(0, 1, (vocabulary, EMBEDDING)),
        "hidden.weight": rng.normal(0, inputs**-0.5, (inputs, HIDDEN)),
        "hidden.bias": np.zeros(HIDDEN),
        "output.weight": rng.normal(0, HIDDEN**-0.5, (HIDDEN, vocabulary)),
        "output.bias": np.zeros(vocabulary),
    }
    return {id: values.astype(dtype) for id, values in params.items()}


def examples(batch: list[Document]) -> tuple[Array, Array]:
    """For each character to be predicted, those before it; and the character."""
    contexts, targets = [], []
    for document in batch:
        padded = np.concatenate([np.zeros(CONTEXT, np.uint8), document])
        contexts.append(np.lib.stride_tricks.sliding_window_view(padded, CONTEXT)[:-1])
        targets.append(document)
    return np.concatenate(contexts), np.concatenate(targets)


def loss_and_gradients(params: Params, batch: list[Document]) -> tuple[float, Params]:
    """The mean loss over the characters of some documents, and its gradients."""
    context, target = examples(batch)
    embedded = params["embedding"][context].reshape(len(target), -1)
    hidden = np.tanh(embedded @ params["hidden.weight"] + params["hidden.bias"])
    logits = hidden @ params["output.weight"] + params["output.bias"]
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    total = probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(target))
    loss = float(np.mean(np.log(total[:, 0], dtype=np.float64) - logits[rows, target]))
    probabilities /= total
    d_logits = probabilities
    d_logits[rows, target] -= 1
    d_logits /= len(target)
    d_hidden = d_logits @ params["output.weight"].T * (1 - hidden**2)
    d_embedded = d_hidden @ params["hidden.weight"].T
    # Sum, for each character, the gradients of the places it stood at.
    weights, flat = d_embedded.reshape(-1, EMBEDDING), context.reshape(-1)
    d_embedding = [np.bincount(flat, weights[:, i], len(params["embedding"])) for i in range(EMBEDDING)]
    return loss, {
        "embedding": np.stack(d_embedding, axis=1).astype(embedded.dtype),
        "hidden.weight": embedded.T @ d_hidden,
        "hidden.bias": d_hidden.sum(axis=0),
        "output.weight": hidden.T @ d_logits,
        "output.bias": d_logits.sum(axis=0),
    }


class Adam:
    """Kingma and Ba, 2015."""

    def __init__(self, params: Params) -> None:
        self.mean = {id: np.zeros_like(values) for id, values in params.items()}
        self.square = {id: np.zeros_like(values) for id, values in params.items()}
        self.steps = 0

    def step(self, params: Params, gradients: Params) -> None:
        """Change the parameters in place."""
        self.steps += 1
        for id, gradient in gradients.items():
            self.mean[id] += 0.1 * (gradient - self.mean[id])
            self.square[id] += 0.001 * (gradient**2 - self.square[id])
            mean = self.mean[id] / (1 - 0.9**self.steps)
            square = self.square[id] / (1 - 0.999**self.steps)
            params[id] -= LEARNING_RATE * mean / (np.sqrt(square) + 1e-8)


# ---- three ways to the gradients of a batch


class Accumulated(NamedTuple):
    """The gradients of a batch, its mean loss, and the seconds spent on adding gradients up."""

    gradients: Params
    loss: float
    seconds: float


def full_batch(params: Params, batch: list[Document]) -> Accumulated:
    """All at once."""
    loss, gradients = loss_and_gradients(params, batch)
    return Accumulated(gradients, loss, 0.0)


def mean_of_means(params: Params, batch: list[Document]) -> Accumulated:
    """Add up the micro-batches' means and divide by their number."""
    sums = {id: np.zeros_like(values) for id, values in params.items()}
    losses, seconds = [], 0.0
    for micro_batch in split(batch):
        loss, gradients = loss_and_gradients(params, micro_batch)
        losses.append(loss)
        start = time.perf_counter()
        for id, gradient in gradients.items():
            sums[id] += gradient / MICRO_BATCHES
        seconds += time.perf_counter() - start
    return Accumulated(sums, float(np.mean(losses)), seconds)


def through_gradacc() -> Callable[[Params, list[Document]], Accumulated]:
    """The same loop, with an accumulator that lives as long as the training."""
    accumulators: list[gradacc.GradientAccumulator] = []

    def accumulate(params: Params, batch: list[Document]) -> Accumulated:
        start = time.perf_counter()
        if not accumulators:
            accumulators.append(gradacc.GradientAccumulator(params, every=MICRO_BATCHES))
        (acc,) = accumulators
        seconds, total = time.perf_counter() - start, 0.0
        for micro_batch in split(batch):
            loss, gradients = loss_and_gradients(params, micro_batch)
            characters = sum(map(len, micro_batch))
            total += loss * characters
            start = time.perf_counter()
            acc.add(gradients, weight=characters)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        taken = acc.take()
        gradients = taken.numpy()
        return Accumulated(gradients, total / taken.weight, seconds + time.perf_counter() - start)

    return accumulate


def way(name: str) -> Callable[[Params, list[Document]], Accumulated]:
    """The function that goes this way."""
    return {"full batch": full_batch, "mean of means": mean_of_means, "gradacc": through_gradacc()}[name]


def split(batch: list[Document]) -> Iterator[list[Document]]:
    """Micro-batches with the same number of documents, so with very different numbers of characters."""
    size = len(batch) // MICRO_BATCHES
    return (batch[start : start + size] for start in range(0, len(batch), size))


def batches(steps: int, corpus: list[Document]) -> Iterator[list[Document]]:
    """Batches of documents drawn at random, always the same."""
    rng = np.random.default_rng(1)
    return ([corpus[i] for i in rng.choice(len(corpus), BATCH, replace=False)] for _ in range(steps))


# ---- what is measured


class Outcome(NamedTuple):
    """What training one way has come to."""

    losses: list[float]
    final_loss: float
    peak_bytes: int
    seconds: float


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    try:  # what getrusage says on Linux counts what the parent had when it started this process
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def alone(function: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """Call a function in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def train(name: str, steps: int) -> Outcome:
    """Train one way, in this process."""
    corpus, characters = documents()
    params = initial(len(characters))
    optimizer, accumulate = Adam(params), way(name)
    before, losses, seconds = peak_bytes(), [], 0.0
    for batch in tqdm(batches(steps, corpus), name.rjust(14), steps, unit="step"):
        step = accumulate(params, batch)
        optimizer.step(params, step.gradients)
        losses.append(step.loss)
        seconds += step.seconds
    peak = peak_bytes() - before
    sizes = [len(document) for document in corpus]
    final = [loss_and_gradients(params, [document])[0] for document in corpus]
    return Outcome(losses, float(np.average(final, weights=sizes)), peak, seconds)


def gradient_errors(count: int = 5) -> dict[str, float]:
    """The largest relative error, over some batches, of each way's gradients against the full batch in float64."""
    corpus, characters = documents()
    exact_params, params = initial(len(characters), np.float64), initial(len(characters))
    ways, errors = {name: way(name) for name in WAYS}, dict.fromkeys(WAYS, 0.0)
    for batch in tqdm(batches(count, corpus), "gradients".rjust(14), count, unit="batch"):
        # The same parameters: those of float32.
        exact = loss_and_gradients({id: params[id].astype(np.float64) for id in exact_params}, batch)[1]
        size = np.sqrt(sum(np.sum(values**2) for values in exact.values()))
        for name, accumulate in ways.items():
            gradients = accumulate(params, batch).gradients
            distance = np.sqrt(sum(np.sum((gradients[id] - exact[id]) ** 2) for id in exact))
            errors[name] = max(errors[name], float(distance / size))
    return errors


def save_plot(outcomes: dict[str, Outcome], path: pathlib.Path) -> None:
    """The loss of each batch, as each way saw it before its step."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    styles = {
        "full batch": ("black", "-", 3.0),
        "mean of means": ("tab:red", "-", 1.5),
        "gradacc": ("tab:cyan", "--", 1.5),
    }
    for name, outcome in outcomes.items():
        color, line, width = styles[name]
        axes.plot(range(1, len(outcome.losses) + 1), outcome.losses, line, color=color, linewidth=width, label=name)
    axes.set(
        xlabel="optimizer step", ylabel="loss of the batch (nats per character)", title="The same data, three ways"
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train three ways, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("demo/losses.png"))
    arguments = parser.parse_args()
    errors = gradient_errors()
    outcomes = {name: alone(train, name, arguments.steps) for name in WAYS}
    print(f"\n{'':14} {'gradient error':>14} {'final loss':>10} {'peak memory':>11} {'accumulation':>12}")
    for name, outcome in outcomes.items():
        print(
            f"{name:14} {errors[name]:14.1e} {outcome.final_loss:10.4f} {outcome.peak_bytes / 2**20:7.0f} MiB "
            f"{outcome.seconds * 1e3:9.1f} ms"
        )
    save_plot(outcomes, arguments.plot)
    print(
        "\nGradient error: relative, against the full batch in float64, the largest of 5 batches. Final loss: nats\n"
        "per character, on all documents. Peak memory: what training added to the process. Loss curves are in\n"
        f"{arguments.plot}"
    )


if __name__ == "__main__":
    main()
