"""The contract is the same whichever backend keeps the sums: tests of it run on both."""

import pytest

CONTRACT = {"test_window", "test_inputs", "test_gradients", "test_state", "test_machine", "test_torch"}
CONTRACT |= {"test_torch_backward"}


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__ in CONTRACT and metafunc.definition.get_closest_marker("engine") is None:
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", ["auto", "torch"], indirect=True)


@pytest.fixture
def backend(request, monkeypatch):
    monkeypatch.setenv("GRADACC_BACKEND", request.param)
    return request.param


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
