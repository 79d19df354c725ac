"""The commands that look at arenas, and `import shmsync`, import no torch; a worker imports torch, but no tensordict.

tensordict brings torch._dynamo and sympy, and with them takes as long to import as torch.
"""

from __future__ import annotations

import os
import pickle
import pty
import subprocess
import sys

import pytest
import torch

import shmsync
from shmsync.memory.manifest import ELEMENT_BYTES
from support import choice

HEAVY = {"torch", "tensordict", "numpy", "sympy", "torchrl", "gymnasium", "ray"}
COMMANDS = [
    ["--help"],
    ["--version"],
    ["list"],
    ["list", "-v"],
    ["list", "--json"],
    ["inspect", "NAME"],
    ["inspect", "NAME", "--json"],
    ["top", "--count", "1"],
    ["top", "NAME", "--count", "1"],
    ["doctor"],
    ["doctor", "--json"],
    ["gc"],
    ["gc", "--dry-run"],
]


def imported(*arguments, stdout=subprocess.DEVNULL):
    """The top-level packages that a Python with these arguments imports, as -X importtime lists them."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, cwd="/")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if line not in lines]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.fixture
def arena():
    """The name of an arena with a leaf of each common dtype."""
    weights = {name: torch.zeros(3, dtype=getattr(torch, name)) for name in ("float32", "bfloat16", "int64", "bool")}
    with shmsync.Publisher(weights) as pub:
        yield pub.name


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_imports_no_torch(arena, command):
    found = imported("-m", "shmsync", *(arena if word == "NAME" else word for word in command))
    assert "shmsync" in found
    assert found & HEAVY == set()
    assert "rich" not in found  # no terminal, so nothing is drawn


def test_top_on_a_terminal_draws_without_torch(arena):
    pytest.importorskip("rich", reason="top draws with shmsync[top]")
    ours, theirs = pty.openpty()
    try:
        found = imported("-m", "shmsync", "top", arena, "--count", "1", "--interval", "0.05", stdout=theirs)
        assert arena in os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "rich" in found
    assert found & HEAVY == set()


@pytest.mark.parametrize(
    "program",
    [
        "import shmsync; assert shmsync.Handle('a', b'') and shmsync.errors.ShmSyncError and shmsync.__version__",
        "from shmsync import AckTimeout, Handle, ProcessState, ReadSection",
        "import shmsync; assert {'Publisher', 'Handle', 'RayTransport', 'schemes'} <= set(dir(shmsync))",
        "import shmsync.schemes; assert 'send_together' in dir(shmsync.schemes)",
        f"import pickle; handle = pickle.loads({pickle.dumps(shmsync.Handle('policy', b'1'))!r}); handle.session",
    ],
)
def test_what_needs_no_torch_imports_none(program):
    assert imported("-c", program) & HEAVY == set()


@pytest.mark.parametrize(
    "program",
    [
        "from shmsync import *; Publisher, send_together, DistributedWeightSyncScheme",
        pytest.param("from shmsync import Publisher, Subscriber", marks=pytest.mark.full),
        pytest.param("import shmsync; shmsync.schemes.SharedMemWeightSyncScheme()", marks=pytest.mark.full),
    ],
)
def test_the_other_names_are_imported_when_they_are_used(program):
    assert "torch" in imported("-c", program)


def test_a_name_that_there_is_not_is_an_attribute_error():
    for module in (shmsync, shmsync.schemes):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018
    with pytest.raises(ImportError, match="Nothing"):
        exec("from shmsync import Nothing")


def test_the_sizes_that_are_known_without_torch_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in ELEMENT_BYTES} == ELEMENT_BYTES


def test_a_dtype_that_is_not_common_is_asked_of_torch():
    """Such an arena can be looked at as well, for the price of importing torch."""
    rare = next((each for each in ("float8_e8m0fnu", "bits8", "quint8") if hasattr(torch, each)), None)
    assert rare is not None and rare not in ELEMENT_BYTES
    manifest = shmsync.memory.manifest.Manifest.of({("t",): torch.empty(3, dtype=getattr(torch, rare))})
    again = shmsync.memory.manifest.Manifest.from_json(manifest.to_json(), manifest.slot_bytes)
    assert (again, again.leaves[0].dtype, again.used_bytes) == (manifest, getattr(torch, rare), 3)


WORKER = """
import sys
import torch
from shmsync import Publisher, Subscriber, Workers

def found():
    return sorted({"tensordict", "torch._dynamo", "sympy"} & sys.modules.keys())

