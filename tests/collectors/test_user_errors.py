"""Whatever user code raises in a worker, wherever: an exception here, with the worker's traceback as its cause."""

from __future__ import annotations

import functools

import pytest

from shmsync.collectors import MultiprocessCollector
from support.environments.basic import Constant, Counting
from support.processes import until, workers

WORDS = "the simulator broke"


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("this error stays where it is")


KINDS = {each.__name__: each for each in (EOFError, SystemExit, KeyboardInterrupt, Unpicklable)}


ENVIRONMENT = ["make", "later reset", "step"]


PLACES = [*ENVIRONMENT, "load", "later forward"]


class RaisingEnv(Counting):
    """Raises at its place, and at no other."""

    def __init__(self, kind, place):
        self._kind, self._place, self._resets = kind, place, 0
        super().__init__()
        self._at("make")

    def _at(self, place):
        if self._place == place:
            raise KINDS[self._kind](WORDS)

    def reset(self, *, seed=None, options=None):
        self._resets += 1
        if self._resets == 3:  # two are before the first step
            self._at("later reset")
        return super().reset(seed=seed)

    def step(self, action):
        self._at("step")
        return super().step(action)


class RaisingPolicy(Constant):
    def __init__(self, kind, place):
        super().__init__()
        self.kind, self.place, self.calls = kind, place, 0

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.place == "load":
            raise KINDS[self.kind](WORDS)

    def forward(self, observation):
        self.calls += 1
        if self.place == "later forward" and self.calls == 5:
            raise KINDS[self.kind](WORDS)
        return super().forward(observation)


class Closing(Counting):
    """Its close() writes a line to a file, and raises."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def close(self):
        with self._path.open("a") as file:
            file.write("closed")
        raise ValueError("cannot close")


@pytest.mark.parametrize("place", PLACES)
def test_what_user_code_raises_in_any_place_arrives_with_its_traceback(place):
    check_what_arrives("EOFError", place, sync=True)  # the worker's own pipes raise it too


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "Unpicklable"])
def test_whatever_it_raises_arrives_with_its_traceback(kind):
    check_what_arrives(kind, "step", sync=False)


def check_what_arrives(kind, place, sync):
    env = functools.partial(RaisingEnv, kind, place) if place in ENVIRONMENT else Counting
    policy = Constant() if place in ENVIRONMENT else RaisingPolicy(kind, place)
    before = workers()
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any kind; it is looked at below
        batches = MultiprocessCollector(env, policy, num_workers=2, frames_per_batch=20, total_frames=2000, sync=sync)
        try:
            for _ in batches:
                pass
        finally:
            batches.shutdown()
    error = caught.value
    assert "test_user_errors.py" in str(error.__cause__) and "Traceback" in str(error.__cause__)
    if kind != "EOFError":  # another one is quoted, since it could end the trainer
        assert type(error) is RuntimeError and kind in str(error)
    else:
        assert type(error) is EOFError
    assert WORDS in str(error)
    assert workers() <= before


def test_an_update_raises_what_ended_a_worker(collector):
    env = functools.partial(RaisingEnv, "EOFError", "later reset")
    batches = collector([Counting, env], Constant(), sync=False, frames_per_batch=400)
    until(lambda: batches._members[1].process.exitcode is not None)
    with pytest.raises(EOFError) as caught:
        batches.update_policy_weights_()
    assert "test_user_errors.py" in str(caught.value.__cause__)


def test_every_environment_is_closed_and_what_a_close_raises_is_printed(tmp_path, capfd):
    envs = [functools.partial(Closing, tmp_path / "closed")]
    batches = MultiprocessCollector(
        envs, Constant(), num_workers=1, envs_per_worker=2, frames_per_batch=20, start_method="fork"
    )
    next(batches)
    batches.shutdown()
    assert (tmp_path / "closed").read_text() == "closed" * 2
    assert "cannot close" in capfd.readouterr().err
