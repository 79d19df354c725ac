"""`shmsync doctor`: does it work here, and what would make it work better?

Each check is one function that tries the thing itself where that is possible. `root`
stands for / in every path, so that a check can be shown another machine's files.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import psutil

from ..memory.slab import SEAL_FUTURE_WRITE, SEAL_GROW, SEAL_SHRINK, add_seals, cgroup_room, map_readonly, map_shared
from .output import say, size


class Level(str, Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # worth knowing
    WARNING = "warning"  # works now, may fail or be slow later
    FAILURE = "failure"  # shmsync does not work here


class Finding(NamedTuple):
    """One thing that was found, and what to do about it."""

    check: str
    level: Level
    text: str
    cure: str = ""


_MIB = 1 << 20


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def system(root: Path) -> Finding:
    """Kernel, Python and torch."""
    from importlib.metadata import PackageNotFoundError, version  # here, since other commands need none of its imports

    names = []
    for package in ("shmsync", "torch", "tensordict"):
        with suppress(PackageNotFoundError):
            names.append(f"{package} {version(package)}")
    text = f"Linux {platform.release()}, Python {platform.python_version()}, {', '.join(names)}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        cure = "use Linux 5.3 or newer; in a container, a seccomp profile that allows pidfd_open"
        return Finding("system", Level.WARNING, f"{text}; pidfds are refused ({error}): deaths are noticed later", cure)
    else:
        return Finding("system", Level.OK, text)


def shared_memory(root: Path) -> Finding:
    """/dev/shm, where control segments stand."""
    folder = root / "dev/shm"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        cure = f"mount it: mount -t tmpfs -o mode=1777 tmpfs {folder}; in a container: --shm-size=64m"
        return Finding("shm", Level.FAILURE, f"{folder} is missing, or this user may not write there", cure)
    status = os.statvfs(folder)
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{folder} has {size(free)} of {size(whole)} free; an arena needs 128 KiB of it, its weights are elsewhere"
    cure = "remove what is not needed there (`shmsync gc` for arenas), or mount it larger: --shm-size, size="
    if free < _MIB:
        return Finding("shm", Level.FAILURE, text, cure)
    if free < 16 * _MIB or (status.f_files and status.f_favail < 64):
        return Finding("shm", Level.WARNING, f"{text}; {status.f_favail} more files fit", cure)
    return Finding("shm", Level.OK, text)


def remove_ipc(root: Path) -> Finding:
    """Does systemd-logind remove this user's files from /dev/shm when the user logs out?"""
    files = [root / "etc/systemd/logind.conf", *sorted((root / "etc/systemd/logind.conf.d").glob("*.conf"))]
    lines = [line.replace(" ", "").lower() for file in files for line in (_text(file) or "").splitlines()]
    chosen = [line.partition("=")[2] for line in lines if line.startswith("removeipc=")]
    runs, off = (root / "run/systemd/users").exists(), chosen and chosen[-1] in ("no", "false", "off", "0")
    if not runs or off or os.getuid() < 1000:  # it spares system users
        return Finding("logout", Level.OK, "no logout removes control segments from /dev/shm")
    cure = (
        "RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger`, for trainers that outlive the session"
    )
    text = (
        "systemd-logind removes this user's control segments when the user logs out (RemoveIPC): no worker can attach"
    )
    return Finding("logout", Level.WARNING, text, cure)


def memory(root: Path) -> Finding:
    """What weights may take: the machine's, and what the enclosing cgroups leave of it."""
    machine = psutil.virtual_memory().available
    free = min([machine, *cgroup_room(root)])
    if free < machine:
        text = f"{size(free)} can be used, less than the {size(machine)} that the machine has left: a cgroup limits it"
        cure = "raise the container's limit (--memory, resources.limits.memory) if weights x slots need more"
        return Finding("memory", Level.WARNING if free < 256 * _MIB else Level.NOTE, text, cure)
    return Finding("memory", Level.OK, f"{size(free)} can be used; no cgroup limits it further")


