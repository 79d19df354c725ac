"""Whatever way a bound module is used, it computes what the trainer's module would at the version that it shows.

Each test takes one way to use one kind of module (support/zoo/zoo.py) through every mode (support/zoo/modes.py). What
else may vary is drawn: the slots, the consistency, how the trainer publishes, and which tensors are replaced between
two versions. The draw has a seed, which a failure names; `make zoo ROUNDS=100` draws again and again.
"""

from __future__ import annotations

import os
import zlib

import pytest

from support.zoo.modes import MODES
from support.zoo.world import visit
from support.zoo.zoo import USES

# One of each kind of module and of call. CI takes all uses through more, by the second test.
FIRST = (
    "agent.get_action_and_value", "batched", "container.pi", "decoder.generate", "decoder.lazily", "hooked",
    "normalised", "policy", "policy.encoder.encode", "recurrent", "returning.dist", "weight_norm",
)  # fmt: skip
ROUNDS = int(os.environ.get("ZOO_ROUNDS", "1"))


def seed_of(*what):
    return zlib.crc32(" ".join(map(str, what)).encode())


@pytest.mark.parametrize("use", [use if use in FIRST else pytest.param(use, marks=pytest.mark.slow) for use in USES])
def test_a_bound_module_computes_what_the_trainers_does(use):
    for mode in MODES:
        slots = 1 + seed_of(use, mode) % 3
        visit(USES[use], MODES[mode], slots, seed_of(use, mode, slots, 0))


@pytest.mark.full
@pytest.mark.parametrize("use", USES)
def test_with_one_slot_and_with_several(use):
    for number in range(1, 1 + ROUNDS):
        for mode in MODES:
            for slots in (1, 2 + seed_of(use, mode) % 2):
                visit(USES[use], MODES[mode], slots, seed_of(use, mode, slots, number))
