"""Asks a machine with a GPU for the facts that shmsync's device path rests on, and prints each as a line of JSON.

    python tools/gpu_probe.py                 on cuda:0
    python tools/gpu_probe.py --small --device simulated:0      over the tests' device without hardware

Each fact is asked in a separate process, with a limit in seconds: one that fails, hangs or ends its process leaves
the others as they are. shmsync must be installed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import mmap
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import shmsync
from shmsync import Publisher, ShmSyncError, Subscriber
from shmsync.memory.devices import named
from shmsync.memory.slab import map_readonly, map_shared

LIMIT = 90  # seconds for one fact
CONTEXT = multiprocessing.get_context("spawn")
SIZE = {False: 256 << 20, True: 1 << 20}  # bytes of a model, by --small
LEAVES = {False: (1, 64, 291, 18_000), True: (1, 64)}  # 291: an 8B Llama; 18,000: a mixture of experts
ROUNDS = {False: 20, True: 3}
ONLY_CUDA = "left out: only CUDA has it"


class Machine:
    """The device that is asked, through what every device of torch has."""

    def __init__(self, name: str, small: bool) -> None:
        self.device, self.small = torch.device(name), small
        self.module: Any = torch.get_device_module(self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        self.module.synchronize()

    def busy(self) -> None:
        """Work of about half a second for the current stream."""
        self.module._sleep(1_000_000_000)

    def model(self, leaves: int, value: float = 1.0) -> dict[str, torch.Tensor]:
        """So many tensors on the device, of one size in all."""
        words = max(1, SIZE[self.small] // leaves // 4)
        return {f"w{number}": torch.full((words,), value, device=self.device) for number in range(leaves)}

    def seconds(self, work: Callable[[], object], *, synchronized: bool = True) -> float:
        """What this work takes in the median; `synchronized`: until the device has done it."""
        taken = []
        for _ in range(ROUNDS[self.small] + 2):
            self.synchronize()
            start = time.perf_counter()
            work()
            if synchronized:
                self.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[2:])


def what_is_there(machine: Machine) -> Any:
    """Versions, and what the driver says about the device."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "shmsync": shmsync.__version__}
    if machine.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(machine.device)
        properties = torch.cuda.get_device_properties(machine.device)
        found |= {"name": properties.name, "free": free, "total": total}
        found["capability"] = [properties.major, properties.minor]
    return found


def _read(handle: Any, answers: Any, ready: Any, over: Any) -> None:
    with Subscriber(handle, worker=0, timeout=30.0) as sub:
        with sub.read() as section:
            answers.put(float(section.weights["w0"].min()))
        ready.set()
        over.wait(60)


def another_process_reads(machine: Machine) -> Any:
    """What a spawned process finds in the memory that this one exports."""
    answers, ready, over = CONTEXT.Queue(), CONTEXT.Event(), CONTEXT.Event()
    with Publisher(machine.model(4, 3.0), device=machine.device, timeout=30.0) as pub:
        pub.publish(wait=[])
        process = CONTEXT.Process(target=_read, args=(pub.handle, answers, ready, over))
        process.start()
        found = answers.get(timeout=60)
        over.set()
        process.join(30)
    return {"read": found, "right": found == 3.0}


def _publish_and_wait(name: str, small: bool, answers: Any) -> None:
    machine = Machine(name, small)
    with Publisher(machine.model(4, 5.0), device=machine.device, timeout=30.0) as pub:
        pub.publish(wait=[])
        answers.put(pub.handle)
        time.sleep(LIMIT)


def the_exporter_is_killed(machine: Machine) -> Any:
    """What a process that has the memory open finds in it after its owner was killed. CUDA does not say."""
    answers = CONTEXT.Queue()
    process = CONTEXT.Process(target=_publish_and_wait, args=(str(machine.device), machine.small, answers))
    process.start()
    with Subscriber(answers.get(timeout=60), timeout=5.0) as sub:
        weights = sub.snapshot().weights
        process.kill()
        process.join()
        time.sleep(1.0)
        try:
            after: Any = float(sub.snapshot().weights["w0"].min())
        except (ShmSyncError, RuntimeError) as error:
            after = f"{type(error).__name__}: {error}"[:200]
    return {"before": float(weights["w0"].min()), "after": after}


