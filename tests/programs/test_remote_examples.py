"""The examples for several machines, run as a user would: versions grow, the dead are named, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import shmsync
from support.choice import first
from support.processes import until

pytest.importorskip("gymnasium", reason="the examples need gymnasium, which shmsync[collectors] brings")

full = pytest.mark.full

EXAMPLES = Path(shmsync.__file__).parent / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"


class Run:
    """One example, in a directory of its own. Its processes are known by a variable that all of them inherit: those of
    Ray and of torchrun are in sessions of their own."""

    def __init__(self, directory, *command):
        self.mark = secrets.token_hex(8)
        self.pids, self.output, self.errors = set(), "", directory / "stderr"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "default::ResourceWarning", *command],
                cwd=directory, env={**os.environ, "SHMSYNC_TEST": self.mark},
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def members(self):
        """Its processes now. Each look adds to those whose arenas are looked for at the end."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SHMSYNC_TEST") == self.mark:
                    found.append(process)
            except psutil.Error:  # gone, or a zombie
                pass
        self.pids |= {process.pid for process in found}
        return found

    def workers(self):
        """Those of members() that play."""
        lines = {}
        for process in self.members():
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                lines[process] = " ".join(process.cmdline())
        return [each for each, line in lines.items() if re.search(r"spawn_main|ray::Actor|python -u .*_cartpole", line)]

    def read_until(self, pattern):
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return
        pytest.fail(f"it ended before it printed {pattern!r}: {self.output}{self.errors.read_text()}")

    def end(self):
        """For each iteration its versions and its mean; once it has ended, well and with nothing left."""
        for line in self.process.stdout:
            self.output += line
        errors = self.errors.read_text()
        assert self.process.wait() == 0, self.output + errors
        assert not re.search("Traceback|ResourceWarning", errors), errors
        until(lambda: self.members() == [])  # resource trackers go a moment later
        assert [name for name in os.listdir("/dev/shm") if _owner(name) in self.pids] == []
        rows = re.findall(r"iteration (\d+): versions \((.*?),?\), mean episode ([\d.]+)", self.output)
        assert [int(iteration) for iteration, *_ in rows] == list(range(1, len(rows) + 1)), self.output
        assert f"end: version {len(rows)}," in self.output, self.output
        return [([int(v) for v in versions.split(",")], float(mean)) for _, versions, mean in rows]

    def kill(self):
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.process.stdout.close()


def _owner(name):
    """Whose arena this file in /dev/shm is."""
    found = re.match(r"shmsync\.(\d+)-", name)
    return int(found[1]) if found else None


@pytest.fixture
def run(tmp_path):
    """run(script, *options, launcher=()) starts an example."""
    started = []

    def start(script, *options, launcher=()):
        started.append(Run(tmp_path, *launcher, str(EXAMPLES / script), *options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture(params=first(["torchrun", "ray", "rpc", "rpc under torchrun"]))
def kind(request):
    if request.param == "ray":
        pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    return request.param


def test_each_iteration_is_played_with_the_version_that_was_sent_for_it(run, kind):
    script = {"rpc under torchrun": "rpc_cartpole.py"}.get(kind, f"{kind}_cartpole.py")
    example = run(script, "--iterations", "10", launcher=TORCHRUN if "torchrun" in kind else ())
    example.read_until("iteration 1:")
    assert len(example.workers()) >= 2  # so that `nothing is left` means them too
    rows = example.end()
    assert [versions for versions, _ in rows] == [[version, version] for version in range(1, 11)]
    assert rows[-1][1] > 2 * rows[0][1]  # it learns, so the versions were used


@full  # `make test` has fan_out= in remote/test_node_fan_out.py, and this program in the test above
@pytest.mark.parametrize("kind", ["rpc", "torchrun"])
def test_a_node_can_share_one_copy(run, kind):
    launcher = TORCHRUN if kind == "torchrun" else ()
    example = run(f"{kind}_cartpole.py", "--iterations", "4", "--fan-out", "node", launcher=launcher)
    assert [versions for versions, _ in example.end()] == [[version, version] for version in range(1, 5)]


@full
def test_ray_learner_goes_on_without_a_killed_actor(run):
    pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    example = run("ray_cartpole.py", "--iterations", "5", "--kill-one")
    rows = example.end()
    assert [versions for versions, _ in rows] == [[1, 1], [2, 2], [3], [4], [5]]
    assert len(re.findall("WorkerDied: version 3 .* worker 1 ", example.output)) == 1, example.output


@pytest.mark.parametrize("kind", [pytest.param("ray", marks=full), "rpc"])
def test_learner_goes_on_without_a_worker_that_is_killed_at_any_moment(run, kind):
    if kind == "ray":
        pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    example = run(f"{kind}_cartpole.py", "--iterations", "16")
    example.read_until("iteration 2:")
    example.workers()[0].kill()
    rows = example.end()
    assert rows[1][0] == [2, 2] and rows[-1][0] == [16], example.output
    deaths = len(re.findall(r"WorkerDied: .* worker \d ", example.output))
    assert deaths in ((1, 2) if kind == "ray" else (1,)), example.output  # Ray's head may be slow to hear of it


def test_rpc_workers_end_with_a_killed_learner(run):
    example = run("rpc_cartpole.py")
    example.read_until("iteration 1:")
    assert len(example.workers()) == 2
    example.process.kill()
    until(lambda: example.members() == [])
