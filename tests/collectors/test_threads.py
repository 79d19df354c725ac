"""envs_in_threads=True: each environment lives in a separate thread, and those of a worker step at the same time."""

from __future__ import annotations

import functools

import pytest
import torch

import shmsync
from support.environments.basic import (
    Constant,
    Counting,
    Failing,
    FirstTime,
    Later,
    Policy,
    differences,
    differences_after_a_load,
    flat,
)
from support.environments.vector import Episodes, NestedEpisodes, Random, Vectors
from support.environments.waiting import Breaking, Forking, OwnThread, Together
from support.processes import alive, workers

CASES = {"flat": (Episodes, Policy), "nested": (NestedEpisodes, Random)}
FOUR = {"num_workers": 1, "envs_per_worker": 4, "frames_per_batch": 40, "envs_in_threads": True}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_frames_are_those_of_environments_that_take_turns(collector, case, sync):
    make, policy = CASES[case]

    def frames(threads):
        torch.manual_seed(0)
        made = collector(make, policy(), **{**FOUR, "envs_in_threads": threads}, seed=11, sync=sync)
        return [flat(next(made)) for _ in range(4)]

    for one, other in zip(frames(False), frames(True), strict=True):
        assert differences(one, other) == []


def test_environments_of_a_worker_wait_at_the_same_time(collector):
    two_workers = {**FOUR, "num_workers": 2, "frames_per_batch": 80}
    batches = collector(functools.partial(Together, 4), Constant(), **two_workers)
    for _ in range(3):
        batch = next(batches).clone()
        assert batch.batch_size == (8, 10)
        now, after = batch["observation"][..., 0], batch["next", "observation"][..., 0]
        assert torch.equal(after, now + 1)


def test_an_environment_never_leaves_its_thread(collector):
    batches = collector(OwnThread, Constant(), **FOUR)
    for _ in range(3):
        next(batches)
    batches.shutdown()  # raises what close() raises


def test_an_environment_may_fork_processes_of_its_own(collector):
    batches = collector(Forking, Constant(), **FOUR)
    assert next(batches)["next", "done"].any()
    batches.shutdown()


@pytest.mark.full  # a quarter of a minute; frames/test_vector_envs.py forks too
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_with_other_start_methods(collector, start_method):
    batches = collector(OwnThread, Constant(), **FOUR, start_method=start_method)
    assert next(batches)["next", "done"].sum() == 8
    batches.shutdown()


@pytest.mark.parametrize(
    ("call", "error"), [*((call, ArithmeticError) for call in ("make", "reset", "step")), ("step", SystemExit)]
)
def test_what_one_of_them_raises_arrives(collector, call, error):
    expected = ArithmeticError if error is ArithmeticError else RuntimeError
    with pytest.raises(expected, match="the simulator broke"):
        next(collector(functools.partial(Breaking, call, error=error), Constant(), **FOUR))


def test_what_one_of_them_raises_in_its_close_arrives(collector):
    batches = collector(functools.partial(Breaking, "close"), Constant(), **FOUR)
    next(batches)
    with pytest.raises(ArithmeticError, match="the simulator broke"):
        batches.shutdown()


def test_a_policy_that_is_refused_while_they_step_ends_them_all(collector):
    before = workers()
    first = torch.zeros(4, dtype=torch.int64)
    other = {"action": first, "more": torch.ones(4)}
    batches = collector(OwnThread, Later(first, other, 5), **FOUR)
    with pytest.raises(shmsync.ManifestMismatch, match="more"):
        next(batches)
    batches.shutdown()
    assert workers() <= before


def test_one_that_kills_its_worker_is_started_again(collector, tmp_path):
    failing = functools.partial(Failing, "kill", when=FirstTime(str(tmp_path / "once")), at=12)
    batches = collector(failing, Constant(), **FOUR, restart_workers=True)
    for _ in range(4):
        batch = next(batches).clone()
        assert torch.equal(batch["next", "observation"], batch["observation"] + 1)
    assert batches.stats().restarts == 1


def test_the_seeds_of_a_state_go_on(collector):
    assert differences_after_a_load(collector, Episodes, Policy, **FOUR) == []


def test_vector_environments_are_refused(collector):
    with pytest.raises(shmsync.ManifestMismatch, match="worker 0 has a vector environment.*envs_per_worker"):
        collector(Vectors("sync", Counting, 4), Constant(), num_workers=1, envs_in_threads=True)


def test_what_is_no_answer_is_refused(collector):
    before = workers()
    with pytest.raises(TypeError, match="envs_in_threads is True or False, not 4 .int.*envs_per_worker"):
        collector(Counting, Constant(), envs_in_threads=4)
    assert workers() <= before and all(map(alive, before))
