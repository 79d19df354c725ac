"""What everything costs beside its floor or a peer, in one table, in at most ten minutes.

    make bench                                the table
    make bench ARGS="--sections copy readers" some of it: machine, calls, readers, ...
    make bench ARGS=--docs                    and puts it into docs/performance.md, its headlines into README.md
    make bench ARGS="--docs --from bench-results/table.json"    the same with the figures of an earlier run
    make bench ARGS="--seconds 120"           in another time; what does not fit is left out, and says so

The machine's own speed comes first: figures move by three times between machines, ratios much less. Each section has a
process of its own, and all contestants of a row take turns in it. A section that lacks a package is a row that says so.
One that fails or does not end is a row that says so too, and then the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import household
import page
from row import FAILED, LEFT_OUT, MISSING, Row, cells
from sections import SECTIONS, Section

HERE = Path(__file__).resolve().parent
MOST = 600.0  # seconds of a run of all
GRACE = 10.0  # seconds that the last section may take beyond its part, to start and to end
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def lacking(section: Section) -> list[str]:
    """Packages; looked for as a section would, not in this folder, which has a torchrl.py."""
    paths = [each for each in sys.path if Path(each).resolve() != HERE]
    return [name for name in section.needs if importlib.machinery.PathFinder.find_spec(name, paths) is None]


def run(name: str, section: Section, seconds: float, patience: float) -> list[Row]:
    """Its rows. After `patience` seconds it is ended, with all that it started."""
    if absent := lacking(section):
        return [Row(section.title, trouble=f"{MISSING}: {', '.join(absent)}", section=name)]
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder, "rows"), Path(folder, "stderr")
        result.touch()
        command = [
            sys.executable,
            str(HERE / "section.py"),
            section.module,
            str(seconds),
            str(time.time()),
            str(result),
        ]
        trouble = ""
        with errors.open("w") as stderr:
            # From an empty folder: Ray puts the working directory on the path of its actors.
            process = subprocess.Popen(command, stdout=stderr, stderr=stderr, cwd=folder, start_new_session=True)
            try:
                if status := process.wait(patience):
                    trouble = f"{FAILED}: {_last_words(errors, status)}"
            except subprocess.TimeoutExpired:
                trouble = f"{FAILED}: no end after {patience:.0f} s"
            finally:
                household.end(process)
        whole = [line for line in result.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows = [Row.from_json(json.loads(line)) for line in whole]
        if trouble:
            print(errors.read_text()[-4000:], file=sys.stderr, flush=True)
            rows.append(Row(section.title, trouble=trouble))
    rows = rows or [Row(section.title, trouble=f"{FAILED}: it gave no row")]
    for row in rows:
        row.section = name
    return rows


def _last_words(errors: Path, status: int) -> str:
    lines = [line for line in errors.read_text().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else f"exit status {status}, without a word"


@contextmanager
def environment() -> Iterator[None]:
    """Of all that starts from here on: one thread each, and this folder on its path, which fork servers lack."""
    before = dict(os.environ)
    os.environ |= dict.fromkeys(ONE_THREAD, "1")
    os.environ |= {"PYTHONWARNINGS": "ignore", "RL_WARNINGS": "0", "RL_LOGGING_LEVEL": "WARNING"}
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else whatever else runs here slows actors alone
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = folder  # TorchRL leaves a folder for each replay buffer
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(names: list[str], seconds: float, patience: float | None) -> dict[str, Any]:
    """Section after section; time that one does not need is for those after it, and the end is the end."""
    began = time.monotonic()
    whole = sum(SECTIONS[name].seconds for name in names)
    end = began + seconds * whole / sum(each.seconds for each in SECTIONS.values())
    rows: list[Row] = []
    others: list[float] = []
    for number, name in enumerate(names):
        others.append(household.busy())
        left = end - time.monotonic()
        part = max(0.0, left - GRACE) * SECTIONS[name].seconds / sum(SECTIONS[each].seconds for each in names[number:])
        if patience is None and left < GRACE:
            found = [Row(SECTIONS[name].title, trouble=f"{LEFT_OUT}: the {seconds:.0f} s are over", section=name)]
        else:
            found = run(name, SECTIONS[name], part, patience or min(2 * part + 3 * GRACE, left))
        for row in found:
            print("  ".join(cell for cell in cells(row) if cell), flush=True)
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
        "--patience", type=float, help="until a section counts as hung; default: so that all end in time"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--docs", action="store_true", help="put the table into docs/performance.md and README.md")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="where docs/ and README.md are")
    parser.add_argument("--from", dest="earlier", type=Path, help="measure nothing: the table.json of an earlier run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it the section
    household.adopt_orphans()
    if arguments.earlier is not None:
        found = json.loads(arguments.earlier.read_text())
    else:
        os.environ["BENCH_RESULTS"] = str(arguments.out.resolve())  # for plots
        with environment():
            found = measure(
                [name for name in SECTIONS if name in arguments.sections], arguments.seconds, arguments.patience
            )
    rows = [Row.from_json(each) for each in found["rows"]]
    titles = {name: section.title for name, section in SECTIONS.items()}
    text = f"{about(found['machine'])}\n\n{page.table(rows, titles)}"
    print(f"\n{text}")
    if arguments.earlier is None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "table.json").write_text(json.dumps(found, indent=1))
        (arguments.out / "table.md").write_text(text)
    if arguments.docs:
        page.paste(arguments.root / "docs" / "performance.md", "table", text)
        page.paste(arguments.root / "README.md", "headlines", page.headlines(rows))
        if (drawing := page.chart(rows)) is not None:
            (arguments.root / "docs" / "plots" / "send.svg").write_text(drawing)
    if bad := [row.what for row in rows if row.is_bad]:
        raise SystemExit(f"{len(bad)} rows failed: {'; '.join(bad)}")


if __name__ == "__main__":
    main()