def _hold(handle: Any, name: str, small: bool, ready: Any) -> None:
    machine = Machine(name, small)
    with Subscriber(handle, worker=0, timeout=30.0) as sub, sub.read():
        machine.busy()
        ready.set()
        time.sleep(LIMIT)


def a_worker_is_killed_in_a_kernel(machine: Machine) -> Any:
    """How long the next publish takes when a worker was killed in a section, with a kernel under way."""
    ready = CONTEXT.Event()
    with Publisher(machine.model(4), slots=1, device=machine.device, timeout=30.0) as pub:
        process = CONTEXT.Process(target=_hold, args=(pub.handle, str(machine.device), machine.small, ready))
        process.start()
        ready.wait(60)
        os.kill(process.pid or 0, signal.SIGKILL)
        start = time.perf_counter()
        pub.publish(wait=[])
        seconds = time.perf_counter() - start
        process.join(10)
    return {"seconds": seconds}


def cost_of_calls(machine: Machine) -> Any:
    """Microseconds for which the calling thread stands still."""
    found = {}
    for leaves in LEAVES[machine.small]:
        source = machine.model(leaves)
        with (
            Publisher(source, slots=2, device=machine.device, timeout=60.0) as pub,
            Subscriber(pub.handle, timeout=60.0) as sub,
        ):

            def section(sub: Subscriber = sub) -> None:
                with sub.read():
                    pass

            found[f"publish of {leaves}"] = machine.seconds(pub.publish, synchronized=False) * 1e6
            pub.publish(wait=[])
            found[f"section over {leaves}"] = machine.seconds(section, synchronized=False) * 1e6
    return found


