"""A figure that stands on several pages is the same on each: the tables of docs/performance.md are its source.

A sentence that quotes the table has the row's name in a comment behind the figure: `1.12<!-- name of the row -->`. One
that quotes the peers has the peer and the size, `2.09<!-- Ray: 1 MB in 14 tensors, 4 workers -->`; one that quotes what
they do after a SIGKILL has `<!-- Ray: SIGKILL -->`.
After a new run the failure of this test lists the figures to correct.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
FIGURE = r"\d[\d,]*(?:\.\d+)?"
QUOTED = re.compile(rf"({FIGURE})(?: (?:ns|µs|ms|s|MB))?<!-- (.+?) -->")
SLOWER = {  # what the README names as slower: how the row and its floor or peer begin
    "1 MB copied by two threads": ("publish 1 MB in 14 tensors, 2 threads", "torch.copy_"),
    "a send of 200 small tensors": ("SharedMem, 5k parameters, 200 tensors, 4 workers", "ping-pong"),
    "environments that sleep in turns": ("frames, sleeps 1 ms, 2 workers x 4", "AsyncVectorEnv"),
    "1 MB over Ray to another node": ("Ray, 1 MB, 2 nodes, 4 workers, to each worker", "TorchRL"),
}


def between(page, mark):
    text = (ROOT / page).read_text()
    return text.partition(f"<!-- {mark}: begin -->\n")[2].partition(f"<!-- {mark}: end -->")[0]


def rows(text):
    """The cells of each line of a table, without bold."""
    lines = [line.replace("**", "") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


TABLE = [row for row in rows(between("docs/performance.md", "table")) if len(row) == 6]


def median(cell):
    """The median and its unit, of "174 / 596 µs", "478 µs" or "one forward: 1.26 / 1.71 ms"; "" for none."""
    found = re.search(rf"({FIGURE})(?: / {FIGURE})?( \S+)?$", cell)
    return "" if found is None else f"{found[1]}{found[2] or ''}"


def name(cell):
    """The name of a floor or peer."""
    return cell.rpartition(": ")[0]


def measured(what, beside):
    """(our median, the other side's median) of the row of this name; None if the table has no such row."""
    found = (row for row in TABLE if row[0] == what and name(row[2]) == beside)
    return next(((median(row[1]), median(row[2])) for row in found), None)


def peers():
    """The figures of each peer, by "peer: size" and "peer: SIGKILL"."""
    found, size = {}, ""
    for row in rows(between("docs/performance.md", "peers"))[1:]:
        if not any(row[1:]):
            size = row[0]
        else:
            found[f"{row[0]}: {size}"] = {figure for cell in row[1:] for figure in re.findall(FIGURE, cell)}
    for row in rows(between("docs/comparison.md", "peers"))[1:]:
        found[f"{row[0]}: SIGKILL"] = set(re.findall(FIGURE, row[-1]))
    return found


PEERS = peers()


def quotations(text):
    """(the figure, the row's name, the figures of the rows of this name) of each quotation."""
    for figure, what in QUOTED.findall(text):
        found = {median(cell).partition(" ")[0] for row in TABLE if row[0] == what for cell in row[1:4]}
        yield figure, what, found | PEERS.get(what, set())


def test_the_table_is_read():
    assert len(TABLE) > 100
    assert measured('publish(wait="all") 4 bytes, 4 readers', "one-byte ping-pong") is not None
    assert median("a: 2.14 / 2.56 ms") == "2.14 ms" and median("4,880 / 3,473 /s") == "4,880 /s"
    assert median("0.95 / 0.96") == "0.95" and median("478 µs") == "478 µs" and median("ok") == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_quoted_figure_is_that_of_its_row(page):
    found = quotations(page.read_text())
    assert [f"{figure} of {what!r}: {row}" for figure, what, row in found if figure not in row] == []


def test_another_figure_would_be_noticed():
    row = next(row for row in TABLE if row[0] == "attach to 1 GB")
    right = median(row[1])
    ((figure, _, found),) = quotations(f"{right}<!-- attach to 1 GB -->")
    assert figure in found
    for wrong in ("0.001 µs<!-- attach to 1 GB -->", f"{right}<!-- attach to 2 GB -->"):
        ((figure, _, found),) = quotations(wrong)
        assert figure not in found


def test_the_ratios_of_the_peers_are_the_same_on_both_pages():
    titles, *short = rows(between("docs/comparison.md", "peers"))
    assert len(short) > 10
    for peer, *ratios in short:
        for size, ratio in zip(titles[1:-1], ratios[:-1], strict=True):
            assert ratio in PEERS[f"{peer}: {size}"], (peer, size)


def test_the_headlines_of_the_readme_are_rows_of_the_table():
    known = {(median(row[1]), name(row[2]), median(row[2]), median(row[3])) for row in TABLE}
    headlines = rows(between("README.md", "headlines"))[1:]
    assert len(headlines) == 6
    shown = [row for row in headlines if len(row) == 4 and not row[1].startswith("not measured")]
    assert [row for row in shown if (row[1], name(row[2]), median(row[2]), row[3]) not in known] == []


def test_the_bars_of_the_readme_are_those_of_the_peers():
    """The chart stays as it is when a run has not measured all of its bars."""
    drawing = (ROOT / "docs" / "plots" / "peers.svg").read_text()
    title, *texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawing)
    bars = {bar: text.partition(" (")[0] for bar, text in zip(texts[::2], texts[1::2], strict=True)}
    place = title.partition(":")[0]
    table = rows(between("docs/performance.md", "peers"))
    begin = next(number for number, row in enumerate(table) if row[0] == place and not any(row[1:]))
    found = {row[0]: median(row[1]) for row in itertools.takewhile(lambda row: any(row[1:]), table[begin + 1 :])}
    assert len(bars) > 5
    assert bars == {bar: found[bar] for bar in bars}


@pytest.mark.parametrize("said", SLOWER)
def test_the_readme_calls_slower_what_is_slower(said):
    assert said in (ROOT / "README.md").read_text()
    what, beside = SLOWER[said]
    found = [row for row in TABLE if row[0].startswith(what) and row[2].startswith(beside)]
    ratios = [float(median(row[3]).replace(",", "")) for row in found if median(row[3])]
    if ratios:
        assert min(ratios) < 1 if "/s" in found[0][1] else max(ratios) > 1


def test_the_oldest_versions_are_the_same_on_each_page():
    readme = re.search(r"Linux ([\d.]+), Python ([\d.]+) and PyTorch ([\d.]+)", (ROOT / "README.md").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    table = (ROOT / "docs" / "compatibility.md").read_text()
    linux, python, torch = readme.groups()
    assert f'requires-python = ">={python}"' in project and f'"torch>={torch}"' in project
    for words in (f"Linux {linux} or newer", f"CPython {python} to", f"| PyTorch | {torch} or newer |"):
        assert words in table
    assert f"shmsync needs {linux}" in (ROOT / "docs" / "guides" / "containers.md").read_text()
    assert f"Python {python} or newer" in (ROOT / "CONTRIBUTING.md").read_text()
