#!/usr/bin/env python3
"""Run the litmus tests of this folder with herd7: every base test must be "never", every mutation observable.

A test is a file `<name>.<model>.litmus`. A line (or, in assembly, a cell) may end with a marker

    // SYNC pin.fence => drop => acq_rel          in C
    (* SYNC pin.fence => drop => DMB ISHLD *)     in assembly

which names the line of the native code that it stands for, and then its mutations, one at a time: `drop`
removes the statement, a memory order replaces the statement's own, anything else is the new instruction.
"Observable" means that the condition can come true or that plain memory is raced for.

Exit status: 0 as expected, or herd7 is absent; 1 on any surprise.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = {"c11": "rc11.cat", "aarch64": "aarch64.cat", "x86_64": "x86tso-mixed.cat"}
ORDERS = {"relaxed", "acquire", "release", "acq_rel", "seq_cst"}
MARKER = re.compile(r"(?://|\(\*)\s*SYNC\s+(?P<name>[a-z.]+)(?P<rest>[^|;]*?)\s*(?:\*\)|$)")


@dataclass(frozen=True)
class Case:
    """One text for herd7 and what must come out: the base test, or one mutation of it."""

    test: str
    mutation: str  # empty for the base test
    text: str


def mutate(statement: str, change: str) -> str:
    """The statement (C) or instruction (assembly) after one mutation, never equal to what it was."""
    if change == "drop":
        return ""
    if change not in ORDERS:
        return change
    changed, count = re.subn(r"memory_order_\w+", f"memory_order_{change}", statement)
    if count != 1 or changed == statement:
        raise ValueError(f"cannot weaken {statement!r} to {change}")
    return changed


def cases(path: Path) -> list[Case]:
    """The base text without its markers, and one text per mutation."""
    pieces: list[str] = []  # the file cut into statements, cells and what lies between
    marked: list[tuple[int, str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        for piece in re.split(r"(\||;\s*$)", line) if not path.name.endswith(".c11.litmus") else [line]:
            found = MARKER.search(piece)
            if found:
                changes = [c.strip() for c in found["rest"].split("=>")[1:]]
                marked.append((len(pieces), found["name"], changes))
                piece = piece[: found.start()].rstrip()
            pieces.append(piece)
        pieces.append("\n")
    name = path.name.removesuffix(".litmus")
    out = [Case(name, "", "".join(pieces))]
    for at, marker, changes in marked:
        # Which thread it is: markers of one pair carry the same name on both sides.
        for change in changes:
            text = [*pieces[:at], mutate(pieces[at], change), *pieces[at + 1 :]]
            was = re.sub(r"\s+", " ", pieces[at]).strip()
            out.append(Case(name, f"{marker}: {short(was)} => {change}", "".join(text)))
    return out


def short(statement: str) -> str:
    """A C statement in few words, for the table; assembly stays as it is."""
    call = re.search(r"atomic_(\w+?)(?:_explicit)?\((?:(\w+),)?.*memory_order_(\w+)", statement)
    return " ".join(filter(None, (call[1], call[2], call[3]))) if call else statement


def observe(herd: str, case: Case) -> tuple[str, str]:
    """("never" | "observable" | "error", herd7's own words)."""
    model = MODELS[case.test.rsplit(".", 1)[1]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test.litmus"
        file.write_text(case.text, encoding="utf-8")
        ran = subprocess.run([herd, "-model", model, str(file)], capture_output=True, text=True, timeout=300)
    said = re.search(r"^Observation \S+ (\w+)", ran.stdout, re.MULTILINE)
    if ran.returncode != 0 or not said:
        return "error", ran.stdout + ran.stderr
    # Only the language knows races; a flag of a machine's model is about something else.
    if case.test.endswith(".c11") and re.search(r"^(?:Undef|Flag )", ran.stdout, re.MULTILINE):
        return "observable", f"{said[1]}, data race"
    return ("never" if said[1] == "Never" else "observable"), said[1]


def main() -> int:
    herd = shutil.which("herd7")
    if herd is None:
        print("herd7 is not installed: the litmus tests are not run (https://github.com/herd/herdtools7).")
        return 0
    surprises = 0
    for path in sorted(HERE.glob("*.litmus")):
        for case in cases(path):
            expected = "observable" if case.mutation else "never"
            outcome, words = observe(herd, case)
            verdict = "ok" if outcome == expected else "SURPRISE"
            surprises += outcome != expected
            print(f"{verdict:9} {case.test:22} {case.mutation or 'as designed':60} {words.partition(chr(10))[0]}")
            if outcome == "error":
                print(words, file=sys.stderr)
    if surprises:
        print(f"{surprises} surprise(s): see above.", file=sys.stderr)
        return 1
    print("Every test holds, every mutation is observable.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
