"""What a release needs: addresses that agree, a licence, workflows that call targets of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmsync import errors

ROOT = Path(__file__).parents[3]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_addresses_begin_with_the_homepage():
    home = re.search(r'^Homepage = "(.+)"$', PYPROJECT, re.MULTILINE)[1]
    assert f"{home}/blob/main/docs" == errors.DOCUMENTATION
    urls = PYPROJECT.partition("[project.urls]")[2].partition("\n\n")[0]
    assert [url for url in re.findall(r'"(.+)"', urls) if not url.startswith(home)] == []


def test_the_licence_and_the_version_stand_in_the_citation_too():
    citation = (ROOT / "CITATION.cff").read_text()
    for name in ("license", "version"):
        value = re.search(rf'^{name} = "(.+)"$', PYPROJECT, re.MULTILINE)[1]
        assert f"\n{name}: {value}\n" in citation


def test_workflows_call_targets_that_exist():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with shmsync[guides]")
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            for step in job["steps"]:
                command = re.sub(r"\$\{\{.*?\}\}", "", step.get("run", ""))
                for words in re.findall(r"\bmake ([^&;\n]+)", command):
                    called |= {word for word in words.split() if "=" not in word}
    assert called and called <= targets


def test_the_issue_template_asks_for_the_doctor():
    assert "shmsync doctor --json" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "fault.yml").read_text()
