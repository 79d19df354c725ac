"""The one call of CUDA's driver that is made directly, over a library that stands in for it."""

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shmsync
from shmsync.memory.cuda.calls import CudaCalls


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A library with the driver's one function that is called directly. Calls to it hold the GIL."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parents[3] / "support" / "devices" / "libcuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    return ctypes.PyDLL(str(library))


def test_a_version_is_committed_by_a_thread_of_the_driver_without_the_gil(driver):
    runtime = SimpleNamespace(
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeRelaxed=2), cudaError_t={0: 0, 400: 400}.__getitem__
    )
    calls = CudaCalls(runtime, driver)
    with shmsync.Publisher({"t": torch.ones(1)}, slots=2) as pub:
        writer = pub._writer.native
        assert writer.begin()
        call = writer.commit_later()
        assert int(calls.cuLaunchHostFunc(1, type(call).function, call.ticket())[0]) == 0
        assert call.wait(0)
        assert pub.version == 2
    assert int(calls.cuLaunchHostFunc(0, 1, 1)[0]) == 400
