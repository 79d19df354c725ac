"""The rows as tables of the documentation, and the one function that puts a table into a page, between two marks."""

from __future__ import annotations

from pathlib import Path

from row import Row, cells, figures

TITLES = ["what", "shmsync, p50 / p99", "floor or peer, p50 / p99", "ratio", "aim", "checked"]
HEADLINES = (  # of the README, at most six: section, how the row and its floor or peer begin, and what the README says
    ("readers", 'publish(wait="all") 4 bytes, 4', "", 'a small model to 4 readers, `publish(wait="all")`'),
    (
        "copy", "publish 100 MB in 14 tensors, 1 thread", "",
        "100 MB to any number of readers, `publish()` with one thread",
    ),
    ("lock", "forwards of 4", "share_memory(), lock, a copy", "forwards of 4 workers, new weights every 5 ms"),
    ("schemes", "SharedMem, 5k parameters, 200", "TorchRL", "200 small tensors to 4 workers, SharedMem scheme"),
    ("collectors", "frames, CartPole, 4 workers, sync", "TorchRL", "frames of CartPole, new weights after every batch"),
    ("ray", "Ray, 100 MB, 1 node, 4 workers, by node", "TorchRL", "100 MB to 4 Ray actors of a node"),
)


def table(rows: list[Row], titles: dict[str, str]) -> str:
    """All rows under the titles of their sections."""
    lines, last = [_line(TITLES), "|---" * len(TITLES) + "|"], None
    for row in rows:
        if row.section != last:
            lines.append(_line([f"**{titles.get(row.section, row.section)}**", *[""] * (len(TITLES) - 1)]))
            last = row.section
        lines.append(_line(cells(row)))
    return "\n".join(lines) + "\n"


def headlines(rows: list[Row]) -> str:
    """The few rows of the README; medians only."""
    lines = ["| work | shmsync | beside | ratio |", "|---|---|---|---|"]
    for section, what, floor, words in HEADLINES:
        found = (row for row in rows if row.section == section and row.ratio)
        row = next((row for row in found if row.what.startswith(what) and row.floor.startswith(floor)), None)
        if row is None or row.ours is None or row.theirs is None or row.ratio is None:
            lines.append(_line([words, "not measured in this run", "", ""]))
            continue
        ours, theirs = (figures((pair[0], pair[0]), row.unit) for pair in (row.ours, row.theirs))
        lines.append(_line([words, ours, f"{row.floor}: {theirs}", f"{row.ratio[0]:.2f}"]))
    return "\n".join(lines) + "\n"


def paste(page: Path, name: str, text: str) -> None:
    """Replace what stands in the page between its marks of this name."""
    begin, end = (f"<!-- {name}: {which} -->\n" for which in ("begin", "end"))
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(
            f"{page} lacks the line {(end if found else begin).strip()!r}: put both marks where the table goes"
        )
    page.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}")


def _line(found: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in found) + " |"
