"""What a slot lacks since it was last written: every history there can be, against the obvious reference.

test_carry.py takes an arena itself through long random histories.

test_the_model_of_every_history goes through all states that StaleLeaves can get into, however long the history: leaves
are published all together, in part, through update(), half written and given up, each time into any slot that is not
the current one, as pins of readers may have it.

Each of these mutations of shmsync/engine/write/dirty_leaves.py makes the model fail; they were tried one at a time:

- begin() leaves `self._of_slot[slot]` as it is instead of None: a given-up write counts as whole.
- begin() does not add `given` to the other slots: they keep an older value.
- begin() adds `given` to the slot that is written only.
- a write of all leaves, or update(), leaves the other slots' sets as they are.
- begin() returns [] for update() too.
- an unknown slot (None) is carried as if it lacked nothing.
- written() marks slot 0 instead of the one that was written; it does nothing; it leaves None.
- the given leaves are carried as well (too much, never wrong): `difference(given)` left out.
- merged() joins pieces that are not neighbours, or lets the last piece begin at the second of two.
"""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import pytest

from shmsync.engine.write.dirty_leaves import DirtyLeaves

SIZES = {0: 100, 256: 4, 768: 8}  # bytes of each leaf by its offset: neighbours with padding between them, and a gap
LEAVES = frozenset(SIZES)
PARTS = [frozenset(part) for n in range(1, len(SIZES) + 1) for part in itertools.combinations(sorted(SIZES), n)]


def carried(pieces):
    """The leaves that these pieces hold; they are whole, once each, and nothing lies between them but padding."""
    found = []
    for offset, size in pieces:
        inside = [leaf for leaf in sorted(SIZES) if leaf < offset + size and leaf + SIZES[leaf] > offset]
        assert inside and offset == inside[0] and offset + size == inside[-1] + SIZES[inside[-1]], "not whole leaves"
        assert all(later - (leaf + SIZES[leaf]) < 256 for leaf, later in itertools.pairwise(inside)), (
            "more than padding"
        )
        found += inside
    assert len(found) == len(set(found)), "carried twice"
    return frozenset(found)


def plain(state):
    """The same for equal states."""
    if isinstance(state, (set, frozenset)):
        return sorted(state)
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return [plain(each) for each in state] if isinstance(state, list) else state


class World:
    """The slots as they are, the reference, and the StaleLeaves that is looked at."""

    def __init__(self, slots):
        self.stale = DirtyLeaves(SimpleNamespace(places=SIZES), slots)
        self.current = 0
        # Of each slot: the leaves whose bytes are not those of the current version.
        self.wrong = [LEAVES] * slots
        # Of each slot: the leaves given to any write, also one that was given up, since it was itself written; None: it
        # was not written, or given up half-way.
        self.given_since = [None] * slots

    @property
    def key(self):
        return repr([plain(each) for each in (vars(self.stale), self.current, self.wrong, self.given_since)])

    def write(self, slot, given, commits, changed):
        """Leaves `given` (None: update()) into a slot; update() then changes `changed`."""
        pieces = carried(self.stale.begin(slot, given))
        fresh = given or frozenset()
        assert self.wrong[slot] <= pieces | fresh, f"{sorted(self.wrong[slot] - pieces - fresh)} would stay old"
        known = self.given_since[slot]
        assert pieces == (LEAVES if known is None else known) - fresh, "carries what it need not"
        written = LEAVES if given is None else given
        self.given_since = [known if known is None else known | written for known in self.given_since]
        if not commits:
            # The worst case: everything that could have been written is half written.
            self.wrong[slot] |= pieces | fresh | changed
            self.given_since[slot] = None
            return
        self.stale.written()
        self.wrong = [wrong | fresh | changed for wrong in self.wrong]
        self.wrong[slot] = frozenset()
        self.given_since[slot] = frozenset()
        self.current = slot


@pytest.mark.full  # it searches a model
@pytest.mark.parametrize("slots", [2, 3])
def test_the_model_of_every_history(slots):
    first = World(slots)
    first.write(0, LEAVES, True, LEAVES)  # a publisher's first version
    todo, seen = [first], {first.key}
    while todo:
        world = todo.pop()
        before = pickle.dumps(world)
        for slot, given, commits in itertools.product(range(slots), [*PARTS, None], [True, False]):
            if slot == world.current:
                continue
            for changed in (PARTS[0], PARTS[-1]) if given is None else (frozenset(),):
                then = pickle.loads(before)
                then.write(slot, given, commits, changed)
                if then.key not in seen:
                    seen.add(then.key)
                    todo.append(then)
    assert len(seen) > 10  # it went somewhere
