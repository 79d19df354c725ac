"""A storm over the engine can be had again: its decisions come from the seed alone."""

from __future__ import annotations

from support.storms.engine import OF_TRAINERS, OF_WORKERS, WORKERS, decide


def test_the_same_seed_makes_the_same_decisions():
    first = [decide(7, number) for number in range(200)]
    assert first == [decide(7, number) for number in range(200)]
    assert first != [decide(8, number) for number in range(200)]


def test_everything_is_tried_on_everybody():
    steps = [decide(7, number) for number in range(20_000)]
    tried = {(step.victim, step.trouble) for step in steps if step.trouble}
    expected = {(victim, kind) for victim in range(WORKERS) for kind in OF_WORKERS}
    assert tried == expected | {(WORKERS, kind) for kind in OF_TRAINERS}
    assert {step.restart for step in steps} == {None, "closed", "another layout"}
