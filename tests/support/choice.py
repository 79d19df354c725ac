"""Which tests run: all, or of each cross product a choice in which every value occurs.

A test function with several parameters, say a scheme, a start method and a form of weights, is one test for each of
their combinations. The covering choice takes so few of them that each scheme, each start method and each form still
occurs. A scheme that is there with several options counts once; the options take turns. Which combinations these are
differs from function to function, and is the same in every run.

A test that is marked `full` is never of the choice: another one of its function shows the same, or it is a training of
a minute or more whose program other tests start too.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict

import pytest


def first(values, count=1):
    """Values of a parameter, of which all but the first are `full`: `make test` shows enough with so few."""
    values = list(values)
    return values[:count] + [pytest.param(value, marks=pytest.mark.full) for value in values[count:]]


def choose(items, choice):
    """(the tests to run, those that are left out), in their order. `choice`: "all", "covering" or "rest"."""
    if choice == "all":
        return items, []
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    taken = Counter()  # how often each value was
    covering = {id(item) for group in functions.values() for item in cover(group, taken)}
    wanted = choice == "covering"
    chosen = [item for item in items if (id(item) in covering) is wanted]
    return chosen, [item for item in items if (id(item) in covering) is not wanted]


def cover(items, taken):
    """Tests of one function, in which every value of every parameter occurs."""
    items = [item for item in items if not item.get_closest_marker("full")]
    if len(items) <= 1:
        return items
    given = {id(item): item.callspec.params.items() for item in items}
    values = {
        key: {(name, id(getattr(value, "scheme", value))) for name, value in pairs} for key, pairs in given.items()
    }

    def worth(item):
        rare = -sum(taken[id(value)] for _, value in given[id(item)])
        return len(values[id(item)] & missing), rare

    # A mix of the names, so that other functions pair the same values in other ways.
    left = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    missing, chosen = set().union(*values.values()), []
    while missing:
        best = max(left, key=worth)
        chosen.append(best)
        missing -= values[id(best)]
        taken.update(id(value) for _, value in given[id(best)])
    return chosen
