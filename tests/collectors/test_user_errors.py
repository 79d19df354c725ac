"""Whatever user code raises in a worker, wherever: an exception here, with the worker's traceback as its cause."""

from __future__ import annotations

import functools
import logging

import pytest

from shmsync.collectors import MultiprocessCollector
from support.environments.basic import SCHEMES, Constant, Counting, Failing, FirstTime
from support.environments.raising import ENVIRONMENT, KINDS, PLACES, WORDS, Closing, RaisingEnv, RaisingPolicy
from support.processes import until, workers

# What the worker's own loops and pipes raise too: in some places it could be taken for theirs.
MISTAKEN = ["StopIteration", "EOFError", "BrokenPipeError", "KeyboardInterrupt"]
AS_THEY_ARE = {
    "RuntimeError",
    "EOFError",
    "BrokenPipeError",
    "ConnectionResetError",
    "OSError",
    "Frozen",
    "ExceptionGroup",
}


@pytest.mark.parametrize("kind", MISTAKEN)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sync", [True, False])
def test_what_user_code_raises_in_any_place_arrives_with_its_traceback(kind, place, sync):
    check_what_arrives(kind, place, sync)


@pytest.mark.parametrize(("place", "sync"), [("step", True), ("later reset", False)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MISTAKEN])
def test_whatever_it_raises_arrives_with_its_traceback(kind, place, sync):
    check_what_arrives(kind, place, sync)


def check_what_arrives(kind, place, sync):
    env = functools.partial(RaisingEnv, kind, place) if place in ENVIRONMENT else Counting
    policy = Constant() if place in ENVIRONMENT else RaisingPolicy(kind, place)
    before = workers()
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any kind; it is looked at below
        batches = MultiprocessCollector(env, policy, num_workers=2, frames_per_batch=20, total_frames=2000, sync=sync)
        try:
            for _ in batches:
                if place == "close":
                    break
        finally:
            batches.shutdown()
    error = caught.value
    assert "raising.py" in str(error.__cause__) and "Traceback" in str(error.__cause__)
    if kind in AS_THEY_ARE:
        assert type(error) is type(KINDS[kind]())
    else:
        assert type(error) is RuntimeError and kind.split()[0] in str(error)
    if kind not in ("ExceptionGroup", "BaseExceptionGroup", "SystemExit with a code"):
        assert WORDS in str(error)
    assert workers() <= before


@pytest.mark.parametrize(("scheme", "sync"), list(zip(SCHEMES, [True, False], strict=True)))
def test_an_update_raises_what_ended_a_worker(collector, scheme, sync):
    env = functools.partial(RaisingEnv, "EOFError", "later reset")
    batches = collector([Counting, env], Constant(), sync=sync, weight_sync_scheme=scheme(), frames_per_batch=400)
    if sync:
        batches._batches.begin_round()
    until(lambda: batches._pool.members[1].process.exitcode is not None)
    with pytest.raises(EOFError) as caught:
        batches.update_policy_weights_()
    assert "raising.py" in str(caught.value.__cause__)


def test_an_update_starts_a_worker_again_that_failed_once(collector, tmp_path):
    env = functools.partial(Failing, "raise", at=45, when=FirstTime(tmp_path / "failed"))
    batches = collector([Counting, env], Constant(), restart_workers=True, frames_per_batch=40, sync=False)
    first = batches._pool.members[1].process
    until(lambda: first.exitcode is not None)
    assert batches.update_policy_weights_() == 2
    assert batches.stats().restarts == 1


def test_every_environment_is_closed_also_when_one_of_them_fails(tmp_path):
    envs = [functools.partial(Closing, tmp_path / str(index), index == 0) for index in range(2)]
    batches = MultiprocessCollector(envs[0], Constant(), num_workers=1, envs_per_worker=2, frames_per_batch=20)
    next(batches)
    with pytest.raises(ValueError, match="cannot close"):
        batches.shutdown()
    batches.shutdown()  # the second one has nothing to say
    assert (tmp_path / "0").read_text() == "closed" * 2


def test_a_failing_close_does_not_hide_the_error_under_way(tmp_path, caplog):
    env = functools.partial(Closing, tmp_path / "0", True)
    with caplog.at_level(logging.WARNING, "shmsync"), pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with MultiprocessCollector(env, Constant(), num_workers=1, frames_per_batch=20) as batches:
            next(batches)
            raise ZeroDivisionError
    assert "cannot close" in caplog.text
