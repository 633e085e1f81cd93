"""Tests run on every device that is there: `pytest -m gpu` on a GPU alone, `-m "not gpu"` on the CPU."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from moiety import _lib  # noqa: E402

CPU_ONLY = {"test_package", "test_compile_cache"}


def has_gpu():
    return torch.cuda.is_available() and _lib.call_json("moiety_build_info")["cuda"]


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU, and a build with CUDA")
    config.addinivalue_line("markers", "slow: takes seconds; `-m 'not slow'` leaves it out")
    config.addinivalue_line("markers", "cpu_only: about what a GPU does not do, or does in the same way")


def pytest_generate_tests(metafunc):
    if "device" not in metafunc.fixturenames:
        return
    here = metafunc.module.__name__
    gpu_only = metafunc.definition.get_closest_marker("gpu") is not None
    cpu_only = here in CPU_ONLY or metafunc.definition.get_closest_marker("cpu_only") is not None
    devices = [] if gpu_only else ["cpu"]
    if gpu_only or (has_gpu() and not cpu_only):
        devices.append(pytest.param("cuda", marks=[] if gpu_only else pytest.mark.gpu))
    metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture(autouse=True)
def device(request):
    """Where tensors are made that do not say where."""
    if request.param == "cpu":
        yield request.param
        return
    if not has_gpu():
        pytest.skip("no GPU, or a build without CUDA")
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)