def bandwidth(machine: Machine) -> Any:
    """GB copied in a second, by three ways, for models of the same size."""
    found = {}
    size = SIZE[machine.small]
    flat, there = (torch.zeros(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    found["one copy"] = size / machine.seconds(lambda: there.copy_(flat)) / 1e9
    for leaves in LEAVES[machine.small]:
        source = list(machine.model(leaves).values())
        target = [torch.empty_like(tensor) for tensor in source]

        def loop(target: list[torch.Tensor] = target, source: list[torch.Tensor] = source) -> None:
            for to, tensor in zip(target, source, strict=True):
                to.copy_(tensor)

        size = sum(tensor.nbytes for tensor in source)
        found[f"{leaves}, a loop of copies"] = size / machine.seconds(loop) / 1e9
        together = functools.partial(torch._foreach_copy_, target, source)
        found[f"{leaves}, foreach"] = size / machine.seconds(together) / 1e9
        named = {f"w{number}": tensor for number, tensor in enumerate(source)}
        with Publisher(named, slots=2, device=machine.device, timeout=60.0) as pub:
            found[f"{leaves}, publish"] = size / machine.seconds(lambda pub=pub: pub.publish(wait=[])) / 1e9
    return found


def a_close_waits_for_the_device(machine: Machine) -> Any:
    """How long close() takes while this process has work of half a second under way."""
    pub = Publisher(machine.model(4), device=machine.device, timeout=30.0)
    pub.publish(wait=[])
    machine.busy()
    start = time.perf_counter()
    pub.close()
    return {"seconds": time.perf_counter() - start}


def a_stream_writes_into_shared_memory(machine: Machine) -> Any:
    """Microseconds until a thread sees a word of a memfd that a stream writes (cuStreamWriteValue64).

    A commit without a host function, and a slot that comes free while its reader's process is stopped, would need it.
    """
    if machine.device.type != "cuda":
        return ONLY_CUDA
    memory = os.memfd_create("probe")
    os.ftruncate(memory, 1 << 20)
    words = torch.frombuffer(mmap.mmap(memory, 1 << 20), dtype=torch.int64)
    runtime: Any = torch.cuda.cudart()
    driver, there = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    codes = {"register": int(runtime.cudaHostRegister(words.data_ptr(), words.nbytes, 2))}  # 2: mapped for the device
    codes["address"] = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(there), ctypes.c_void_p(words.data_ptr()), 0)
    if any(codes.values()):
        return {"codes": codes}
    stream, taken = ctypes.c_void_p(torch.cuda.Stream().cuda_stream), []
    for value in range(1, 200):
        start = time.perf_counter()
        codes["write"] = driver.cuStreamWriteValue64_v2(stream, there, ctypes.c_uint64(value), 0)
        while not codes["write"] and words[0].item() != value:
            pass
        taken.append(time.perf_counter() - start)
    return {"codes": codes, "microseconds": statistics.median(taken) * 1e6}


def the_slab_can_be_pinned(machine: Machine) -> Any:
    """Does CUDA register the two mappings of a slab, and does torch then take them for pinned memory?"""
    fd = os.memfd_create("probe")
    os.ftruncate(fd, 1 << 20)
    found = {}
    for name, mapped in (("writable", map_shared), ("read-only", map_readonly)):
        storage = mapped(fd, 1 << 20)
        device: Any = named(machine.device)
        try:
            device.pin(storage, readonly=name == "read-only")
        except ShmSyncError as error:
            found[name] = str(error)[:300]
            continue
        if machine.device.type == "cuda":
            found[name] = torch.empty(0, dtype=torch.uint8).set_(storage).is_pinned()
        device.unpin(storage)
    return found


def copies_can_be_recorded(machine: Machine) -> Any:
    """Microseconds to ask for the grouped copies of a model: one by one, and as a record; are they right?"""
    found = {}
    device: Any = named(machine.device)
    for leaves in LEAVES[machine.small]:
        source = list(machine.model(leaves, 2.0).values())
        target = [torch.zeros_like(tensor) for tensor in source]
        asked = functools.partial(torch._foreach_copy_, target, source)
        found[f"{leaves}, asked"] = machine.seconds(asked, synchronized=False) * 1e6
        for tensor in target:
            tensor.zero_()
        start = time.perf_counter()
        again = device.record(asked)
        found[f"{leaves}, to record"] = (time.perf_counter() - start) * 1e6
        if again is not None:
            found[f"{leaves}, recorded"] = machine.seconds(again, synchronized=False) * 1e6
            found[f"{leaves}, right"] = all(bool((tensor == 2.0).all()) for tensor in target)
    return found


def a_mapping_can_be_read_only(machine: Machine) -> Any:
    """The codes of CUDA's virtual memory calls that share memory by a descriptor, and map it for reading only."""
    if machine.device.type != "cuda":
        return ONLY_CUDA
    from cuda.bindings import driver

    torch.zeros(1, device=machine.device)  # makes the context
    as_descriptor = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = as_descriptor
    for location in (wanted.location, access.location):
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = machine.device.index or 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    codes = {}

    def call(name: str, *arguments: Any) -> Any:
        code, *found = getattr(driver, name)(*arguments)
        codes[name] = int(code)
        return found[0] if found else None

    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = call("cuMemGetAllocationGranularity", wanted, least)
    descriptor = call("cuMemExportToShareableHandle", call("cuMemCreate", size, wanted, 0), as_descriptor, 0)
    memory = call("cuMemImportFromShareableHandle", descriptor, as_descriptor)
    address = call("cuMemAddressReserve", size, 0, 0, 0)
    call("cuMemMap", address, size, 0, memory, 0)
    call("cuMemSetAccess", address, size, [access], 1)
    return codes


FACTS: dict[str, Callable[[Machine], Any]] = {
    fact.__name__: fact
    for fact in (
        what_is_there,
        another_process_reads,
        the_exporter_is_killed,
        a_worker_is_killed_in_a_kernel,
        cost_of_calls,
        bandwidth,
        a_close_waits_for_the_device,
        the_slab_can_be_pinned,
        copies_can_be_recorded,
        a_stream_writes_into_shared_memory,
        a_mapping_can_be_read_only,
    )
}


def asked(name: str, device: str, small: bool) -> dict[str, Any]:
    """One fact, from a separate process: its value, or the error."""
    command = [sys.executable, __file__, "--device", device, "--fact", name, *(["--small"] if small else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT} s"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode != 0 or not last.startswith("{"):
        return {"error": f"exit code {done.returncode}: {done.stderr[-1500:]}"}
    found: dict[str, Any] = json.loads(last)
    return found


def main() -> None:
    """All facts, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="few and small tensors")
    parser.add_argument("--fact", choices=FACTS, help="ask this one, in this process")
    given = parser.parse_args()
    if given.fact is not None:
        print(json.dumps({"value": FACTS[given.fact](Machine(given.device, given.small))}))
        return
    for name in FACTS:
        print(json.dumps({name: asked(name, given.device, given.small)}), flush=True)


if __name__ == "__main__":
    main()
