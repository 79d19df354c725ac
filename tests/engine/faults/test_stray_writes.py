"""What writes an adopted module's parameters: inside update() it is one version, outside it is never seen mixed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

import shmsync
from support.processes import PATIENCE, segment_path, until
from support.weights import stamps

pytestmark = pytest.mark.host_memory(reason="a device's memory cannot be mapped read-only")

PROGRAM = """
import sys
import torch
from torch import nn
import shmsync
from support.weights import PlainSgd, filled, states
torch.set_num_threads(1)
name, where, bodies = sys.argv[1], sys.argv[2], sys.argv[3:]
module = filled(1)
pub = shmsync.Publisher(module, name=name)
pub.adopt(module)
print("adopted", flush=True)
sys.stdin.readline()
for body in bodies:
    code = compile(body, body, "exec")
    for _ in range(3):
        before, value, refused = pub.version, pub.version + 1, ""
        if where == "inside":
            with pub.update():
                exec(code)
        else:
            try:
                exec(code)
            except shmsync.ProtocolError:
                refused = " refused"
        print(f"{pub.version - before}{refused}", end=" ", flush=True)
        if pub.version == before and not refused:
            with pub.update():
                pass
    print(flush=True)
pub.close()
with torch.no_grad():
    for parameter in module.parameters():
        parameter.add_(1)
"""

# What it does outside update(): "published" as one version each, "refused", "dies" at the first write, or "private": it
# writes private memory, which the next update() brings into the arena.
WRITERS = {
    "load_state_dict": ("module.load_state_dict(states(value))", "published"),
    "load_state_dict(assign=True)": ("module.load_state_dict(states(value), assign=True)", "published"),
    "load_state_dict under no_grad": ("with torch.no_grad(): module.load_state_dict(states(value))", "published"),
    "load_state_dict of a module around": (
        "nn.ModuleDict({'in': module}).load_state_dict(states(value, 'in.'))",
        "refused",
    ),
    "an optimizer of torch's": ("torch.optim.SGD(filled(1, module).parameters(), lr=1.0).step()", "refused"),
    "p.data.copy_": ("for p in module.parameters(): p.data.copy_(torch.full_like(p, value))", "dies"),
    "nn.init": ("for p in module.parameters(): nn.init.constant_(p, value)", "dies"),
    "add_ under no_grad": ("with torch.no_grad():\n    for p in module.parameters(): p.add_(1)", "dies"),
    "lerp_": ("for p in module.parameters(): p.data.lerp_(torch.full_like(p, value), 1.0)", "dies"),
    "foreach": ("with torch.no_grad(): torch._foreach_add_(list(module.parameters()), 1.0)", "dies"),
    "numpy": ("for p in module.parameters(): p.detach().numpy()[...] = value", "dies"),
    "kept from update()": (
        "pub._writer.side.arena.weights(0, writable=True).apply_(lambda t: t.fill_(value))",
        "dies",
    ),
    "another library's optimizer": ("PlainSgd(module.parameters()).step()", "dies"),
    "vector_to_parameters": (
        "nn.utils.vector_to_parameters(torch.full((sum(p.numel() for p in module.parameters()),), float(value)), "
        "module.parameters())",
        "private",
    ),
    "p.data =": ("for p in module.parameters(): p.data = torch.full_like(p, value)", "private"),
    "swap_tensors": (
        "for p in list(module.parameters()):\n"
        "    torch.utils.swap_tensors(p, nn.Parameter(torch.full_like(p.detach(), value)))",
        "private",
    ),
}


class Trainer:
    """Runs these bodies in a separate process; this one reads its arena all the time."""

    def __init__(self, name, where, bodies):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name, where, *bodies],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert self.process.stdout.readline() == "adopted\n", self.process.communicate()[1]
        self.mixed, self.values = [], {}
        self._sub = shmsync.Subscriber(name, timeout=60.0)
        self._reads = threading.Thread(target=self._read, daemon=True)
        self._over = False
        self._reads.start()
        until(lambda: self.values)

    def _read(self):
        while not self._over:
            with self._sub.read() as section:
                low, high = stamps(section.weights)
            if low != high:
                self.mixed.append((section.version, low, high))
            self.values.setdefault(section.version, set()).add(low)

    def run(self):
        """What it printed of each body, its exit status and what it wrote to stderr."""
        try:
            out, err = self.process.communicate("\n", timeout=PATIENCE)
        finally:
            self._over = True
            self.process.kill()
            self._reads.join(60)
            self._sub.close()
        assert not self.mixed
        assert all(values == {version} for version, values in self.values.items())
        return [line.strip() for line in out.splitlines()], self.process.returncode, err


@pytest.fixture
def trainer(name):
    yield lambda where, *bodies: Trainer(name, where, bodies)
    segment_path(name).unlink(missing_ok=True)  # of a trainer that was killed


def test_inside_update_every_write_is_one_version(trainer):
    out, status, err = trainer("inside", *(body for body, _ in WRITERS.values())).run()
    assert status == 0, err
    assert dict(zip(WRITERS, out, strict=True)) == dict.fromkeys(WRITERS, "1 1 1")


def test_outside_update_a_write_is_a_version_or_refused_or_private(trainer):
    prints = {"published": "1 1 1", "refused": "0 refused 0 refused 0 refused", "private": "0 0 0"}
    kinds = {writer: how for writer, how in WRITERS.items() if how[1] in prints}
    out, status, err = trainer("outside", *(body for body, _ in kinds.values())).run()
    assert status == 0, err
    assert dict(zip(kinds, out, strict=True)) == {writer: prints[outcome] for writer, (_, outcome) in kinds.items()}


@pytest.mark.parametrize("writer", ["add_ under no_grad", "kept from update()"])  # to the pages all writes are alike
def test_outside_update_what_nobody_sees_coming_ends_at_the_first_byte(trainer, name, writer):
    out, status, err = trainer("outside", WRITERS[writer][0]).run()
    assert (out, status) == ([], -signal.SIGSEGV), err
    (line,) = [line for line in err.splitlines() if "shmsync: " in line]
    assert f"arena '{name}'" in line and "outside update()" in line and "adopt()" in line
