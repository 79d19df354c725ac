"""Every error leads to its entry of the troubleshooting page, which says the cause, the words and the next step."""

from __future__ import annotations

import copy
import os
import pickle
import re
import sys
import traceback
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shmsync
from shmsync import errors
from shmsync.engine.outcome import Failure

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ShmSyncError)]


def entries():
    """{heading: text} of the page."""
    parts = re.split(r"^#{2,4} (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


every_class = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


@every_class
def test_it_has_an_entry_with_what_it_says_the_cause_and_the_next_step(kind):
    entry = entries()[kind.__name__]
    for part in ("**It says:**", "**Why:**", "**Next:**"):
        assert len(entry.partition(part)[2].split("**")[0].split()) >= 4, part


@every_class
def test_it_leads_there_by_attribute_note_and_docstring(kind):
    error = kind("the arena 'a' is full")
    assert error.help == f"{errors.DOCUMENTATION}/troubleshooting.md#{kind.__name__.lower()}"
    assert str(error) == "the arena 'a' is full" == error.args[0]  # programs read these
    assert error.__notes__ == [f"help: {error.help}"]
    assert f"troubleshooting.md#{kind.__name__.lower()}" in kind.__doc__


@every_class
def test_it_still_does_after_a_journey(kind):
    error = kind("late", version=3, missing=[1])
    error.leaves = ("layer.weight",)
    for travel in (copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))):
        arrived = travel(travel(error))
        assert type(arrived) is kind and arrived.help == error.help and arrived.__notes__ == error.__notes__
        assert (str(arrived), arrived.version, arrived.missing, arrived.leaves) == ("late", 3, [1], ("layer.weight",))


def test_the_address_is_that_of_the_project():
    given = re.findall(r'^Documentation = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert given and given[0].startswith(errors.DOCUMENTATION)


def test_a_class_of_ones_own_leads_where_its_parent_does():
    class Mine(shmsync.WriterBusy):
        pass

    assert Mine("busy").help.endswith("#writerbusy")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python shows the notes of an exception from 3.11 on")
def test_a_traceback_ends_with_it():
    with pytest.raises(shmsync.ArenaNotFound) as caught:
        shmsync.Subscriber(f"no-such-arena-{os.getpid()}", timeout=0)
    error = caught.value
    assert traceback.format_exception(error)[-1] == f"help: {error.help}\n"
    error.add_note("mine")  # and those of others are left alone
    assert error.__notes__[1:] == ["mine"]
    for travel in (copy.copy, lambda error: pickle.loads(pickle.dumps(error))):
        assert travel(error).__notes__ == error.__notes__


def test_the_summary_of_a_workers_error_is_one_line():
    assert "\n" not in Failure.of(shmsync.WriterBusy("busy")).summary


def test_an_entry_for_a_class_that_is_gone_would_be_noticed():
    section = re.search(r"^## Errors$(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall("^### (.*)$", section, re.MULTILINE)) == {each.__name__ for each in CLASSES}


def test_each_anchor_is_in_the_page_as_the_site_makes_it():
    pytest.importorskip("material", reason="the site needs mkdocs-material, which shmsync[docs] brings")
    markdown = pytest.importorskip("markdown", reason="the site needs markdown, which shmsync[docs] brings")
    from mkdocs.config import load_config

    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"))
    made = markdown.Markdown(extensions=config["markdown_extensions"], extension_configs=config["mdx_configs"])

    found = set()

    class Ids(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.add(dict(attributes).get("id"))

    Ids().feed(made.convert(PAGE.read_text()))
    assert {kind("").help.partition("#")[2] for kind in CLASSES} <= found