def memfd(root: Path) -> Finding:
    """Can the weights' memory be made, and sealed?"""
    cure = "use Linux 5.1 or newer; in a container, a seccomp profile that allows memfd_create"
    if _text(root / "proc/sys/vm/memfd_noexec") == "2":
        cure = "sysctl vm.memfd_noexec=1 (2 refuses memfds of programs that do not ask for it)"
    try:
        fd = os.memfd_create("shmsync:doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding("memfd", Level.FAILURE, f"memfd_create is refused: {error.strerror}", cure)
    try:
        os.ftruncate(fd, 4096)
        add_seals(fd, SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE)
    except OSError as error:
        return Finding("memfd", Level.FAILURE, f"a memfd cannot be sealed against writing: {error.strerror}", cure)
    else:
        return Finding("memfd", Level.OK, "memfds can be made and sealed")
    finally:
        os.close(fd)


_OPENS = "import os, sys; print(os.fstat(os.open(sys.argv[1], os.O_RDONLY)).st_ino)"


def opening(root: Path) -> Finding:
    """Can a worker open /proc/<pid>/fd of its trainer? A child of this process tries it."""
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    scoped = "" if scope is None else f" (kernel.yama.ptrace_scope is {scope}, which does not matter for that)"
    fd = os.memfd_create("shmsync:doctor", os.MFD_CLOEXEC)
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"
        program = [sys.executable, "-I", "-S", "-c", _OPENS, path]
        done = subprocess.run(program, capture_output=True, text=True, check=False, cwd="/")
        if done.stdout.strip() == str(os.fstat(fd).st_ino):
            return Finding("workers", Level.OK, f"a worker can open the memory of its trainer through /proc{scoped}")
    finally:
        os.close(fd)
    reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    cure = (
        "run trainer and workers as one user, in one pid namespace, with /proc mounted without hidepid=; no "
        "prctl(PR_SET_DUMPABLE, 0), no set-uid Python, and no AppArmor or SELinux rule that keeps them apart"
    )
    return Finding("workers", Level.FAILURE, f"a worker cannot open {path}: {reason}{scoped}", cure)


def threads(root: Path) -> Finding:
    """Will several processes compute with more threads than there are cores?"""
    cores, each = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    if each.isdigit() or cores == 1:
        return Finding("threads", Level.OK, f"each process computes with {each or cores} threads on {cores} cores")
    cure = "OMP_NUM_THREADS=1, or torch.set_num_threads(1) in each worker; Workers does it"
    text = f"OMP_NUM_THREADS is not set: each process of your own computes with {cores} threads, and all get slower"
    return Finding("threads", Level.NOTE, text, cure)


def cuda(root: Path) -> Finding:
    """GPUs: can arenas lie on them, and can they copy from and to the host's memory by themselves?"""
    if not list((root / "dev").glob("nvidia[0-9]*")) and not (root / "proc/driver/nvidia/version").exists():
        return Finding("cuda", Level.OK, "no NVIDIA device; arenas are CPU memory")
    from ..errors import ShmSyncError
    from ..memory.cuda import device, refused  # asks CUDA by way of torch, which takes seconds to import

    if (why := refused()) is not None:
        cure = "docs/gpu.md has what weights on a GPU need; Publisher(device='cpu') needs none of it"
        return Finding("cuda", Level.NOTE, f"there is an NVIDIA device, but no arena can lie on it: {why}", cure)
    fd = os.memfd_create("shmsync:doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _MIB)
        for mapped in (map_shared, map_readonly):  # as a publisher has a slab, and as a worker has it
            storage = mapped(fd, _MIB)
            device(0).pin(storage, readonly=mapped is map_readonly)
            device(0).unpin(storage)
    except ShmSyncError as error:
        who = "a publisher" if mapped is map_shared else "a worker"
        cure = "nothing fails for it; docs/gpu.md has the figures"
        text = f"between GPUs and the host's memory {who} copies at the speed of pageable memory: {error}"
        return Finding("cuda", Level.NOTE, text, cure)
    finally:
        os.close(fd)
    return Finding("cuda", Level.OK, "arenas can lie on the NVIDIA devices; docs/gpu.md says what was tried")


CHECKS: tuple[Callable[[Path], Finding], ...] = (
    system, shared_memory, remove_ipc, memory, memfd, opening, threads, cuda,
)  # fmt: skip


def examine(root: Path = Path("/")) -> list[Finding]:
    """All findings. A check that the system refuses is a finding too."""
    found = []
    for check in CHECKS:
        try:
            found.append(check(root))
        except (OSError, MemoryError) as error:
            found.append(Finding(check.__name__, Level.WARNING, f"could not be found out: {error}", "try it again"))
    return found


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    found = examine()
    counted = {level: sum(finding.level is level for finding in found) for level in Level}
    bad = counted[Level.FAILURE] + (counted[Level.WARNING] if arguments.strict else 0)
    for finding in found:
        say(f"{finding.level.value.ljust(9)}{finding.check}: {finding.text}")
        if finding.cure:
            say(f"         -> {finding.cure}")
    say()
    say(f"{counted[Level.FAILURE]} failures, {counted[Level.WARNING]} warnings, {counted[Level.NOTE]} notes")
    return int(bad > 0)
