"""Web servers whose model changes every 50 ms: real HTTP to workers of uvicorn, which get new weights in three ways.

shmsync binds the arena of a publisher; the others load a file when they get a signal, or take a private copy from a
pipe. Turns alternate: each way without new versions, then with them. Each answer is checked: all of its weights must be
those of the version that it names.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil
import torch
from common.clock import Clock
from common.measure import CONTEXT, percentiles, rate
from common.row import OK, Row, times
from safetensors.torch import save_file

import shmsync
from serving.app import MODELS, WAYS

EVERY = 0.05  # seconds between two versions
TURN = 1.0  # seconds of requests
NAMES = {"file": "a file, loaded on a signal", "copy": "a private copy, over a pipe"}
START = 60.0  # seconds that a server may take to answer
START_OF_ALL = 10.0  # that the servers of all ways take, about
State = dict[str, torch.Tensor]


def value(version: int) -> float:
    """Of each weight of a version."""
    return 2.0**-20 * (1 + version % 2)


class Contestant:
    """The servers of one way, and how a trainer gives them a version."""

    def __init__(self, way: str, model: str, count: int, states: list[State], stack: ExitStack) -> None:
        self.way, self.count, self.states, self.version = way, count, states, 0
        self.latencies: dict[bool, list[float]] = {False: [], True: []}
        self.rates: dict[bool, list[float]] = {False: [], True: []}
        self.versions: list[float] = []
        self.wrong: Counter[str] = Counter()
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-serving-"))
        self.source = os.path.join(folder, "source")
        self.give: Callable[[State], None] = getattr(self, f"_by_{way}")
        self.pipes: list[Connection] = []
        if way == "shmsync":
            self.source = f"bench-serving-{os.getpid()}-{model}-{count}"
            self.pub = stack.enter_context(shmsync.Publisher(states[1], name=self.source, slots=2, timeout=START))
            self.version = 1
        elif way == "file":
            self.new_version()
        else:
            listener = stack.enter_context(Listener(self.source))
        self.port = free_port()
        command = [sys.executable, "-m", "uvicorn", "serving.app:app", "--workers", str(count), f"--port={self.port}"]
        environment = os.environ | {"WAY": way, "MODEL": model, "SOURCE": self.source, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [*command, "--log-level", "error", "--no-access-log", "--app-dir", str(Path(__file__).parents[1])],
            env=environment,
        )
        stack.callback(stop, server)
        if way == "copy":
            for _ in range(count):
                self.pipes.append(listener.accept())
            self.new_version()
        self.pids = sorted({pid for pid, _ in connections(self.port, count)})

    def new_version(self) -> None:
        self.version += 1
        self.give(self.states[self.version % 2])

    def _by_shmsync(self, state: State) -> None:
        self.version = self.pub.publish(state)

    def _by_file(self, state: State) -> None:
        save_file(state | {"version": torch.tensor([float(self.version)])}, self.source + ".made")
        os.replace(self.source + ".made", self.source)
        for pid in getattr(self, "pids", ()):
            os.kill(pid, signal.SIGUSR1)

    def _by_copy(self, state: State) -> None:
        state = state | {"version": torch.tensor([float(self.version)])}
        for pipe in self.pipes:
            pipe.send((list(state), [tensor.shape for tensor in state.values()]))
            for tensor in state.values():
                pipe.send_bytes(tensor.numpy().reshape(-1).view("uint8"))

    def turn(self, changing: bool) -> None:
        """A turn of requests, with new versions or without."""
        ours, theirs = CONTEXT.Pipe()
        client = CONTEXT.Process(target=request, args=(theirs, self.port, self.count, TURN), daemon=True)
        client.start()
        ours.recv()
        began, first, due = time.perf_counter(), self.version, time.perf_counter()
        while not ours.poll(max(0.0, due - time.perf_counter())):
            if changing:
                self.new_version()
            due = max(time.perf_counter(), due + EVERY)
        found, wrong = ours.recv()
        client.join()
        self.latencies[changing] += found
        self.rates[changing].append(len(found) / TURN)
        self.wrong.update(wrong)
        if changing:
            self.versions.append((self.version - first) / (time.perf_counter() - began))

    def memory(self) -> float:
        """PSS of the servers, in MB."""
        return sum(psutil.Process(pid).memory_full_info().pss for pid in self.pids) / 1e6


def stop(server: subprocess.Popen[bytes]) -> None:
    """With its workers, soon: a section whose time is over is killed, and would leave its files."""
    workers = psutil.Process(server.pid).children()
    server.terminate()
    try:
        server.wait(1)
    except subprocess.TimeoutExpired:
        for each in workers:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(connection: http.client.HTTPConnection) -> dict[str, Any]:
    connection.request("GET", "/")
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # else head and body of an answer take 40 ms
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise http.client.HTTPException(f"status {answer.status}")
    return json.loads(body)


def connections(port: int, count: int) -> list[tuple[int, http.client.HTTPConnection]]:
    """One kept connection to each server, with its pid."""
    found: dict[int, http.client.HTTPConnection] = {}
    end = time.monotonic() + START
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} servers answer"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            pid = ask(connection)["pid"]
        except OSError:
            time.sleep(0.05)
            continue
        if pid in found:
            connection.close()
        found.setdefault(pid, connection)
    return list(found.items())


def request(pipe: Connection, port: int, count: int, seconds: float) -> None:
    """The client, a process: a thread for each server, which asks again as soon as it has an answer."""
    latencies: list[float] = []
    wrong: Counter[str] = Counter()
    kept = [connection for _, connection in connections(port, count)]
    pipe.send(None)
    end = time.perf_counter() + seconds

    def run(connection: http.client.HTTPConnection) -> None:
        while (began := time.perf_counter()) < end:
            try:
                answer = ask(connection)
            except (OSError, http.client.HTTPException):
                wrong["failed"] += 1
                connection.close()
                continue
            latencies.append(time.perf_counter() - began)
            if not answer["first"] == answer["last"] == value(answer["version"]):
                wrong["mixed"] += 1

    threads = [threading.Thread(target=run, args=[connection]) for connection in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((latencies, wrong))


@contextmanager
def contest(model: str, count: int) -> Iterator[list[Contestant]]:
    module = MODELS[model][0]()
    made = module.state_dict()
    states = [{name: torch.full_like(p, value(version)) for name, p in made.items()} for version in (0, 1)]
    with ExitStack() as stack:
        yield [Contestant(way, model, count, states, stack) for way in WAYS]


def rows(clock: Clock) -> Iterator[Row]:
    cells = [(model, count) for model in MODELS for count in (2, 4)]
    for number, (model, count) in enumerate(cells):
        if number and clock.left < START_OF_ALL:
            yield clock.left_out(f"{model}, {count} servers")
            continue
        seconds = clock.left / (len(cells) - number)
        end = time.monotonic() + seconds
        with contest(model, count) as contestants:
            ours, others = contestants[0], contestants[1:]
            turns = 0
            while turns < 2 or (time.monotonic() < end - 2 * len(contestants) * TURN and turns < 20):
                for each in contestants:
                    each.turn(False)
                    each.turn(True)
                turns += 1
            memory = {each.way: each.memory() for each in contestants}
        size = sum(p.nbytes for p in ours.states[0].values()) / 1e6
        setting = f"{size:.1f} MB, {count} servers" if size < 1 else f"{size:.0f} MB, {count} servers"
        checks = {each.way: verdict(each.wrong, sum(map(len, each.latencies.values()))) for each in contestants}
        spent = times(percentiles(ours.latencies[True]))
        still = times(percentiles(ours.latencies[False]))
        what = f"a request while weights change, {setting}"
        yield Row(what, spent, "no new weights", still, "p99 1.1 x", checks["shmsync"])
        for each in others:
            check = checks["shmsync"] if checks[each.way] == OK else f"{each.way}: {checks[each.way]}"
            name, pace = NAMES[each.way], (rate(ours.versions), rate(each.versions))
            yield Row(what, spent, name, times(percentiles(each.latencies[True])), "1 x", check)
            found = rate(ours.rates[True]), rate(each.rates[True])
            yield Row(f"requests while weights change, {setting}", found[0], name, found[1], ">= 1 x", check, "/s")
            yield Row(f"versions given, 20 wanted, {setting}", pace[0], name, pace[1], ">= 1 x", check, "/s")
            held = memory["shmsync"], memory[each.way]
            yield Row(f"memory (PSS), {setting}", (held[0],) * 2, name, (held[1],) * 2, "1 x", check, "MB")


def verdict(wrong: Counter[str], answers: int) -> str:
    if not answers:
        return "WRONG: no answers"
    return OK if not wrong else f"WRONG: {wrong['failed']} failed and {wrong['mixed']} mixed of {answers}"
