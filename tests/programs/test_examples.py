"""The examples, run as a user would: they do what they say, also when a worker is killed, and leave nothing behind."""

from __future__ import annotations

import re
import signal

import pytest

from support.processes import until


@pytest.mark.full  # `make test` runs the README's first example, in test_quickstart.py
def test_raw_loop_delivers_the_last_version(run_example):
    output = run_example("raw_loop.py").end()
    # Two workers write to one pipe: their lines may run together.
    ends = re.findall(r"(worker \d|trainer): 4\.00 at version 200", output)
    assert sorted(ends) == ["trainer", "worker 0", "worker 1"], output


class TestCleanRL:
    @pytest.fixture(autouse=True)
    def _needs(self):
        pytest.importorskip("gymnasium", reason="the example needs gymnasium, which shmsync[demo] brings")

    @pytest.mark.slow
    def test_it_learns_while_workers_act(self, run_example):
        output = run_example("cleanrl_ppo_async.py", "--target-return", "195", "--total-timesteps", "200000").end()
        end = dict(re.findall(r"(\w+)=([\d.]+)", output.splitlines()[-1]))
        assert float(end["episodic_return"]) >= 195, output
        assert int(end["versions"]) > 15, output
        assert 0 < float(end["mean_lag"]) < 5, output  # 0: no worker acted while the learner trained

    @pytest.mark.full  # `make test` kills an actor of the demo
    @pytest.mark.parametrize("killed", [1, 2])
    def test_it_goes_on_without_killed_workers_but_not_without_any(self, run_example, killed):
        example = run_example(
            "cleanrl_ppo_async.py", "--target-return", "0", "--total-timesteps", "20000", "--log-every", "1"
        )
        example.read_until("lag=")
        until(lambda: len(example.workers()) == 2)
        for worker in example.workers()[:killed]:
            worker.kill()
        output = example.end(code=0 if killed == 1 else 1)
        assert re.search(r"worker \d died, exit code -9; 1 left", output), output
        if killed == 1:
            assert int(re.search(r"end: global_step=(\d+)", output).group(1)) >= 20000


class TestStableBaselines3:
    @pytest.fixture(autouse=True)
    def _needs(self):
        reason = "the example needs stable-baselines3, which shmsync[test] brings"
        pytest.importorskip("stable_baselines3", reason=reason)

    def table(self, output):
        """{version: (timesteps, mean return, reporters)}"""
        rows = re.findall(r"^ *(\d+) +(\d+) +\d+ +([\d.]+)  (.*)$", output, re.MULTILINE)
        return {int(version): (int(steps), float(mean), names) for version, steps, mean, names in rows}

    @pytest.mark.slow
    def test_versions_are_judged_while_training_goes_on(self, run_example):
        example = run_example("sb3_evaluators.py", "--timesteps", "12000")
        example.read_until("2 evaluators are playing")
        stopped = example.workers()[0]
        stopped.send_signal(signal.SIGSTOP)  # training does not even wait for an evaluator that stands still
        example.read_until("training has ended")
        stopped.send_signal(signal.SIGCONT)
        output = example.end()
        table = self.table(output)
        assert len(table) >= 5, output
        first, last = table[min(table)], table[max(table)]
        assert first[0] <= 2000 and first[1] < 100, output
        assert last[0] >= 12000 and last[1] >= 150, output
        assert last[2] == "evaluator 0, evaluator 1", output
        assert f"end: {max(table)} versions published" in output

    @pytest.mark.full
    def test_it_ends_without_a_killed_evaluator(self, run_example):
        example = run_example("sb3_evaluators.py", "--timesteps", "4000")
        example.read_until("2 evaluators are playing")
        example.workers()[0].kill()
        output = example.end()
        assert len(re.findall(r"evaluator \d died, exit code -9", output)) == 1, output
        table = self.table(output)
        assert re.fullmatch(r"evaluator \d", table[max(table)][2]), output


class TestLeagues:
    @pytest.fixture(autouse=True)
    def _needs(self):
        for module in ("gymnasium", "pettingzoo", "pygame"):
            pytest.importorskip(module, reason=f"the examples need {module}, which shmsync[test] brings")

    @pytest.mark.full  # half a minute of training
    def test_a_worker_attaches_to_few_of_many_opponents(self, run_example):
        output = run_example(
            "self_play.py", "--rounds", "40", "--opponents", "40", "--attached", "3", "--games", "32"
        ).end()
        untrained, trained = map(int, re.search(r"random player: (\d+)% untrained, (\d+)% trained", output).groups())
        assert trained >= untrained + 10, output
        assert "\n40 opponents exist;" in output
        workers = re.findall(r"worker \d: played (\d+) opponents, at most (\d+) attached at once; (\d+) desc", output)
        assert len(workers) == 2, output
        for played, most, descriptors in workers:
            assert int(played) > int(most) == 3, output
            assert int(descriptors) < 40, output  # those of opponents that it has dropped are closed

    @pytest.mark.full  # a program of half a minute, as the next one
    def test_self_play_ends_when_a_worker_is_killed(self, run_example):
        example = run_example("self_play.py", "--opponents", "10")
        example.read_until("^round 20:")
        example.workers()[0].kill()
        example.end(code=1)
        errors = example.errors.read_text()
        assert "a worker has died" in errors and "killed by SIGKILL" in errors, errors

    @pytest.mark.full  # half a minute of training
    def test_a_bad_learner_copies_a_good_one_and_so_does_one_that_was_killed(self, run_example):
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
        assert all(int(mean_return) > 60 for _, mean_return in ends), output  # random weights: about 22


@pytest.mark.full
def test_ppo_with_the_collector_learns(run_example):
    output = run_example("collector_ppo.py", "--total-frames", "30000", "--num-workers", "2").end()
    rows = re.findall(r"(\d+) frames .* version +(\d+) .* episodes +([\d.]+)", output)
    frames, version, mean_return = rows[-1]
    assert int(frames) >= 30_000 and int(version) == len(rows) + 1  # one for the start, one for each batch
    assert float(rows[0][2]) < 40 < 80 < float(mean_return)


@pytest.mark.full
def test_ppo_with_torchrl_learns(run_example):
    output = run_example("torchrl_ppo.py", "--total-frames", "20000").end()
    rows = re.findall(r"(\d+) frames, mean return ([\d.]+), policy version (\d+) to (\d+)", output)
    frames, mean_return, *_ = rows[-1]
    assert int(frames) == 20_000
    assert float(rows[0][1]) < 60 < 90 < float(mean_return)
    assert [(int(low), int(high)) for *_, low, high in rows] == [(n, n) for n in range(len(rows))]
