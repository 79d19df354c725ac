"""Which tests run: all, or of each cross product a choice in which every value, or every pair of values, occurs.

A test function with several parameters, say a scheme, a start method and a form of weights, is one test for each of
their combinations. The covering choice takes so few of them that each scheme, each start method and each form still
occurs. A scheme that is there with several options counts once; the options take turns. Which combinations these are
differs from function to function, and is the same in every run.

A test that is marked `full` is never of the covering choice: it takes seconds, and another test shows nearly the same,
or it is a whole program.
One that is marked `slow` is of no choice but all and rest: it is a training, or a section of the benchmark, of a minute
or more, and shorter tests start the same program; or a storm over relays.

The pairs are what CI runs after the covering choice: so many more combinations that every two values of two parameters
meet in one test, and of those that are marked `full` so many that every value occurs. Most faults need one value or
two, so combinations of three are left to `make test-all`.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from itertools import combinations

import pytest


def first(values, count=1):
    """Values of a parameter, of which all but the first are `full`: `make test` shows enough with so few."""
    values = list(values)
    return values[:count] + [pytest.param(value, marks=pytest.mark.full) for value in values[count:]]


def choose(items, choice):
    """(the tests to run, those that are left out), in their order.

    `choice`: "all", "covering", "values" (as covering, but also of tests that are marked `full`), "pairs" or "rest".
    The last two leave out what "covering" has.
    """
    if choice == "all":
        return items, []
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    taken = Counter()  # how often each value was
    left_out = ("slow",) if choice == "values" else ("slow", "full")
    covering = {id(item) for group in functions.values() for item in cover(group, taken, left_out)}
    if choice in ("covering", "values"):
        wanted = covering
    elif choice == "pairs":
        wanted = {id(item) for group in functions.values() for item in pair(group, covering)}
    else:
        wanted = {id(item) for item in items} - covering
    return [item for item in items if id(item) in wanted], [item for item in items if id(item) not in wanted]


def cover(items, taken, left_out):
    """Tests of one function without these marks, in which every value of every parameter occurs."""
    items = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    return fewest(items, taken, set().union(*map(values_of, items))) if len(items) > 1 else items


def fewest(items, taken, missing):
    """So many of these tests that all values occur that are still missing."""
    given = {id(item): item.callspec.params.values() for item in items}
    values = {id(item): values_of(item) for item in items}

    def worth(item):
        rare = -sum(taken[id(value)] for value in given[id(item)])
        return len(values[id(item)] & missing), rare

    # A mix of the names, so that other functions pair the same values in other ways.
    left, chosen = mixed(items), []
    while missing:
        best = max(left, key=worth)
        chosen.append(best)
        missing = missing - values[id(best)]
        taken.update(id(value) for value in given[id(best)])
    return chosen


def mixed(items):
    """In an order that has nothing to do with their names, and is the same in every run."""
    return sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))


def values_of(item):
    """The values of a test's parameters; a scheme that is there with several options counts once."""
    callspec = getattr(item, "callspec", None)
    pairs = callspec.params.items() if callspec else ()
    return {(name, id(getattr(value, "scheme", value))) for name, value in pairs}


def pair(items, covering):
    """Tests of one function in which every two values of two parameters meet, but for those that `covering` has."""
    items = [item for item in items if not item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("full")]
    full = [item for item in items if item.get_closest_marker("full")]
    met = {id(item): set(combinations(sorted(values_of(item)), min(2, len(values_of(item))))) for item in quick}
    missing = set().union(*met.values()) - set().union(*(met[id(item)] for item in quick if id(item) in covering))
    left = mixed(item for item in quick if id(item) not in covering)
    chosen = [item for item in left if not met[id(item)]]  # without parameters
    while missing:
        best = max(left, key=lambda item: len(met[id(item)] & missing))
        chosen.append(best)
        missing -= met[id(best)]
    if full and not values_of(full[0]):
        return chosen + full
    return chosen + fewest(full, Counter(), set().union(*map(values_of, full)) - set().union(*map(values_of, quick)))
