"""The examples for several machines, run as a user would: versions grow, the dead are named, and nothing is left."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil
import pytest

import shmsync
from support.choice import first
from support.processes import until
from support.programs.programs import Example

pytest.importorskip("gymnasium", reason="the examples need gymnasium, which shmsync[collectors] brings")

full = pytest.mark.full

EXAMPLES = Path(shmsync.__file__).parent / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"


def players(example):
    """Those of its processes that play."""
    lines = {}
    for process in example.members():
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            lines[process] = " ".join(process.cmdline())
    return [each for each, line in lines.items() if re.search(r"spawn_main|ray::Actor|python -u .*_cartpole", line)]


def rows_of(example):
    """For each iteration its versions and its mean; once it has ended, well and with nothing left."""
    output = example.end(unwanted="Traceback|ResourceWarning")
    rows = re.findall(r"iteration (\d+): versions \((.*?),?\), mean episode ([\d.]+)", output)
    assert [int(iteration) for iteration, *_ in rows] == list(range(1, len(rows) + 1)), output
    assert f"end: version {len(rows)}," in output, output
    return [([int(v) for v in versions.split(",")], float(mean)) for _, versions, mean in rows]


@pytest.fixture
def run(tmp_path):
    """run(script, *options, launcher=()) starts an example."""
    started = []

    def start(script, *options, launcher=()):
        started.append(Example(tmp_path, *launcher, str(EXAMPLES / script), *options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture(params=first(["torchrun", "ray", "rpc", "rpc under torchrun"]))
def kind(request):
    if request.param == "ray":
        pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    return request.param


@pytest.mark.full  # a program of half a minute
def test_each_iteration_is_played_with_the_version_that_was_sent_for_it(run, kind):
    script = {"rpc under torchrun": "rpc_cartpole.py"}.get(kind, f"{kind}_cartpole.py")
    example = run(script, "--iterations", "10", launcher=TORCHRUN if "torchrun" in kind else ())
    example.read_until("iteration 1:")
    assert len(players(example)) >= 2  # so that `nothing is left` means them too
    rows = rows_of(example)
    assert [versions for versions, _ in rows] == [[version, version] for version in range(1, 11)]
    assert rows[-1][1] > 2 * rows[0][1]  # it learns, so the versions were used


@full  # `make test` has fan_out= in remote/test_node_fan_out.py, and RPC workers in conformance/
@pytest.mark.parametrize("kind", ["rpc", "torchrun"])
def test_a_node_can_share_one_copy(run, kind):
    launcher = TORCHRUN if kind == "torchrun" else ()
    example = run(f"{kind}_cartpole.py", "--iterations", "4", "--fan-out", "node", launcher=launcher)
    assert [versions for versions, _ in rows_of(example)] == [[version, version] for version in range(1, 5)]


@full
def test_ray_learner_goes_on_without_a_killed_actor(run):
    pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    example = run("ray_cartpole.py", "--iterations", "5", "--kill-one")
    rows = rows_of(example)
    assert [versions for versions, _ in rows] == [[1, 1], [2, 2], [3], [4], [5]]
    assert len(re.findall("WorkerDied: version 3 .* worker 1 ", example.output)) == 1, example.output


@full  # `make test` kills workers over Ray and RPC in conformance/trouble, and trainers in engine/death
@pytest.mark.parametrize("kind", ["ray", "rpc"])
def test_learner_goes_on_without_a_worker_that_is_killed_at_any_moment(run, kind):
    if kind == "ray":
        pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    example = run(f"{kind}_cartpole.py", "--iterations", "16")
    example.read_until("iteration 2:")
    players(example)[0].kill()
    rows = rows_of(example)
    assert rows[1][0] == [2, 2] and rows[-1][0] == [16], example.output
    deaths = len(re.findall(r"WorkerDied: .* worker \d ", example.output))
    assert deaths in ((1, 2) if kind == "ray" else (1,)), example.output  # Ray's head may be slow to hear of it


@pytest.mark.full  # a program of half a minute
def test_rpc_workers_end_with_a_killed_learner(run):
    example = run("rpc_cartpole.py")
    example.read_until("iteration 1:")
    assert len(players(example)) == 2
    example.process.kill()
    until(lambda: example.members() == [])
