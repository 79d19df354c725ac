"""User code that raises: what it raises (KINDS), and where in a collector (PLACES). Workers import this."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from support.environments.basic import Constant, Counting

WORDS = "the simulator broke"


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("this error stays where it is")


class Frozen(Exception):
    """As an exception that is a frozen dataclass."""

    def __setattr__(self, name, value):
        raise AttributeError(f"cannot assign to field {name!r}")


class Disguised(Exception):
    """Unpickled, it is one that would end the trainer."""

    def __reduce__(self):
        return SystemExit, (3,)


KINDS = {
    "RuntimeError": lambda: RuntimeError(WORDS),
    "StopIteration": lambda: StopIteration(WORDS),
    "EOFError": lambda: EOFError(WORDS),
    "BrokenPipeError": lambda: BrokenPipeError(32, WORDS),
    "SystemExit": lambda: SystemExit(WORDS),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(WORDS),
    "Unpicklable": lambda: Unpicklable(WORDS),
    "Frozen": lambda: Frozen(WORDS),
    "Disguised": lambda: Disguised(WORDS),
}
ENVIRONMENT = ["make", "observation_space", "action_space", "seed", "reset", "later reset", "step"]
POLICY = ["load", "first forward", "later forward"]
PLACES = [*ENVIRONMENT, *POLICY]


class RaisingEnv(Counting):
    """Raises at its place, and at no other."""

    def __init__(self, kind, place):
        self._kind, self._place, self._resets = kind, place, 0
        super().__init__()
        self._at("make")

    def _at(self, place):
        if self._place == place:
            raise KINDS[self._kind]()

    @property
    def observation_space(self):
        self._at("observation_space")
        return spaces.Box(-1e9, 1e9, (1,), np.float32)

    @property
    def action_space(self):
        self._at("action_space")
        space = spaces.Discrete(2)
        space.seed = lambda seed=None: self._at("seed")
        return space

    def reset(self, *, seed=None, options=None):
        self._resets += 1
        self._at("reset")
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
            raise KINDS[self.kind]()

    def forward(self, observation):
        self.calls += 1
        if self.place == "first forward" or (self.place == "later forward" and self.calls == 5):
            raise KINDS[self.kind]()
        return super().forward(observation)


class Closing(Counting):
    def __init__(self, path, fails):
        super().__init__()
        self._path, self._fails = path, fails

    def close(self):
        with self._path.open("a") as file:
            file.write("closed")
        if self._fails:
            raise ValueError("cannot close")
