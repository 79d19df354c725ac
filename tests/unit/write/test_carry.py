"""With several slots a partial publish carries what changed since its slot was last written: no byte more, or less."""

from __future__ import annotations

import random

import pytest
import torch


class Reference:
    """A publisher of many leaves, and what the newest version must be."""

    def __init__(self, publisher, subscriber, slots, dtype):
        self.chance = random.Random(slots)
        shapes = {
            f"{number}.{name}": (self.chance.randint(0, 90),) for number in range(8) for name in ("weight", "bias")
        }
        self.values = {name: torch.zeros(shape) for name, shape in shapes.items()}
        tied = torch.zeros(70)
        self.values |= {"one": tied, "two": tied, "count": torch.tensor(0)}
        self.dtype = dtype
        self.pub = publisher(self.values, slots=slots, dtype=dtype)
        self.sub = subscriber(self.pub)
        self.number = 0

    def some(self):
        """New values for some leaves, or all; tied ones stay one."""
        self.number += 1
        names = self.chance.sample(sorted(self.values), self.chance.choice((1, 2, 5, len(self.values))))
        given = {name: torch.full_like(self.values[name], self.number) for name in names}
        if {"one", "two"} <= given.keys():
            given["two"] = given["one"]
        return given

    def published(self, given):
        self.values |= given
        for one, two in (("one", "two"), ("two", "one")):
            if one in given:
                self.values[two] = given[one]

    def check(self):
        with self.sub.read() as section:
            for name, value in self.values.items():
                shown = section.weights.get(tuple(name.split(".")))
                assert torch.equal(shown, value.to(shown.dtype)), (name, self.number)


@pytest.mark.parametrize(
    "dtype", [None, torch.float64, {"*.weight": torch.float64}], ids=["plain", "cast", "some cast"]
)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_leaf_is_right_after_any_sequence_of_writes(publisher, subscriber, slots, dtype):
    arena = Reference(publisher, subscriber, slots, dtype)
    pub = arena.pub

    def publish():
        given = arena.some()
        if arena.chance.random() < 0.3:
            given = {name: torch.stack([value, value], -1)[..., 0] for name, value in given.items()}  # gathered
            if {"one", "two"} <= given.keys():
                given["two"] = given["one"]
        pub.publish(given)
        arena.published(given)

    def update():
        given = arena.some()
        with pub.update() as weights:
            for name, value in given.items():
                weights.get(tuple(name.split("."))).copy_(value)
        arena.published(given)

    def failed_update():
        given = arena.some()
        with pytest.raises(ZeroDivisionError), pub.update() as weights:
            for name in given:
                weights.get(tuple(name.split("."))).fill_(77)
            raise ZeroDivisionError
        if slots == 1:  # poisoned: only all of it repairs it
            pub.publish(arena.values)

    for _ in range(100):
        arena.chance.choice((publish, publish, publish, update, failed_update))()
        arena.check()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_is_carried_is_what_changed_since_the_slot_was_written(publisher, slots):
    base, adapter = torch.zeros(1 << 17), torch.zeros(64)
    pub = publisher({"one": adapter, "base": base, "two": adapter + 1}, slots=slots)
    carried = slots > 1  # one slot lacks nothing that was given before

    def copied(given):
        before = pub.stats().bytes_copied
        pub.publish(given)
        return pub.stats().bytes_copied - before

    small, large = adapter.nbytes, base.nbytes
    for _ in range(slots - 1):
        assert copied({"one": adapter}) == large + 2 * small  # each slot once
    assert copied({"one": adapter}) == small
    assert copied({"two": adapter}) == small + carried * small  # "one", which the slot has not seen
    for _ in range(slots):
        copied({"one": adapter, "two": adapter})
    assert copied({"one": adapter, "two": adapter}) == 2 * small
    assert copied({"base": base}) == large + carried * 2 * small  # two pieces, without what lies between them
    assert copied({"one": adapter}) >= carried * large + small
    for _ in range(slots):
        copied({"one": adapter})
    with pub.update() as weights:
        weights["base"].fill_(3)
    assert copied({"one": adapter}) >= carried * large + small
    assert (pub.weights["base"] == 3).all()
