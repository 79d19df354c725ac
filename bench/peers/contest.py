"""The peers in turns: every size, then the SIGKILL of a reader. Each has a trainer process and its own environment.

All of them at once would need some 15 GB, so they come in heats, each beside shmsync's publish() with one slot. The
peers of a heat take turns, and a slow moment of the machine hits all. A peer that fails or hangs is killed with the
processes that it started, and takes no further part.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
from common.environment import environment, installed
from common.row import MISSING
from common.trainer import Trainer

from peers.session import FILES

HOMES = Path(sys.prefix, "peers")  # of packages that would not fit beside others, a folder for each
OURS = "shmsync, publish(), slots=1"
TURN = 0.2  # seconds
FEWEST = 3  # turns
HEAT = 5  # peers, beside OURS
HUNG = "hung"
START = 120.0  # seconds that a trainer may take to start, or a turn to end


class Peer(NamedTuple):
    kind: str  # module:class
    package: str = ""  # without which it takes no part
    home: str = ""  # the folder of HOMES where `make bench BENCH=peers` puts it
    variables: tuple[tuple[str, str], ...] = ()


PEERS = {
    OURS: Peer("peers.ours:Publish"),
    "shmsync, publish(), slots=3": Peer("peers.ours:PublishThreeSlots"),
    "shmsync, update(), slots=1": Peer("peers.ours:Update"),
    "shared module without lock or copy (unsafe)": Peer("peers.shared:Unlocked"),
    "share_memory(), a lock and a copy": Peer("peers.shared:Locked"),
    "Sample Factory, ParameterClientAsync": Peer(
        "peers.parameter_client:Client", "sample_factory", "sample-factory"
    ),
    "mp.Queue of tensors": Peer("peers.queues:Tensors"),
    "mp.Queue of NumPy arrays": Peer("peers.queues:Arrays", "numpy"),
    "safetensors in /dev/shm": Peer("peers.files:File", "safetensors"),
    "iceoryx2, a copy": Peer("peers.iceoryx:Copies", "iceoryx2", "iceoryx2"),
    "iceoryx2, views": Peer("peers.iceoryx:Views", "iceoryx2", "iceoryx2"),
    "TorchRL, SharedMemWeightSyncScheme": Peer("peers.torchrl_scheme:Scheme", "torchrl"),
    "Ray": Peer("peers.ray_store:Store", "ray"),
    "Ray, zero-copy tensors": Peer(
        "peers.ray_store:Store", "ray", "", (("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1"),)
    ),
}  # fmt: skip
SIMPLE = [name for name, peer in PEERS.items() if not peer.package]


def absence(name: str) -> str:
    """Why a peer takes no part, and how to install it; "" if it does."""
    peer = PEERS[name]
    if not peer.package or installed(peer.package) or Path(HOMES, peer.home, peer.package).is_dir():
        return ""
    how = "`make bench BENCH=peers` does" if peer.home else f"pip install -c constraints.txt {peer.package}"
    return f"{MISSING}: {peer.package} ({how})"


class Program:
    """A trainer as a program: what common.trainer.Trainer uses of a Process."""

    def __init__(self, target: Peer, args: tuple[Any, ...]) -> None:
        self.peer, (self.output, self.pipe) = target, args

    def start(self) -> None:
        variables = os.environ | dict(self.peer.variables)
        if self.peer.home:
            variables["PYTHONPATH"] += os.pathsep + str(HOMES / self.peer.home)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peers.trainer", self.peer.kind, str(self.pipe.fileno())],
            pass_fds=[self.pipe.fileno()], env=variables, cwd=os.environ["TMPDIR"], start_new_session=True,
            stdout=self.output, stderr=self.output,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, patience: float | None = None) -> None:
        """What it has started may end after it, but no later."""
        below = _below(self.pid)
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return
        _, left = psutil.wait_procs(below, timeout=5)
        _kill(left)

    def kill(self) -> None:
        """It and all below it; resource trackers end last, and remove what the others have left."""
        below = _below(self.pid)
        self._process.kill()
        trackers = [each for each in below if _is_tracker(each)]
        _kill([each for each in below if each not in trackers])
        _, left = psutil.wait_procs(trackers, timeout=2)
        _kill(left)


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _kill(processes: list[psutil.Process]) -> None:
    for each in processes:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(processes, timeout=5)


class Contestant:
    """A peer, seen from the contest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # as long as this lives
        context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Program)
        self.trainer = Trainer(context, PEERS[name], self.output)
        self.trouble = ""
        self.ask()

    def ask(self, *command: Any, patience: float = START) -> Any:
        """None if it fails or has failed. Without a command: until it has started."""
        if self.trouble:
            return None
        try:
            if command:
                self.trainer.send(command)
            return self.trainer.answer(patience)
        except TimeoutError:
            self.trouble = HUNG
        except (EOFError, OSError, RuntimeError) as error:
            self.output.seek(0)
            print(self.name, self.output.read()[-3000:], error, sep="\n", file=sys.stderr, flush=True)
            self.trouble = (str(error).strip() or type(error).__name__).splitlines()[-1][:200]
        self.trainer.stop(0.0)
        return None

    def stop(self) -> None:
        self.trainer.stop(0.0 if self.trouble else 30.0)
        for path in Path("/dev/shm").glob(FILES.format(pid=self.trainer.pid) + "*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def contestants(names: list[str]) -> Iterator[list[Contestant]]:
    with environment():
        found: list[Contestant] = []
        try:
            for name in names:
                found.append(Contestant(name))
            yield found
        finally:
            for each in found:
                each.stop()
            _kill(_below(os.getpid()))  # what a peer that failed has left


class Cell(NamedTuple):
    """What a peer did with one size and one number of workers; seconds, and MB."""

    peer: str
    size: str
    workers: int
    trouble: str = ""
    p50: float = 0.0
    p90: float = 0.0
    beside: float = 0.0  # the p50 of OURS in the same heat, if it did not fail
    processor: float = 0.0  # of one round
    memory: float = 0.0  # PSS of all workers
    descriptors: float = 0.0  # of one worker
    start: float = 0.0
    rounds: float = 0.0

    @property
    def ratio(self) -> float:
        """Above 1 the peer takes longer."""
        return self.p50 / self.beside


class Death(NamedTuple):
    """The publication after the SIGKILL of a worker that was reading."""

    peer: str
    trouble: str = ""
    seconds: float | None = None  # until it returned
    raised: str = ""
    others: str = ""  # have it, or why not


def heats(names: list[str]) -> list[list[str]]:
    others = [name for name in names if name != OURS]
    return [[OURS, *others[begin : begin + HEAT]] for begin in range(0, max(1, len(others)), HEAT)]


def cell(peers: list[Contestant], size: str, workers: int, seconds: float) -> list[Cell]:
    """The rounds of a heat, in turns; which peer begins changes with each."""
    starts = {each.name: each.ask("open", size, workers) for each in peers}
    rounds: dict[str, list[float]] = {each.name: [] for each in peers}
    spent = dict.fromkeys(rounds, 0.0)
    end, turns, order = time.monotonic() + seconds, 0, list(peers)
    while turns < FEWEST or time.monotonic() < end:
        for each in order:
            if (turn := each.ask("turn", min(TURN, seconds / FEWEST))) is not None:
                rounds[each.name] += turn[0]
                spent[each.name] += turn[1]
        order.append(order.pop(0))
        turns += 1
    memories = {each.name: each.ask("memory") for each in peers}
    for each in peers:
        each.ask("close")
    found = []
    for each in peers:
        if each.trouble:
            found.append(Cell(each.name, size, workers, each.trouble))
            continue
        took = sorted(rounds[each.name])
        count, ours = len(took), rounds[OURS]
        p50, beside = median(took), median(ours) if ours else 0.0
        figures = spent[each.name] / count, *memories[each.name], starts[each.name], count
        found.append(Cell(each.name, size, workers, "", p50, took[int(0.9 * count)], beside, *figures))
    return found


def death(peer: Contestant, size: str, workers: int, patience: float) -> Death:
    """Afterwards the peer is ended."""
    with tempfile.TemporaryDirectory() as folder:
        peer.ask("open", size, workers, folder)
        peer.ask("kill", folder)
        found = peer.ask("publish_again", patience=patience)
    if peer.trouble == HUNG:
        return Death(peer.name, others=f"still blocked after {patience:.0f} s, when the benchmark ended it")
    if peer.trouble:
        return Death(peer.name, peer.trouble)
    peer.stop()
    return Death(peer.name, "", *found)
