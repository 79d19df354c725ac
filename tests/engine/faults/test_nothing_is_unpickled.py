"""A process that attaches by name, or inspects, unpickles nothing, whatever lies there. A hook of Python checks it."""

import json
import os
import pickle
import subprocess
import sys
from contextlib import ExitStack

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
bomb, entries, paths = bytes.fromhex(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
found = []
sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)
for name, path in paths.items():
    with open(path, "rb") as file:
        content = file.read()
    for what, entry in entries.items():
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(fd, content, 0)
        os.close(fd)
        try:
            exec(entry)
        except (shmsync.ShmSyncError, SystemExit):
            pass
        if found:
            sys.exit(f"{what} of {name} unpickled {found}")
try:
    pickle.loads(bomb.replace(b"posix", b"posiy"))
except ModuleNotFoundError:
    pass
sys.exit(0 if found else "the hook sees nothing")
"""


# Where a pickle lies in an arena: among its weights it does already.
PLACES = {
    "weights": lambda name, bomb: None,
    "manifest": forge_manifest,
    "segment": lambda name, bomb: segment_path(name).write_bytes(bomb * (200_000 // len(bomb))),
}


@pytest.fixture
def bomb(tmp_path):
    path = tmp_path / "went off"
    yield pickle.dumps(Bomb(str(path)))
    assert not path.exists()


def test_no_entry_unpickles(name, bomb):
    content = torch.frombuffer(bytearray(bomb + bytes(64)), dtype=torch.uint8)
    names = [f"{name}.{place}" for place in PLACES]
    with ExitStack() as arenas:
        for each in names:
            arenas.enter_context(shmsync.Publisher({"t": content, "u": content.clone()}, name=each))
        whole = {each: segment_path(each).read_bytes() for each in names}
        for each, damage in zip(names, PLACES.values(), strict=True):
            damage(each, bomb)
        paths = {each: str(segment_path(each)) for each in names}
        try:
            done = subprocess.run(
                [sys.executable, "-c", CHILD, bomb.hex(), json.dumps(ENTRIES), json.dumps(paths)],
                capture_output=True, text=True, check=False, cwd="/", timeout=240,
            )  # fmt: skip
        finally:
            for each, content in whole.items():
                if segment_path(each).exists():
                    segment_path(each).write_bytes(content)
    assert done.returncode == 0, done.stderr
