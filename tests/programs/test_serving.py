"""Real web servers over `shmsync publish --watch`: no request fails or mixes versions, whatever happens to the file.

Clients ask all the time, over connections that they keep. All weights of a file are one number, and the answer is four
times that number; that of a mixture of two files is not.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict

import psutil
import pytest
import torch

from support.processes import alive, until
from support.programs.programs import Example

safetensors = pytest.importorskip("safetensors.torch", reason="these files need shmsync[safetensors]")
pytest.importorskip("uvicorn", reason="the servers need shmsync[guides]")
pytest.importorskip("fastapi", reason="the servers need shmsync[guides]")

SERVER = """
import os
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI

import shmsync


@asynccontextmanager
async def lifespan(app):
    torch.set_num_threads(1)
    with shmsync.Subscriber(os.environ["ARENA"], timeout=300, follow=True) as sub:
        app.state.sub, app.state.policy = sub, sub.bind(torch.nn.Linear(4, 1, bias=False))
        yield


app = FastAPI(lifespan=lifespan)


def answer():
    with torch.no_grad(), app.state.sub.read() as section:
        action = app.state.policy(torch.ones(1, 4)).item()
    return {"action": action, "session": section.stamp.session.hex(), "version": section.version, "pid": os.getpid()}


@app.get("/pool")
def in_the_pool():
    return answer()


@app.get("/loop")
async def in_the_loop():
    return answer()
"""


class Client(threading.Thread):
    """Asks all the time. `answers`: of each (session, version) the actions; `failed`: what a request failed with."""

    def __init__(self, port, path):
        super().__init__(daemon=True)
        self.answers, self.failed, self.pids = defaultdict(set), [], set()
        self._address, self._path, self.over = ("127.0.0.1", port), path, False
        self.last = None
        self.start()

    def run(self):
        connection = None
        while not self.over:
            try:
                connection = connection or http.client.HTTPConnection(*self._address, timeout=60)
                connection.request("GET", self._path)
                response = connection.getresponse()
                body = response.read()
                assert response.status == 200, body
                found = json.loads(body)
            except Exception as error:
                self.failed.append(repr(error))
                connection = None
                continue
            self.answers[found["session"], found["version"]].add(found["action"])
            self.pids.add(found["pid"])
            self.last = found


def save(path, value):
    """A new file in the place of the old one, as a careful program writes it."""
    safetensors.save_file({"weight": torch.full((1, 4), float(value))}, path.with_name("made"))
    os.replace(path.with_name("made"), path)


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """serving() -> (the file, publish(), the server process, its port): 2 workers of uvicorn over the file's arena."""
    name = f"serving-{secrets.token_hex(4)}"
    monkeypatch.setenv("ARENA", name)
    (tmp_path / "server.py").write_text(SERVER)
    path = tmp_path / "policy.safetensors"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def publish():
        options = ("--watch", "--interval", "0.05", "--slots", "3")
        started.append(Example(tmp_path, "-m", "shmsync", "publish", name, str(path), *options))
        return started[-1]

    command = [sys.executable, "-m", "uvicorn", "server:app", "--workers", "2", f"--port={port}", "--log-level=error"]
    server = subprocess.Popen(command, cwd=tmp_path)
    yield path, publish, server, port
    server.terminate()
    server.wait(60)
    for each in started:
        each.kill()
        each.process.stdout.close()


@pytest.fixture
def clients(serving):
    """start() -> clients of both ways to answer, once both workers answer; all are right, always."""
    *_, port = serving
    made = []

    def start():
        until(lambda: answers(port))
        made.extend(Client(port, path) for path in ("/pool", "/loop") * 2)
        until(lambda: all(each.last for each in made))
        return made

    yield start
    for each in made:
        each.over = True
    for each in made:
        each.join(60)
    of_all = defaultdict(set)
    for each in made:
        for version, actions in each.answers.items():
            of_all[version] |= actions
    assert [(version, actions) for version, actions in of_all.items() if len(actions) != 1] == []
    assert {action % 4 for actions in of_all.values() for action in actions} <= {0.0}


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def all_have(clients, value):
    until(lambda: all(each.last["action"] == 4 * value for each in clients))


def write_until_the_disk_is_full(path):
    """Written in place by a program that may write 60 bytes."""
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))\n"
        "with open(sys.argv[1], 'wb', buffering=0) as file:\n"
        "    while file.write(b'x' * 50): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert "File too large" in done.stderr


def test_no_request_fails_or_mixes_versions_whatever_happens_to_the_file(serving, clients):
    path, publish, _, _ = serving
    save(path, 1)
    command = publish()
    command.read_until("version 1")
    asking = clients()
    for value in range(2, 30):
        save(path, value)
        command.read_until(f"^version {value}")
    all_have(asking, 29)

    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 8])  # truncated
    assert "version 29 stays" in command.read_until("stays")
    write_until_the_disk_is_full(path)
    assert "version 29 stays" in command.read_until("stays")
    all_have(asking, 29)
    save(path, 30)
    command.read_until("^version 30")
    all_have(asking, 30)

    command.process.send_signal(signal.SIGKILL)  # the publisher
    command.process.wait()
    seen = len(asking[0].answers)
    save(path, 31)
    until(lambda: all(each.last["action"] == 120 for each in asking))
    publish().read_until("version 1")
    all_have(asking, 31)
    assert len({session for session, _ in asking[0].answers}) == 2 and len(asking[0].answers) > seen
    assert [each.failed for each in asking] == [[]] * len(asking)


def test_a_killed_server_worker_is_replaced_and_costs_the_requests_that_it_had(serving, clients):
    path, publish, server, _ = serving
    save(path, 1)
    command = publish()
    asking = clients()
    victim = asking[0].last["pid"]
    os.kill(victim, signal.SIGKILL)
    until(lambda: not alive(victim))
    for value in range(2, 6):
        save(path, value)
        command.read_until(f"^version {value}")
    all_have(asking, 5)
    until(lambda: len([each for each in psutil.Process(server.pid).children() if each.pid != victim]) >= 2)
    assert all(len(each.failed) <= 1 for each in asking)  # the one that was under way
