"""What everything costs beside its floor or a peer, in one table, in at most ten minutes.

    make bench                                the table
    make bench ARGS="--sections copy readers" some of it: machine, calls, readers, ...
    make bench ARGS=--docs                    and puts it into docs/performance.md, its headlines into README.md
    make bench ARGS="--docs --from bench-results/table.json"    the same with the figures of an earlier run
    make bench ARGS="--seconds 120"           in another time; rows that do not fit are marked as left out

The machine's own speed comes first: figures move by three times between machines, ratios much less. Each section has a
separate process, and all contestants of a row take turns in it. A section that lacks a package is a row with the
package's name. One that fails or does not end is a row with the reason, and then the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import child, machine, page
from common.environment import environment, installed
from common.row import FAILED, LEFT_OUT, MISSING, Row, line
from sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parents[1]
MOST = 600.0  # seconds of a run of all
GRACE = 10.0  # seconds that the last section may take beyond its part, to start and to end


def run(name: str, section: Section, seconds: float, patience: float) -> list[Row]:
    """The section's rows. After `patience` seconds it is ended, with every process that it started."""
    if absent := [package for package in section.needs if not installed(package)]:
        return [Row(section.title, trouble=f"{MISSING}: {', '.join(absent)}", section=name)]
    with environment(), tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows")
        result.touch()
        words = ("-m", "common.section", section.module, seconds, time.time(), result)
        trouble = child.run(words, patience, machine.end)
        whole = [line for line in result.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows = [Row.from_json(json.loads(line)) for line in whole]
    if trouble:
        rows.append(Row(section.title, trouble=f"{FAILED}: {trouble}"))
    rows = rows or [Row(section.title, trouble=f"{FAILED}: it gave no row")]
    for row in rows:
        row.section = name
    return rows


def measure(names: list[str], seconds: float, patience: float | None) -> dict[str, Any]:
    """Run the sections one after the other. Unused time goes to later sections; the common deadline stays."""
    began = time.monotonic()
    whole = sum(SECTIONS[name].seconds for name in names)
    end = began + seconds * whole / sum(each.seconds for each in SECTIONS.values())
    rows: list[Row] = []
    others: list[float] = []
    for number, name in enumerate(names):
        others.append(machine.busy())
        left = end - time.monotonic()
        part = max(0.0, left - GRACE) * SECTIONS[name].seconds / sum(SECTIONS[each].seconds for each in names[number:])
        if patience is None and left < GRACE:
            found = [Row(SECTIONS[name].title, trouble=f"{LEFT_OUT}: the {seconds:.0f} s are over", section=name)]
        else:
            found = run(name, SECTIONS[name], part, patience or min(2 * part + 3 * GRACE, left))
        for row in found:
            print(line(row), flush=True)
        rows += found
    return {
        "machine": {
            "processors": os.cpu_count(), "kernel": platform.release(), "arch": platform.machine(),
            "python": platform.python_version(), "torch": version("torch"), "load": os.getloadavg()[0],
            "others_busy": (min(others), max(others)), "seconds": time.monotonic() - began,
        },
        "rows": [row.as_json() for row in rows],
    }  # fmt: skip


def about(machine: dict[str, Any]) -> str:
    least, most = machine["others_busy"]
    return (
        f"{machine['processors']} processors, {machine['arch']}, kernel {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine['torch']}; {machine['seconds']:.0f} s. "
        f"Other programs kept {least:.0%} to {most:.0%} of the processors busy between the sections; "
        f"load at the end {machine['load']:.1f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--seconds", type=float, default=MOST, help=f"of a run of all sections; default {MOST:.0f}")
    parser.add_argument(
        "--patience", type=float, help="seconds of a section that hangs; default: so that all end in time"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--docs", action="store_true", help="put the table into docs/performance.md and README.md")
    parser.add_argument("--root", type=Path, default=ROOT, help="where docs/ and README.md are")
    parser.add_argument("--from", dest="earlier", type=Path, help="measure nothing: the table.json of an earlier run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the section
    machine.adopt_orphans()
    if arguments.earlier is not None:
        found = json.loads(arguments.earlier.read_text())
    else:
        os.environ["BENCH_RESULTS"] = str(arguments.out.resolve())  # for plots
        names = [name for name in SECTIONS if name in arguments.sections]
        found = measure(names, arguments.seconds, arguments.patience)
    rows = [Row.from_json(each) for each in found["rows"]]
    titles = {name: section.title for name, section in SECTIONS.items()}
    text = f"{about(found['machine'])}\n\n{page.table(rows, titles)}"
    print(f"\n{text}")
    if arguments.earlier is None:
        page.save(arguments.out / "table", found, text)
    if arguments.docs:
        page.paste(arguments.root / "docs" / "performance.md", "table", text)
        page.paste(arguments.root / "README.md", "headlines", page.headlines(rows))
    page.judge(rows)


if __name__ == "__main__":
    main()
