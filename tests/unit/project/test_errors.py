"""Errors: one tree, unharmed by copies and pickles, and each leads to its entry of the troubleshooting page."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

import shmsync
from shmsync import errors

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]


def test_they_form_one_tree_and_time_outs_are_time_outs():
    for kind in CLASSES:
        assert issubclass(kind, shmsync.ShmSyncError)
        assert kind.__name__ in shmsync.__all__
    for name in ("WriterBusy", "ReaderStalled", "PublishTimeout", "AckTimeout"):
        assert issubclass(getattr(shmsync, name), TimeoutError)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_keeps_what_it_says_on_its_way_between_processes(kind):
    error = kind("late", version=3, missing=[1])
    error.leaves = ("layer.weight",)
    error.add_note("mine") if hasattr(error, "add_note") else None
    for travel in (copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))):
        arrived = travel(travel(error))
        assert type(arrived) is kind and arrived.help == error.help and arrived.__notes__ == error.__notes__
        assert (str(arrived), arrived.version, arrived.missing, arrived.leaves) == ("late", 3, [1], ("layer.weight",))


def test_each_class_and_no_other_has_an_entry_of_the_page():
    section = re.search(r"^## Errors$(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall("^### (.*)$", section, re.MULTILINE)) == {each.__name__ for each in CLASSES}
    home = re.search('^Homepage = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"{home}/blob/main/docs" == errors.DOCUMENTATION
    for kind in CLASSES:
        assert kind("").help == f"{errors.DOCUMENTATION}/troubleshooting.md#{kind.__name__.lower()}"