def use(sub):
    net, x = sub.bind(torch.nn.Linear(3, 2)), torch.ones(3)
    with torch.no_grad():
        net(x)
        next(sub.versions())
        sub.refresh(), sub.wait_version(1)
        with sub.read() as section:
            y = net(x)
            section.version, section.stamp
        sub.run(lambda: {"y": [net(x)]})
    sub.state_dict(), sub.stats(), sub.verify()
    return net

def work(sub, queue):
    use(sub)
    queue.put(found())
"""
# What is registered with Dynamo and with tensordict when they are imported, after a module was bound and called.
LATER = """
import copy
from shmsync.memory.arena import arena_around
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

with Publisher(torch.nn.Linear(3, 2), checksum=True) as pub, Subscriber(pub.handle) as sub:
    net = use(sub)
    assert found() == [], found()
    compiled = torch.compile(net, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(3)), net(torch.ones(3))) and len(graphs) == 1
    assert Subscriber.run._torchdynamo_disable and "tensordict" not in found()
    assert sub.run(lambda: {"weight": net.weight.data})["weight"].data_ptr() != net.weight.data_ptr()
    from tensordict import TensorDict
    for weights in (TensorDict({"weight": net.weight.data}), sub.weights):
        assert arena_around(weights["weight"], weights["weight"].untyped_storage().data_ptr())
        private = copy.deepcopy(weights)["weight"]
        assert torch.equal(private, net.weight) and private.untyped_storage().nbytes() == 24
    shown = sub.run(lambda: TensorDict({"weight": net.weight.data}))["weight"]
    assert shown.data_ptr() != net.weight.data_ptr()
"""


def run_program(path, text):
    path.write_text(text)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checked():
    with shmsync.Publisher(torch.nn.Linear(3, 2), checksum=True) as pub:
        yield pub


def test_a_worker_that_calls_its_module_imports_no_tensordict(checked, tmp_path):
    handle = f"import pickle; handle = pickle.loads({pickle.dumps(checked.handle)!r})"
    use = "with Subscriber(handle) as sub: use(sub)\nassert found() == [], found()\n"
    run_program(tmp_path / "worker.py", f"{WORKER}{handle}\n{use}")


@pytest.mark.parametrize("method", choice.first(["forkserver", "spawn"]))
def test_neither_do_workers_nor_their_trainer(method, tmp_path):
    run_program(
        tmp_path / "trainer.py",
        f"""{WORKER}
import multiprocessing
if __name__ == "__main__":
    net = torch.nn.Linear(3, 2)
    queue = multiprocessing.get_context("{method}").SimpleQueue()
    with Publisher(net, checksum=True) as pub, Workers(pub, work, 2, args=[queue], start_method="{method}"):
        pub.publish(wait=True), pub.publish(net.state_dict()), pub.state_dict()
        assert (queue.get(), queue.get(), found()) == ([], [], [])
""",
    )


@pytest.mark.full  # the tests around it look at one process each
def test_a_fork_server_imports_tensordict_once_if_the_trainer_has_it(tmp_path):
    run_program(
        tmp_path / "trainer.py",
        f"""{WORKER}
import multiprocessing
def first(sub, queue):
    queue.put(found())

if __name__ == "__main__":
    import tensordict
    queue = multiprocessing.get_context("forkserver").SimpleQueue()
    with Publisher(torch.nn.Linear(3, 2)) as pub, Workers(pub, first, 1, args=[queue]):
        assert "tensordict" in queue.get()
""",
    )


@pytest.mark.full  # a program of its own
def test_what_dynamo_and_tensordict_must_know_they_learn_when_they_are_imported(tmp_path):
    run_program(tmp_path / "later.py", WORKER + LATER)


WITHOUT = "import sys; sys.modules[sys.argv[1]] = None; from shmsync import cli; sys.exit(cli.main(sys.argv[2:]))"


def run_without(package, *command):
    """The command where this package is not installed, on a terminal: (status, lines on stderr)."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, package, *command],
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd="/",
            env=os.environ | {"TERM": "xterm-256color"},
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [("rich", ["top"], "top"), ("rich", ["demo"], "demo")],
    ids=["top", "demo"],
)
def test_a_missing_package_is_one_line_that_names_its_extra(package, command, extra):
    status, (line,) = run_without(package, *command)
    assert status == 2
    assert f"needs {package}" in line
    assert f": pip install 'shmsync[{extra}]'" in line


def test_the_other_commands_need_no_rich(arena):
    for command in (["list"], ["inspect", arena], ["gc", "--dry-run"], ["doctor"]):
        assert run_without("rich", *command) == (0, [])
