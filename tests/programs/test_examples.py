"""The examples, each run once as a user would: they do what they say, and leave nothing behind."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.slow  # the README's first example is in test_quickstart.py


def test_raw_loop_delivers_the_last_version(run_example):
    output = run_example("raw_loop.py").end()
    # Two workers write to one pipe: their lines may run together.
    ends = re.findall(r"(worker \d|trainer): 4\.00 at version 200", output)
    assert sorted(ends) == ["trainer", "worker 0", "worker 1"], output


def test_a_learner_on_a_gpu_if_there_is_one_labels_its_batches(run_example):
    output = run_example("gpu_learner.py", "--updates", "150").end()
    assert re.match(r"learning on (the CPU: this machine has no GPU|\w.*)\n", output), output
    rows = re.findall(r"^version (\d+): reward (0\.\d+) of versions \[(\d+), (\d+)\]$", output, re.MULTILINE)
    assert [int(version) for version, *_ in rows] == [51, 101, 151], output
    assert float(rows[-1][1]) > 0.5, output  # by chance it is 0.125
    assert all(int(version) - 3 <= int(low) <= int(high) < int(version) for version, _, low, high in rows), output


def test_ppo_with_the_collector_sends_a_version_after_each_batch(run_example):
    pytest.importorskip("gymnasium", reason="the example needs gymnasium, which shmsync[collectors] brings")
    output = run_example("collector_ppo.py", "--total-frames", "6000", "--num-workers", "2").end()
    rows = re.findall(r"(\d+) frames .* version +(\d+) .* episodes +([\d.]+)", output)
    frames, version, _ = rows[-1]
    assert int(frames) >= 6_000 and int(version) == len(rows) + 1  # one for the start, one for each batch


def test_ppo_with_torchrl_learns(run_example):
    pytest.importorskip("torchrl", reason="the example needs torchrl, which shmsync[torchrl] brings")
    output = run_example("torchrl_ppo.py", "--total-frames", "20000").end()
    rows = re.findall(r"(\d+) frames, mean return ([\d.]+), policy version (\d+) to (\d+)", output)
    assert int(rows[-1][0]) == 20_000
    assert float(rows[0][1]) < 60 < 90 < float(rows[-1][1])
    assert [(int(low), int(high)) for *_, low, high in rows] == [(n, n) for n in range(len(rows))]


def test_cleanrl_learns_while_workers_act_also_without_a_killed_one(run_example):
    pytest.importorskip("gymnasium", reason="the example needs gymnasium, which shmsync[demo] brings")
    example = run_example("cleanrl_ppo_async.py", "--target-return", "195", "--total-timesteps", "200000")
    example.read_until("lag=")
    example.workers()[0].kill()
    output = example.end()
    assert re.search(r"worker \d died, exit code -9; 1 left", output), output
    end = dict(re.findall(r"(\w+)=([\d.]+)", output.splitlines()[-1]))
    assert float(end["episodic_return"]) >= 195 and int(end["versions"]) > 15, output


def test_stable_baselines3_ends_without_a_killed_evaluator(run_example):
    pytest.importorskip("stable_baselines3", reason="the example needs stable-baselines3: shmsync[test] brings it")
    example = run_example("sb3_evaluators.py", "--timesteps", "4000")
    example.read_until("2 evaluators are playing")
    example.workers()[0].kill()
    output = example.end()
    assert len(re.findall(r"evaluator \d died, exit code -9", output)) == 1, output
    assert re.findall(r"^ *\d+ +\d+ +\d+ +[\d.]+  evaluator \d$", output, re.MULTILINE), output


def test_a_worker_of_self_play_attaches_to_few_of_many_opponents(run_example):
    pytest.importorskip("pettingzoo", reason="the example needs pettingzoo, which shmsync[test] brings")
    output = run_example(
        "self_play.py", "--rounds", "40", "--opponents", "40", "--attached", "3", "--games", "32"
    ).end()
    untrained, trained = map(int, re.search(r"random player: (\d+)% untrained, (\d+)% trained", output).groups())
    assert trained >= untrained + 10, output
    workers = re.findall(r"worker \d: played (\d+) opponents, at most (\d+) attached at once; (\d+) desc", output)
    assert len(workers) == 2, output
    for played, most, descriptors in workers:
        assert int(played) > int(most) == 3 and int(descriptors) < 40, output


def test_a_bad_learner_of_a_population_copies_a_good_one_and_so_does_one_that_was_killed(run_example):
    pytest.importorskip("gymnasium", reason="the example needs gymnasium, which shmsync[demo] brings")
    example = run_example("population.py", "--generations", "14")
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", example.read_until("^learners:"))]
    example.read_until("^generation 8:")
    assert "takes over" in example.output
    killed = next(each for each in example.workers() if each.pid in pids)
    killed.kill()
    before, output = example.output, example.end()
    assert f"\nlearner {pids.index(killed.pid)} takes over" in output.removeprefix(before), output
    ends = re.findall(r"^learner (\d), version \d+: mean return (\d+)$", output, re.MULTILINE)
    assert [int(rank) for rank, _ in ends] == [0, 1, 2, 3], output


TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"


@pytest.mark.parametrize("kind", ["torchrun", "ray", "rpc"])
def test_each_iteration_on_many_machines_is_played_with_the_version_that_was_sent_for_it(run_example, kind):
    pytest.importorskip("gymnasium", reason="the examples need gymnasium, which shmsync[collectors] brings")
    if kind == "ray":
        pytest.importorskip("ray", reason="the example needs Ray, which shmsync[ray] brings")
    example = run_example(f"{kind}_cartpole.py", "--iterations", "10", launcher=TORCHRUN if kind == "torchrun" else ())
    output = example.end(unwanted="Traceback|ResourceWarning")
    rows = re.findall(r"iteration (\d+): versions \((.*?),?\), mean episode ([\d.]+)", output)
    assert [[int(v) for v in versions.split(",")] for _, versions, _ in rows] == [[n, n] for n in range(1, 11)], output
    assert float(rows[-1][2]) > 2 * float(rows[0][2])  # it learns, so the versions were used
    assert "end: version 10," in output, output
