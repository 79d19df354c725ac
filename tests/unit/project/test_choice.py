"""Which combinations of parameters run: the covering choice, the pairs, and the rest."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from support.choice import choose

NUMBERS = {"scheme": range(6), "start": range(3), "form": range(4), "slots": range(2)}


def item(name, params, full=False, mark="full"):
    """What choose() asks of a test."""
    return SimpleNamespace(
        nodeid=f"tests/test_it.py::{name}{list(params.values())}" if params else f"tests/test_it.py::{name}",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda asked: True if full and asked == mark else None,
    )


def product(names, full=lambda params: False):
    """A test function with these parameters: one test for each combination."""
    values = {name: [f"{name}{number}" for number in NUMBERS[name]] for name in names}
    every = [dict(zip(names, each, strict=True)) for each in itertools.product(*values.values())]
    return [item("test_it", params, full(params)) for params in every]


def pairs_of(items):
    return {pair for each in items for pair in itertools.combinations(sorted(each.callspec.params.items()), 2)}


@pytest.mark.parametrize("count", range(1, 5))
def test_every_value_occurs_then_every_pair_and_nothing_runs_twice(count):
    for names in itertools.combinations(NUMBERS, count):
        items = product(names)
        covering, pairs, rest = (choose(items, choice)[0] for choice in ("covering", "pairs", "rest"))
        values = {value for each in items for value in each.callspec.params.items()}
        assert {value for each in covering for value in each.callspec.params.items()} == values
        assert pairs_of(covering + pairs) == pairs_of(items)
        assert not {each.nodeid for each in covering} & {each.nodeid for each in rest}
        assert {each.nodeid for each in pairs} <= {each.nodeid for each in rest}
        assert len(covering) + len(rest) == len(items)
        if count > 2:  # else all pairs are all combinations
            assert len(covering) + len(pairs) < len(items) / 1.5


def test_a_full_test_waits_for_the_pairs():
    items = product(["scheme"], full=lambda params: params["scheme"] != "scheme0")
    covering, pairs = (choose(items, choice)[0] for choice in ("covering", "pairs"))
    assert [each.callspec.params["scheme"] for each in covering] == ["scheme0"]
    assert {each.callspec.params["scheme"] for each in pairs} == {f"scheme{n}" for n in range(1, 6)}


def test_values_has_full_tests_too():
    items = [*product(["scheme"], full=lambda params: params["scheme"] == "scheme3"), item("test_one", {}, full=True)]
    assert choose(items, "values")[0] == items
    assert len(choose(items, "covering")[0]) == len(items) - 2


def test_a_slow_test_waits_for_all():
    items = [item("test_training", {}, True, "slow"), item("test_other", {}), *product(["scheme", "form"])]
    chosen = {choice: choose(items, choice)[0] for choice in ("covering", "pairs", "rest", "all")}
    assert {choice for choice, found in chosen.items() if items[0] in found} == {"rest", "all"}


def test_a_full_test_without_parameters_waits_for_the_pairs():
    items = [item("test_training", {}, full=True), item("test_other", {})]
    assert choose(items, "covering")[0] == [items[1]]
    assert choose(items, "pairs")[0] == [items[0]]


def test_of_full_tests_the_pairs_have_each_value_that_no_other_has():
    items = product(["scheme", "start", "form"], full=lambda params: params["scheme"] in ("scheme4", "scheme5"))
    covering, pairs, rest = (choose(items, choice)[0] for choice in ("covering", "pairs", "rest"))
    quick = [each for each in items if each.callspec.params["scheme"] not in ("scheme4", "scheme5")]
    assert pairs_of(covering + pairs) >= pairs_of(quick)
    late = [each.callspec.params["scheme"] for each in pairs if each not in quick]
    assert sorted(late) == ["scheme4", "scheme5"]
    assert {each.callspec.params["scheme"] for each in rest} >= {"scheme4", "scheme5"}
