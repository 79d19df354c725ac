"""The rows as tables of the documentation, and the one function that puts a table into a page, between two marks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.row import Row, cells, figures, line

TITLES = ["what", "shmsync, p50 / p99", "floor or peer, p50 / p99", "ratio", "aim", "checked"]
HEADLINES = (  # of the README, at most six: section, how the row and its floor or peer begin, and what the README says
    ("readers", 'publish(wait="all") 50 KB, 4', "", '50 KB to 4 readers, `publish(wait="all")`'),
    (
        "copy",
        "publish 100 MB in 14 tensors, 1 thread",
        "",
        "100 MB to any number of readers, `publish()` with one thread",
    ),
    ("lock", "forwards of 4", "share_memory(), lock, a copy", "forwards of 4 workers, new weights every 5 ms"),
    (
        "schemes",
        "SharedMem, 5k parameters, 200",
        "TorchRL",
        "20 KB in 200 tensors to 4 workers, `SharedMemWeightSyncScheme`",
    ),
    ("collectors", "frames, CartPole, 4 workers, sync", "TorchRL", "frames of CartPole, new weights after every batch"),
    ("ray", "Ray, 100 MB, 1 node, 4 workers, by node", "TorchRL", '100 MB to 4 Ray actors of a node, `fan_out="node"`'),
)


def table(rows: list[Row], titles: dict[str, str]) -> str:
    """All rows, under the titles of their sections if they have one."""
    lines, last = [_line(TITLES), "|---" * len(TITLES) + "|"], ""
    for row in rows:
        if row.section != last:
            lines.append(_line([f"**{titles.get(row.section, row.section)}**", *[""] * (len(TITLES) - 1)]))
            last = row.section
        lines.append(_line(cells(row)))
    return "\n".join(lines) + "\n"


def show(rows: Iterable[Row], path: Path) -> None:
    """Print each row as soon as it is known; then write all of them to path.json and path.md, and judge them."""
    known = []
    for row in rows:
        print(line(row), flush=True)
        known.append(row)
    save(path, [row.as_json() for row in known], table(known, {}))
    judge(known)


def judge(rows: list[Row]) -> None:
    """End with status 1 if a row failed, or had other bytes than expected."""
    if bad := [row.what for row in rows if row.is_bad]:
        raise SystemExit(f"{len(bad)} rows failed: {'; '.join(bad)}")


def save(path: Path, found: Any, text: str) -> None:
    """The results of a run as path.json and path.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1))
    path.with_suffix(".md").write_text(text)


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


def chart(title: str, bars: dict[str, tuple[float, str]], ours: str) -> str:
    """Bars as SVG, the shortest first: microseconds and the ratio, by name. `ours` has another colour."""
    label, width, height, top = 330, 330.0, 34, 34
    longest = max(time for time, _ in bars.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{top + height * len(bars) + 8}" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold">{title}</text>',
    ]
    for number, (name, (time, ratio)) in enumerate(sorted(bars.items(), key=lambda bar: bar[1])):
        y, long = top + height * number, max(2.0, width * time / longest)
        said = f"{figures((time, time), 'us')} ({ratio} x)"
        colour = "#d9480f" if name == ours else "#868e96"
        lines += [
            f'<text x="{label - 10}" y="{y + 20}" text-anchor="end">{name}</text>',
            f'<rect x="{label}" y="{y + 5}" width="{long:.0f}" height="{height - 12}" fill="{colour}"/>',
            f'<text x="{label + long + 8:.0f}" y="{y + 20}">{said}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


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
