"""Wrong arguments: what is wanted and what came is said, nothing is made, and nothing is printed at the end."""

from __future__ import annotations

import gc
import inspect
import sys
import warnings

import pytest
import torch
from torch import nn

import shmsync
from shmsync import collectors
from support.processes import segments


def public_classes():
    found = {getattr(shmsync, name) for name in shmsync.__all__} | {collectors.MultiprocessCollector}
    return sorted((each for each in found if inspect.isclass(each)), key=lambda each: each.__name__)


@pytest.fixture
def unraisable(monkeypatch):
    """What Python could not raise and would have printed, and warnings."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(found.exc_value))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield seen
        seen += [each.message for each in warned if issubclass(each.category, ResourceWarning)]
    assert seen == []


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_a_refused_constructor_leaves_nothing_and_says_nothing(cls, unraisable, capfd):
    """Unknown keywords, none, and each parameter in turn with an object that fits nowhere."""
    calls = [{"slot": 2}, {}]
    try:
        names = [each for each in inspect.signature(cls).parameters if each not in ("args", "kwargs")]
    except ValueError:
        names = []
    calls += [{name: object()} for name in names]
    before = segments()
    for kwargs in calls:
        try:
            made = cls(**kwargs)
        except Exception:  # the traceback held it
            pass
        else:
            getattr(made, "close", lambda: None)()
            made = None
        gc.collect()
    assert segments() == before
    assert capfd.readouterr().err == ""


NOT_COUNTS = ["2", 2.0, True, None, [1], 0, -1, 10**6, float("nan")]


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_sizes_that_are_none(value, unraisable):
    wrong_type = isinstance(value, bool) or not isinstance(value, int)
    for name, high in (("slots", 127), ("max_readers", 4096)):
        with pytest.raises(TypeError if wrong_type else ValueError) as error:
            shmsync.Publisher({"t": torch.zeros(2)}, **{name: value})
        for word in (name, repr(value), "1", f"{high:,}"):
            assert word in str(error.value)


def new_publisher(**options):
    return shmsync.Publisher({"t": torch.zeros(2)}, **options)


def new_subscriber(**options):
    return shmsync.Subscriber("nowhere", **options)


TIMEOUTS = ["2", True, [1], -1, float("nan")]
WRONG = {  # the call, the argument and its values, the errors, and what they say
    "timeout of a publisher": (new_publisher, "timeout", TIMEOUTS, (TypeError, ValueError), "timeout"),
    "timeout of a subscriber": (new_subscriber, "timeout", TIMEOUTS, (TypeError, ValueError), "timeout"),
    "device": (new_publisher, "device", ["2", "gpu0", 2.0, True, 3, [1]], (TypeError, ValueError), "device.*'cpu'"),
    "consistency": (new_subscriber, "consistency", [[], None, "PINNED", 3], ValueError, "pinned, optimistic, live"),
    "follow": (new_subscriber, "follow", ["yes"], TypeError, "follow"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_an_argument_cannot_be(what, unraisable):
    call, name, values, kinds, said = WRONG[what]
    for value in values:
        with pytest.raises(kinds, match=said) as error:
            call(**{name: value})
        assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [3, None, ("x",), ("x", 3), ("x", b"1", 2), b"x", ["x", b""]], ids=repr)
def test_handles_that_are_none(value, unraisable):
    with pytest.raises(TypeError, match=r"pub\.handle or the arena's name") as error:
        shmsync.Subscriber(value)
    assert type(value).__name__ in str(error.value)


def test_a_name_of_ones_own_is_told_from_anothers(publisher):
    pub = publisher(nn.Linear(2, 2))
    with pytest.raises(shmsync.ArenaExists, match="this process"):
        shmsync.Publisher(nn.Linear(2, 2), name=pub.name)
