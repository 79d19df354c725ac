"""Real web servers over `shmsync publish --watch`: no request fails or mixes versions, whatever happens to the file.

Clients ask all the time, over connections that they keep. All weights of a file (4 MB) are one number. An answer has
the smallest and the largest of them.
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

import pytest
import torch

from support.processes import PATIENCE, until
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
        app.state.sub, app.state.policy = sub, sub.bind(torch.nn.Linear(1 << 20, 1, bias=False))
        yield


app = FastAPI(lifespan=lifespan)


def answer():
    with torch.no_grad(), app.state.sub.read() as section:
        low, high = (float(each) for each in app.state.policy.weight.aminmax())
    session = section.stamp.session.hex()
    return {"low": low, "high": high, "session": session, "version": section.version, "pid": os.getpid()}


@app.get("/pool")
def in_the_pool():
    return answer()


@app.get("/loop")
async def in_the_loop():
    return answer()
"""


class Client(threading.Thread):
    """Asks all the time. `answers`: the weights of each (session, version); `failed`: what a request failed with."""

    def __init__(self, port, path):
        super().__init__(daemon=True)
        self.answers, self.failed = defaultdict(set), []
        self._address, self._path, self.over = ("127.0.0.1", port), path, False
        self.last = None
        self.start()

    def run(self):
        connection = None
        while not self.over:
            try:
                connection = connection or http.client.HTTPConnection(*self._address, timeout=PATIENCE)
                connection.request("GET", self._path)
                response = connection.getresponse()
                body = response.read()
                assert response.status == 200, body
                found = json.loads(body)
            except Exception as error:
                self.failed.append(repr(error))
                connection = None
                continue
            self.answers[found["session"], found["version"]] |= {found["low"], found["high"]}
            self.last = found


def save(path, value):
    """A new file in the place of the old one, as a careful program writes it."""
    safetensors.save_file({"weight": torch.full((1, 1 << 20), float(value))}, path.with_name("made"))
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
        pids_of_both(port)
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
        for version, found in each.answers.items():
            of_all[version] |= found
    assert [(version, found) for version, found in of_all.items() if len(found) != 1] == []


def pid_of_one(port):
    """Of the worker that answers over a new connection; None: none does yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/pool")
        return json.loads(connection.getresponse().read())["pid"]
    except OSError:
        return None
    finally:
        connection.close()


def pids_of_both(port):
    found = set()
    until(lambda: found.add(pid_of_one(port)) or len(found - {None}) == 2)
    return found - {None}


def all_have(clients, value):
    until(lambda: all(each.last["low"] == value for each in clients))


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


@pytest.mark.full  # a third of a minute; test_publish_file.py has readers without a server
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
    all_have(asking, 30)
    publish().read_until("version 1")
    all_have(asking, 31)
    assert len({session for session, _ in asking[0].answers}) == 2 and len(asking[0].answers) > seen
    assert [each.failed for each in asking] == [[]] * len(asking)
