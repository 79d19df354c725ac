"""All storms, one after the other, and one table of what was tried, what was broken, and how long recovery took.

    python -m support.storms.soak --seconds 3600 --seed 7

Each storm is a separate process. Once all had their turn, the two in which the most happens begin again with other
seeds, until the time is over: a worker of Ray needs 20 s to come back, one of the engine 0.1 s. With the same seed each
storm makes the same decisions again. The exit status is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.storms.collectors import COLLECTORS
from support.storms.engine import ENGINES
from support.storms.storm import SENDS, STORMS

TARGETS = [*ENGINES, *STORMS, *COLLECTORS]
BEGIN, END = "<!-- soak -->", "<!-- end of soak -->"
NO_FAULTS = {
    *SENDS,
    "send_async",
    "failed",
    "kills",
    "sections",
    "glances",
    "steps",
    "worker restarts",
    "trainer restarts",
    "looks at what is used",
    "frames",
}
BROKEN = {  # what ends a storm, and the words by which it is known
    "torn accepted": "saw weights that are (torn|wrong)",
    "wrong versions": "backwards|computes with|returned version",
    "wrong names": "names worker|does not name|nobody did",
    "late returns": "after its deadline",
    "leaks": "left behind|are left|is left|at first",
}


class Tally:
    """What all storms together have seen."""

    def __init__(self):
        self.counts, self.broken, self.recovery = Counter(), Counter(), {}
        self.targets = []
        self.pace = {}  # faults in a second, of the last storm of each target
        self.worst_overrun = 0.0

    def add(self, name, found, seconds):
        before = self.faults
        self.counts.update(found["counts"])
        self.pace[name] = (self.faults - before) / seconds
        self.worst_overrun = max(self.worst_overrun, found["worst overrun"])
        for kind, seconds in found["recovery"].items():
            self.recovery[kind] = max(self.recovery.get(kind, 0.0), seconds)
        if name not in self.targets:
            self.targets.append(name)

    def blame(self, output):
        """Count the violation that a storm has printed."""
        what = output.partition("VIOLATION: ")[2]
        kinds = [kind for kind, words in BROKEN.items() if re.search(words, what)]
        self.broken[kinds[0] if kinds else "other"] += 1

    def table(self):
        """As Markdown."""
        counts = self.counts
        lines = ["| | |", "|---|---|"]
        figures = {
            "targets": ", ".join(self.targets),
            "publishes and sends": f"{sum(counts[each] for each in SENDS):,}",
            "of them failed, as they had to": f"{counts['failed']:,}",
            "sections": f"{self.sections:,}",
            "of them with every element checked": f"{counts['sections']:,}",
            "faults": f"{self.faults:,}",
            "new workers, new trainers": f"{counts['worker restarts']:,}, {counts['trainer restarts']:,}",
            **{each: self.broken[each] for each in (*BROKEN, "hangs", "other")},
            "worst return after a deadline": f"{max(self.worst_overrun, 0.0) * 1000:.0f} ms",
        }
        lines += [f"| {what} | {value} |" for what, value in figures.items()]
        lines += ["", "| fault | how often | worst recovery |", "|---|---|---|"]
        for kind in self.kinds():
            worst = f"{self.recovery[kind]:.2f} s" if kind in self.recovery else "–"
            lines.append(f"| {kind} | {counts[kind]:,} | {worst} |")
        return "\n".join(lines)

    def busiest(self):
        """The two targets in which the most happens."""
        return sorted(self.pace, key=self.pace.__getitem__)[-2:]

    def kinds(self):
        return sorted(kind for kind in self.counts if kind not in NO_FAULTS)

    @property
    def faults(self):
        return sum(self.counts[kind] for kind in self.kinds())

    @property
    def sections(self):
        return self.counts["sections"] + self.counts["glances"]


def storm(name, seconds, seed, tally):
    """One storm, in a process; did it keep all promises?"""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures")
        command = [sys.executable, "-m", "support.storms.storm", "--of", name, "--seconds", str(seconds)]
        command += ["--seed", str(seed), "--figures", str(figures)]
        done = subprocess.run(command, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode == 0 and figures.exists():
            tally.add(name, json.loads(figures.read_text()), time.monotonic() - began)
            return True
        print(done.stdout, flush=True)
        if "Timeout (" in done.stdout:  # the watchdog of the storm
            tally.broken["hangs"] += 1
        else:
            tally.blame(done.stdout)
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--turn", type=float, default=None, help="seconds of one storm; by default enough for all")
    parser.add_argument("--of", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--docs", default=None, help="a page that gets the table, between its marks")
    given = parser.parse_args()
    seed = secrets.randbits(31) if given.seed is None else given.seed
    turn = given.turn or min(600.0, max(4.0, given.seconds / len(given.of)))
    print(f"{given.seconds:g} s over {len(given.of)} targets, {turn:.0f} s each at a time, seed {seed}", flush=True)
    tally, start, number = Tally(), time.monotonic(), 0
    while number < len(given.of) or time.monotonic() - start < given.seconds:
        if number < len(given.of):
            name = given.of[number]
        else:
            again = tally.busiest() or given.of
            name = again[number % len(again)]
        kept = storm(name, turn, seed + number, tally)
        number += 1
        so_far = f"{tally.faults:,} faults, {tally.sections:,} sections so far"
        print(f"{time.monotonic() - start:6.0f} s: {name} {'ok' if kept else 'BROKE A PROMISE'}; {so_far}", flush=True)
    options = [f"--turn {given.turn:g}"] if given.turn else []
    options += [f"--of {' '.join(given.of)}"] if given.of != TARGETS else []
    said = f"`make soak SECONDS={given.seconds:g} SEED={seed}" + (f" ARGS='{' '.join(options)}'`" if options else "`")
    took = time.monotonic() - start
    text = f"{said}, {took / 60:.0f} minutes on {os.cpu_count()} cores:\n\n{tally.table()}"
    print(text)
    if given.docs is not None:
        page = Path(given.docs)
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 1 if tally.broken.total() else 0


if __name__ == "__main__":
    sys.exit(main())
