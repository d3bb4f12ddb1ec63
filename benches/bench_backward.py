"""Gradients that are added to float32 sums while autograd produces them, against what PyTorch has for that."""

import gradacc
import pytest
import torch
from conftest import GPT2_SMALL
from gradacc.torch import AccumulatingOptimizer


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


@pytest.fixture(scope="module")
def model():
    return lambda: Parameters(GPT2_SMALL)


class TestDuringBackwardOverTheFloor:
    """Add bfloat16 gradients of GPT-2 small to float32 sums during backward. The floor only drops them."""

    def test_floor(self, timed, model):
        timed(hooked(model(), None))

    def test_gradacc(self, timed, model):
        timed(attached(model()))

    def test_torch_grad_dtype(self, timed, model):
        timed(by_grad_dtype(model()))

    def test_torch_hook_and_add(self, timed, model):
        timed(hooked(model(), lambda sums, gradient: sums.add_(gradient)))


class TestAccumulatingOptimizer:
    """A micro-batch within a window: `AccumulatingOptimizer.step`, in ratio to `add` of the same gradients."""

    @pytest.fixture(params=["float32", "bfloat16"])
    def parameters(self, request):
        dtype = getattr(torch, request.param)
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in GPT2_SMALL]
        return parameters, [torch.randn(shape).to(dtype) for shape in GPT2_SMALL]

    def test_gradacc_add(self, timed, parameters):
        _, gradients = parameters
        acc = gradacc.GradientAccumulator(enumerate(gradients))
        acc.add(gradients)
        timed(acc.add, gradients)

    def test_step(self, timed, parameters):
        parameters, gradients = parameters
        optimizer = AccumulatingOptimizer(torch.optim.SGD(parameters), every=10**9)

        def step():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        timed(step)
