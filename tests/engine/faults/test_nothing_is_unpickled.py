"""A process that attaches by name, or inspects, unpickles nothing, whatever lies there. A hook of Python checks it."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

import shmsync
from support.faults.forged import forge_manifest
from support.processes import segment_path


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


ENTRIES = {
    "attach": "shmsync.Subscriber(name, timeout=0.2).close()",
    "attach by another word": "shmsync.attach(name, timeout=0.2).close()",
    "read": "sub = shmsync.Subscriber(name, timeout=0.2); sub.refresh(); sub.snapshot(); sub.read().__enter__()",
    "follow": "shmsync.Subscriber(name, timeout=0.2, follow=True).close()",
    "create": "shmsync.Publisher({'t': torch.ones(1)}, name=name).close()",
    "list": "cli.main(['list'])",
    "list all": "cli.main(['list', '-v'])",
    "list for programs": "cli.main(['list', '--json'])",
    "inspect": "cli.main(['inspect', name, '--interval', '0'])",
    "inspect for programs": "cli.main(['inspect', name, '--json', '--interval', '0'])",
    "export": "cli.main(['export', name, '/dev/null'])",
    "doctor": "cli.main(['doctor'])",
    "gc": "cli.main(['gc'])",
    "what gc would do": "cli.main(['gc', '--dry-run'])",
    "sweep": "leftovers.sweep_some(float('inf'))",
}

CHILD = """
import json, os, pickle, sys
import torch, shmsync
from shmsync import cli
from shmsync.memory.control import leftovers
name, bomb, path, entries = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
found, refused = [], 0
sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)
with open(path, "rb") as file:
    content = file.read()
for what, entry in entries.items():
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(fd, content, 0)
    os.close(fd)
    try:
        exec(entry)
    except (shmsync.ShmSyncError, SystemExit) as error:
        refused += 1
    if found:
        sys.exit(f"{what} unpickled {found}")
try:
    pickle.loads(bomb.replace(b"posix", b"posiy"))
except ModuleNotFoundError:
    pass
sys.exit(0 if found else "the hook sees nothing")
"""


def as_weights(name, bomb):
    pass  # they are there already


def as_manifest(name, bomb):
    forge_manifest(name, bomb)


def as_whole_segment(name, bomb):
    segment_path(name).write_bytes(bomb * (200_000 // len(bomb)))


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    path = tmp_path_factory.mktemp("bomb") / "went off"
    yield pickle.dumps(Bomb(str(path)))
    assert not path.exists()


@pytest.mark.parametrize("where", [as_weights, as_manifest, as_whole_segment], ids=lambda each: each.__name__)
def test_no_entry_unpickles(name, where, bomb):
    content = torch.frombuffer(bytearray(bomb + bytes(64)), dtype=torch.uint8)
    with shmsync.Publisher({"t": content, "u": content.clone()}, name=name):
        path = segment_path(name)
        whole = path.read_bytes()
        where(name, bomb)
        try:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, name, bomb.hex(), str(path), json.dumps(ENTRIES)],
                capture_output=True, text=True, check=False, cwd="/", timeout=240,
            )  # fmt: skip
        finally:
            if path.exists():
                path.write_bytes(whole)
    assert done.returncode == 0, done.stderr
