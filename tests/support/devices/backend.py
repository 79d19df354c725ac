"""Loads backend.cpp: torch then knows devices of the type "simulated", and asks `copied` for every copy to or from one.

It is compiled once for each torch, into the folder of the environment.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("backend.cpp")


@functools.lru_cache(maxsize=1)
def load(
    copied: Callable[[torch.Tensor, torch.Tensor], None],
    synchronize: Callable[..., None],
    sleep: Callable[[int], None],
) -> None:
    """Once in a process. `copied(source, to)` carries out `to.copy_(source)` where one of them is on such a device.

    `synchronize` and `sleep` are torch.simulated.synchronize() and, as in torch.cuda, _sleep().
    """
    torch.ops.load_library(_compiled())
    torch.utils.rename_privateuse1_backend("simulated")
    module = types.ModuleType("torch.simulated")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.synchronize, module._sleep = synchronize, sleep
    torch._register_device_module("simulated", module)
    torch.utils.generate_methods_for_privateuse1_backend()

    def copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied(source, to)
        return to

    library = torch.library.Library("aten", "IMPL")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    _kept.append(library)


_kept: list[torch.library.Library] = []


def _compiled() -> str:
    package = Path(torch.__file__).parent
    mark = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = Path(sys.prefix, f"simulated-{mark}.so")
    if made.exists():
        return str(made)
    includes = [f"-I{package / 'include' / more}" for more in ("", "torch/csrc/api/include")]
    libraries = [f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles
        if not made.exists():
            part = made.with_suffix(".part")
            command = [os.environ.get("CXX", "c++"), "-O1", "-std=c++20", "-shared", "-fPIC", *includes, str(SOURCE)]
            subprocess.run([*command, "-o", str(part), *libraries], check=True)
            part.replace(made)
    return str(made)
