"""Wrong arguments: what is wanted and what came is said, nothing is made, and nothing is printed at the end."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch

import shmsync
from shmsync import collectors
from support.processes import segments


def public_classes():
    found = {getattr(shmsync, name) for name in shmsync.__all__} | {collectors.MultiprocessCollector}
    return sorted((each for each in found if inspect.isclass(each)), key=lambda each: each.__name__)


def test_a_refused_constructor_leaves_nothing_and_says_nothing(capfd):
    """Unknown keywords, none, and each parameter in turn with an object that fits nowhere."""
    before = segments()
    for cls in public_classes():
        try:
            names = [each for each in inspect.signature(cls).parameters if each not in ("args", "kwargs")]
        except ValueError:
            names = []
        for kwargs in [{"slot": 2}, {}, *({name: object()} for name in names)]:
            try:
                made = cls(**kwargs)
            except Exception:  # the traceback held it
                pass
            else:
                getattr(made, "close", lambda: None)()
                made = None
        gc.collect()
    assert segments() == before
    assert capfd.readouterr().err == ""  # of a destructor, say


@pytest.mark.parametrize("cls", [shmsync.Publisher, shmsync.Subscriber, shmsync.Workers])
def test_an_unknown_keyword_names_the_nearest_known_one(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(\) has no argument timeouts=; did you mean timeout=\?"):
        cls(timeouts=1.0)
    with pytest.raises(TypeError, match=r"has no argument quite=; there are .*timeout"):
        cls(quite=1.0)


def new_publisher(**options):
    return shmsync.Publisher({"t": torch.zeros(2)}, **options)


def new_subscriber(**options):
    return shmsync.Subscriber("nowhere", **options)


COUNTS = ["2", True, None, 0, -1, 10**6]
TIMEOUTS = ["2", True, [1], -1, float("nan")]
WRONG = {  # the call, the argument and its values, and what the error says besides the value
    "slots": (new_publisher, "slots", COUNTS, "slots.*127"),
    "max_readers": (new_publisher, "max_readers", COUNTS, "max_readers.*4,096"),
    "timeout of a publisher": (new_publisher, "timeout", TIMEOUTS, "timeout"),
    "timeout of a subscriber": (new_subscriber, "timeout", TIMEOUTS, "timeout"),
    "device": (new_publisher, "device", ["2", "gpu0", 2.0, True, 3, [1]], "device.*'cpu'"),
    "consistency": (new_subscriber, "consistency", [[], None, "PINNED", 3], "pinned, optimistic, live"),
    "follow": (new_subscriber, "follow", ["yes"], "follow"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_an_argument_cannot_be(what):
    call, name, values, said = WRONG[what]
    for value in values:
        with pytest.raises((TypeError, ValueError), match=said) as error:
            call(**{name: value})
        assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [3, None, ("x", 3), ("x", b"1", 2), b"x"], ids=repr)
def test_handles_that_are_none(value):
    with pytest.raises(TypeError, match=r"pub\.handle or the arena's name") as error:
        shmsync.Subscriber(value)
    assert type(value).__name__ in str(error.value)
