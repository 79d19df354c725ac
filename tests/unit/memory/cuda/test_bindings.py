"""The real cuda-bindings, where they are installed: without a driver each call answers with an error, but takes its
arguments as on a machine with one."""

import ctypes
import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shmsync
from shmsync.memory.cuda.calls import CudaCalls
from support.devices.standin_cuda import BLOCK, Proxy, World

needs_bindings = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-bindings are not installed: pip install 'shmsync[cuda]'",
)


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


_ARGUMENTS = {
    "cudaGetDeviceProperties": (0,),
    "cudaMemGetInfo": (),
    "cudaMalloc": (BLOCK,),
    "cudaFree": (4096,),
    "cudaHostAlloc": (4096, 1),
    "cudaFreeHost": (4096,),
    "cudaStreamCreateWithFlags": (1,),
    "cudaStreamDestroy": (4096,),
    "cudaStreamQuery": (4096,),
    "cudaStreamIsCapturing": (4096,),
    "cudaEventCreateWithFlags": (2,),
    "cudaEventDestroy": (4096,),
    "cudaEventRecord": (4096, 4096),
    "cudaEventQuery": (4096,),
    "cudaStreamWaitEvent": (4096, 4096, 0),
    "cudaIpcCloseMemHandle": (4096,),
    "cudaGetLastError": (),
    "cudaIpcGetMemHandle": (4096,),
    "cudaIpcOpenMemHandle": (b"h" * 64,),
    "cudaMemcpyAsync": (4096, 8192, 10, 4096),
    "relax": (),
}


@pytest.fixture
def bindings():
    from cuda.bindings import runtime

    return CudaCalls(runtime, SimpleNamespace(cuLaunchHostFunc=SimpleNamespace()))


@needs_bindings
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="on a machine with a GPU these addresses would be used")
@pytest.mark.parametrize("name", _ARGUMENTS)
def test_the_bindings_take_the_arguments_and_answer_in_the_same_form(bindings, name):
    answer = getattr(bindings, name)(*_ARGUMENTS[name])
    code = answer[0]
    assert int(code) != 0 or name == "cudaGetLastError"  # there is no driver
    assert bindings.cudaGetErrorString(code)[1].decode()
    standin = Proxy(World())
    with standin.side.on(0):
        standin.fail_at = 1
        standin.modes.relaxed = True
        standin.log.append(("first", ()))
        assert len(getattr(standin, name)(*_ARGUMENTS[name])) == len(answer)
