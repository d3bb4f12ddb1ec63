"""Gradients that are added to float32 sums while autograd produces them, against what PyTorch has for that.

bfloat16 parameters of GPT-2 small, whose gradients are made as cheaply as can be. The ways take turns in one process.
Prints a line of JSON: the median of the milliseconds that each takes, and of "floor", which only drops the gradients.
"""

import json
import statistics
import time

import gradacc
import torch
from conftest import GPT2_SMALL


class Produce(torch.autograd.Function):
    """The identity of a scalar; backward makes a gradient of the parameter, as cheaply as can be: by filling it."""

    @staticmethod
    def forward(ctx, total, parameter):
        ctx.like = parameter
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full_like(ctx.like, 0.5)


class Parameters(torch.nn.Module):
    """Parameters of these shapes in bfloat16, and a loss whose gradient they all have."""

    def __init__(self, shapes):
        super().__init__()
        zeros = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
        self.all = torch.nn.ParameterList(map(torch.nn.Parameter, zeros))

    def forward(self):
        total = torch.zeros((), requires_grad=True)
        for parameter in self.all:
            total = Produce.apply(total, parameter)
        return total


def attached(model):
    """A micro-batch of an accumulator that the model is attached to."""
    acc = gradacc.GradientAccumulator(model)
    acc.attach(model)

    def run():
        with acc.micro_batch():
            model().backward()

    return run


def hooked(model, use):
    """A backward pass with a hook on each parameter, given a float32 buffer and the gradient, which is freed then."""
    for parameter in model.parameters():
        sums = torch.zeros(parameter.shape) if use is not None else None

        def hook(parameter, sums=sums):
            if use is not None:
                use(sums, parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(hook)
    return lambda: model().backward()


def by_grad_dtype(model):
    """A backward pass that accumulates in `.grad`, which is float32."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return lambda: model().backward()


WAYS = {
    "floor": lambda model: hooked(model, None),
    "gradacc": attached,
    "Tensor.grad_dtype": by_grad_dtype,
    "hook and add_": lambda model: hooked(model, lambda sums, gradient: sums.add_(gradient)),
}


def main(rounds=21, warm_up=3):
    """Measure all ways."""
    runs = {name: way(Parameters(GPT2_SMALL)) for name, way in WAYS.items()}
    milliseconds = {name: [] for name in runs}
    for _ in range(rounds + warm_up):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            milliseconds[name].append((time.perf_counter() - start) * 1e3)
    print(json.dumps({name: statistics.median(each[warm_up:]) for name, each in milliseconds.items()}))


if __name__ == "__main__":
    main()
