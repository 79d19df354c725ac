"""The shape of the project itself: layers, exports, and that the installed package is what is tested."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import shmsync

PACKAGE = Path(shmsync.__file__).parent

# DESIGN's layers, lowest first; a module may import from lower layers only. Helpers stand where they are used.
LAYERS = [
    {"errors"},
    {"_native"},
    {"_process", "_memory", "_arguments"},
    {"_slab", "_segment"},
    {"manifest"},
    {"_weights", "stats"},
    {"arena", "_rows"},
    {"_transfer", "_acks", "_attach", "_guard"},
    {"_adopt", "binding", "_write_side"},
    {"_update", "_read_path"},
    {"publisher", "subscriber"},
    {"_joint", "strategy"},
    # schemes: what goes over a pipe; how it is waited for; what the API is made of; the schemes
    {"schemes._wire", "schemes._peer", "schemes._context"},
    {"schemes._channel"},
    {"schemes._answers", "schemes._inbox"},
    {"schemes._exchange", "schemes._sender", "schemes._receiver"},
    {"schemes._base", "schemes._pipe_sender", "schemes._pipe_receiver", "schemes._transport", "schemes._subscriptions"},
    {"schemes._arenas", "schemes._mp", "schemes._none", "schemes._route"},
    {"schemes._shared_transport", "schemes._together"},
    {"schemes._shared"},
    # schemes for several machines: what travels; how it is waited for; relays; the kinds of transports
    {"schemes.remote._place", "schemes.remote._parcel"},
    {"schemes.remote._calls", "schemes.remote._relay", "schemes.remote._receiver"},
    {"schemes.remote._fan_out", "schemes.remote._transport"},
    {"schemes.remote._sender", "schemes.remote._clerk"},
    {
        "schemes.remote._ray_calls",
        "schemes.remote._lifeline",
        "schemes.remote._mailbox",
        "schemes.remote._transfers",
    },
    {"schemes.remote._mail_calls", "schemes.remote._mail_inbox", "schemes.remote._ray", "schemes.remote._rpc"},
    {"schemes.remote._distributed", "schemes.remote._ray_module", "schemes.remote._updaters"},
    {"schemes.remote._distributed_scheme"},
    {"schemes.remote.__init__"},
    {"schemes.__init__"},
    {"collectors._spaces", "collectors._buffers"},
    {"collectors._rollout", "collectors._checks"},
    {"collectors._worker"},
    {"collectors._fleet"},
    {"collectors._collector"},
    {"collectors.__init__"},
    {"__init__", "integrations.__init__"},
    # inside TorchRL: what needs nothing of it first
    {
        "integrations.torchrl._clock",
        "integrations.torchrl._extra",
        "integrations.torchrl._lines",
        "integrations.torchrl._pickling",
    },
    {"integrations.torchrl._listener", "integrations.torchrl._safe_point", "integrations.torchrl._groups"},
    {"integrations.torchrl._receiver", "integrations.torchrl._sender", "integrations.torchrl._sources"},
    {"integrations.torchrl._scheme"},
    {"integrations.torchrl.__init__"},
    {"cli"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}


def imports_of(path: Path) -> set[str]:
    """Modules of this package that are imported at run time (not under TYPE_CHECKING), by their path below it."""
    found = set()
    tree = ast.parse(path.read_text())
    folder = path.relative_to(PACKAGE).parts[:-1]
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing_only:
            base = folder[: len(folder) + 1 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                module = ".".join([*base, *name.split(".")])
                found.add("__init__" if name == "__version__" else module)
    packages = {"schemes", "schemes.remote", "collectors", "integrations", "integrations.torchrl"}
    return {f"{name}.__init__" if name in packages else name for name in found if not name.startswith("examples")}


def test_imports_point_down():
    folders = (".", "schemes", "schemes/remote", "collectors", "integrations", "integrations/torchrl")
    paths = [path for folder in folders for path in (PACKAGE / folder).glob("*.py")]
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): imports_of(path) for path in paths}
    assert set(modules) | {"_native"} == set(LEVEL), "a new module needs a layer"
    for module, imported in modules.items():
        for other in imported:
            assert LEVEL[other] < LEVEL[module], f"{module} imports {other}, which is not below it"


def test_every_export_exists_and_errors_form_one_tree():
    for name in shmsync.__all__:
        assert getattr(shmsync, name).__module__.startswith("shmsync")
    classes = [value for value in vars(shmsync.errors).values() if isinstance(value, type)]
    errors = [value for value in classes if issubclass(value, Exception)]
    assert len(errors) == 17
    for error in errors:
        assert issubclass(error, shmsync.ShmSyncError)
        assert error.__name__ in shmsync.__all__
    for name in ("WriterBusy", "ReaderStalled", "PublishTimeout", "AckTimeout"):
        assert issubclass(getattr(shmsync, name), TimeoutError)


def test_the_installed_package_is_tested_and_typed():
    assert "site-packages" in str(PACKAGE)
    assert (PACKAGE / "py.typed").exists()
    assert "class Reader" in (PACKAGE / "_native.pyi").read_text()


NATIVE = Path(__file__).parents[2] / "native"
MARKER = re.compile(r"SYNC ((?:[a-z]+(?:\.[a-z]+)?)(?:, [a-z]+\.[a-z]+)*)\b")
# No litmus test of their own: `ready` has the shape of publication.c11; the model goes through the others.
UNTESTED = {"ack", "ready", "row.free", "state", "worker"}


def markers(files):
    found = {}
    for file in files:
        for line in file.read_text().splitlines():
            for match in MARKER.finditer(line):
                for name in match[1].split(", "):
                    found.setdefault(name, []).append(line)
    return found


def test_every_ordering_in_the_native_code_names_its_partner():
    code = markers(path for folder in ("include", "src", "bind") for path in (NATIVE / folder).rglob("*.[ch]pp"))
    litmus = markers((NATIVE / "tests" / "litmus").glob("*.litmus"))
    for name, lines in code.items():
        named = any(f"pairs with {other}." in line for line in lines for other in code)
        assert len(lines) > 1 or named, f"{name} has no partner"
    assert set(code) - UNTESTED == set(litmus)
    documented = (NATIVE.parent / "docs" / "guarantees.md").read_text()
    assert [name for name in code if f"`{name}`" not in documented] == []


def test_another_system_is_refused_in_one_sentence():
    program = "import sys; sys.platform = 'darwin'; import shmsync"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: shmsync runs on Linux only")


def test_importing_pulls_in_nothing_optional():
    program = (
        "import sys, torch, tensordict; before = set(sys.modules); import shmsync; "
        "print([m for m in ('ray', 'torchrl', 'gymnasium', 'torch.distributed.rpc') "
        "if m in set(sys.modules) - before], [m for m in sys.modules if m.startswith('shmsync.schemes.remote')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[] []"


def test_schemes_for_several_machines_are_found_in_both_places():
    for name in ("RayWeightSyncScheme", "RPCTransport", "DistributedWeightSyncScheme", "WeightUpdaterBase"):
        assert getattr(shmsync, name) is getattr(shmsync.schemes, name)
    assert not hasattr(shmsync, "NoSuchScheme")
    assert not hasattr(shmsync.schemes, "NoSuchScheme")
