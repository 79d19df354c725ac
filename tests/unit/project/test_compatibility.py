"""Which versions work together, and what the project's metadata says of itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import shmsync
from shmsync import _native
from support.faults.forged import write
from support.weights import stamped

ROOT = Path(__file__).parents[3]
ABI_AT = 8


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_segment_of_another_layout_is_refused_with_both_numbers_and_no_row_is_taken(difference):
    other = _native.ABI + difference
    with shmsync.Publisher(stamped(1)) as pub:
        try:
            write(pub.name, ABI_AT, other.to_bytes(4, "little"))
            for handle in (pub.handle, pub.name):
                with pytest.raises(shmsync.ArenaCorrupt) as caught:
                    shmsync.Subscriber(handle, timeout=0.1)
                assert str(other) in str(caught.value)
                assert str(_native.ABI) in str(caught.value)
        finally:
            write(pub.name, ABI_AT, _native.ABI.to_bytes(4, "little"))
        assert pub.readers() == []
        with shmsync.Subscriber(pub.handle) as sub:
            assert sub.version == 1


def test_the_docs_name_the_layout_number_of_now_and_the_error():
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"(`ABI`, {_native.ABI} now)" in text
    assert "`ArenaCorrupt`" in text


def test_the_readme_of_the_metadata_leads_everywhere_from_anywhere():
    text = metadata.metadata("shmsync").get_payload() or metadata.metadata("shmsync")["Description"]
    links = re.findall(r"\]\(([^)]+)\)", text)
    (home,) = [
        value.partition(", ")[2] for value in metadata.metadata("shmsync").get_all("Project-URL") if "Homepage" in value
    ]
    assert len(links) > 30
    for link in links:
        assert re.match(r"https://|#", link), link
        path = link.removeprefix(f"{home}/blob/main/").removeprefix(f"{home}/raw/main/").partition("#")[0]
        assert link.startswith(("#", "https://")) and (not link.startswith(home) or (ROOT / path).exists()), link
    readme = (ROOT / "README.md").read_text()
    assert {link for link in links if link.endswith(".svg")} == {link for link in links if "/raw/" in link} != set()
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme))
    assert re.findall(r"^```.*?^```", text, re.DOTALL | re.M) == re.findall(r"^```.*?^```", readme, re.DOTALL | re.M)


def test_the_metadata_says_which_pythons_and_where_the_project_is():
    found = metadata.metadata("shmsync")
    classifiers = found.get_all("Classifier")
    for minor in range(10, 15):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert {value.partition(",")[0] for value in found.get_all("Project-URL")} >= {"Homepage", "Changelog", "Issues"}


def test_nothing_says_to_install_it_from_an_index_before_it_is_there():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    texts = [name for name in listed if name.endswith((".md", ".py", ".toml", ".yml"))]
    assert texts or not (ROOT / ".git").exists()
    # With an extra it is for a user who has the package already: pip then adds what the extra needs.
    said = re.compile(r"pip install (?:-\S+ )*['\"]?shmsync(?![\w.-]*\[)\b")
    assert said.search("run `pip install shmsync`")
    wrong = [
        f"{name}: {found[0]}"
        for name in texts
        if (ROOT / name).exists() and name != "tests/unit/project/test_compatibility.py"
        for found in said.finditer((ROOT / name).read_text())
    ]
    assert wrong == []


def test_links_in_code_stay_as_they_are():
    spec = importlib.util.spec_from_file_location("readme_elsewhere", ROOT / "tools" / "readme_elsewhere.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "[a](b.md#c) `x](y)` [`code`](d.py) [e](https://f) ![k](l.svg) [g](#h)\n```\n[i](j)\n```\n"
    assert module.absolute(text, "https://home") == (
        "[a](https://home/blob/main/b.md#c) `x](y)` [`code`](https://home/blob/main/d.py) [e](https://f) "
        "![k](https://home/raw/main/l.svg) [g](#h)\n```\n[i](j)\n```\n"
    )
