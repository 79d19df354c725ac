"""The examples for several machines, run as a user would: versions grow, the dead are named, and nothing is left."""

from __future__ import annotations

import contextlib
import re

import psutil
import pytest

from support.choice import first
from support.processes import until

pytest.importorskip("gymnasium", reason="the examples need gymnasium, which shmsync[collectors] brings")

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


@pytest.fixture(params=first(["torchrun", "ray", "rpc", "rpc under torchrun"]))
def kind(request):
    if request.param == "ray":
        pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    return request.param


@pytest.mark.full  # a program of half a minute
def test_each_iteration_is_played_with_the_version_that_was_sent_for_it(run_example, kind):
    script = {"rpc under torchrun": "rpc_cartpole.py"}.get(kind, f"{kind}_cartpole.py")
    options = ("--iterations", "10", *(("--fan-out", "node") if kind in ("rpc", "torchrun") else ()))
    example = run_example(script, *options, launcher=TORCHRUN if "torchrun" in kind else ())
    example.read_until("iteration 1:")
    assert len(players(example)) >= 2  # so that `nothing is left` means them too
    rows = rows_of(example)
    assert [versions for versions, _ in rows] == [[version, version] for version in range(1, 11)]
    assert rows[-1][1] > 2 * rows[0][1]  # it learns, so the versions were used


@pytest.mark.full
def test_ray_learner_goes_on_without_a_killed_actor(run_example):
    pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    example = run_example("ray_cartpole.py", "--iterations", "5", "--kill-one")
    rows = rows_of(example)
    assert [versions for versions, _ in rows] == [[1, 1], [2, 2], [3], [4], [5]]
    assert len(re.findall("WorkerDied: version 3 .* worker 1 ", example.output)) == 1, example.output


@pytest.mark.full  # `make test` kills workers over Ray and RPC in conformance/trouble, and trainers in engine/death
def test_rpc_learner_goes_on_without_a_worker_that_is_killed_at_any_moment(run_example):
    example = run_example("rpc_cartpole.py", "--iterations", "16")
    example.read_until("iteration 2:")
    players(example)[0].kill()
    rows = rows_of(example)
    assert rows[1][0] == [2, 2] and rows[-1][0] == [16], example.output
    assert len(re.findall(r"WorkerDied: .* worker \d ", example.output)) == 1, example.output


@pytest.mark.full  # a program of half a minute
def test_rpc_workers_end_with_a_killed_learner(run_example):
    example = run_example("rpc_cartpole.py")
    example.read_until("iteration 1:")
    assert len(players(example)) == 2
    example.process.kill()
    until(lambda: example.members() == [])
