"""`AccumulatingOptimizer` against a bare accumulator."""

import gradacc
import pytest
import torch
from conftest import GPT2_SMALL
from gradacc.torch import AccumulatingOptimizer


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
