"""User code that raises: what it raises (KINDS), and where in a collector (PLACES). Workers import this."""

from __future__ import annotations

from support.environments.basic import Constant, Counting

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
