#!/usr/bin/env python3
"""Run the litmus tests of this folder with herd7: every base test must be "never", every mutation observable.

A test is a file `<name>.<model>.litmus`. A line (or, in assembly, a cell) may end with a marker

    // SYNC pin.fence => drop => acq_rel          in C
    (* SYNC pin.fence => drop => DMB ISHLD *)     in assembly

which names the line of the native code that it stands for, and then its mutations, one at a time: `drop`
removes the statement, a memory order replaces the statement's own, anything else is the new instruction.
"Observable" means that the condition can come true or that plain memory is raced for.

A test in C runs under RC11 twice: with the release sequences of C11, and with the shorter ones of C++20.

    run.py             run everything; without herd7, say which cases results.txt has and which were never run
    run.py --record    and write results.txt, which says what herd7 said about each text

Exit status: 0 as expected, or herd7 is absent; 1 on any surprise, and where there is nothing to record.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.txt"
MODELS = {"c11": "rc11.cat", "aarch64": "aarch64.cat", "x86_64": "x86tso-mixed.cat"}
CXX20 = "rc11-cxx20.cat"
# In rc11.cat's release sequences: a later store of the same thread carries a release on. C++20 took that away.
SAME_THREAD = "(sb & loc)?; "
ORDERS = {"relaxed", "acquire", "release", "acq_rel", "seq_cst"}
MARKER = re.compile(r"(?://|\(\*)\s*SYNC\s+(?P<name>[a-z.]+)(?P<rest>.*?)\s*(?:\*\)|$)")


@dataclass(frozen=True)
class Case:
    """One text for herd7 and what must come out: the base test, or one mutation of it."""

    test: str
    mutation: str  # empty for the base test
    text: str

    @property
    def models(self) -> list[str]:
        """The models that the text runs under."""
        kind = self.test.rsplit(".", 1)[1]
        return [MODELS[kind], CXX20] if kind == "c11" else [MODELS[kind]]

    @property
    def digest(self) -> str:
        """What results.txt knows this text by."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The test and its mutation, for a table."""
        return f"{self.test:24} {self.mutation or 'as designed':64}"


def mutate(statement: str, change: str) -> str:
    """The statement (C) or instruction (assembly) after one mutation, never equal to what it was."""
    if change == "drop":
        return ""
    if change not in ORDERS:
        return change
    # The second order of a compare-and-swap is that of a failure.
    changed, count = re.subn(r"memory_order_\w+", f"memory_order_{change}", statement, count=1)
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
            if not found and "SYNC" in piece:  # it would be a test that tests nothing
                raise ValueError(f"{path.name}: cannot read the marker in {piece.strip()!r}")
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
    call = re.search(r"atomic_(\w+?)(?:_explicit)?\((?:(\w+),)?.*?memory_order_(\w+)", statement)
    return " ".join(filter(None, (call[1], call[2], call[3]))) if call else statement


def cxx20(herd: str, folder: Path) -> None:
    """Write RC11 with the release sequences of C++20 into `folder`."""
    libdir = subprocess.run([herd, "-libdir"], capture_output=True, text=True, check=True).stdout.strip()
    rc11 = (Path(libdir) / MODELS["c11"]).read_text(encoding="utf-8")
    if rc11.count(SAME_THREAD) != 1:
        raise SystemExit(f"{libdir}/rc11.cat has no {SAME_THREAD!r} to take out: look at how it defines `rs` now.")
    (folder / CXX20).write_text(rc11.replace(SAME_THREAD, ""), encoding="utf-8")


def observe(herd: str, case: Case, model: str, folder: Path) -> tuple[str, str]:
    """("never" | "observable" | "error", herd7's own words); `folder` holds the models that are ours."""
    file = folder / "test.litmus"
    file.write_text(case.text, encoding="utf-8")
    ran = subprocess.run(
        [herd, "-I", str(folder), "-model", model, str(file)], capture_output=True, text=True, timeout=300
    )
    said = re.search(r"^Observation \S+ (\w+)", ran.stdout, re.MULTILINE)
    if ran.returncode != 0 or not said:
        return "error", ran.stdout + ran.stderr
    # Only the language knows races; a flag of a machine's model is about something else.
    if case.test.endswith(".c11") and re.search(r"^(?:Undef|Flag )", ran.stdout, re.MULTILINE):
        return "observable", f"{said[1]}, data race"
    return ("never" if said[1] == "Never" else "observable"), said[1]


def without_herd(every: list[Case]) -> int:
    """Say what is known without running anything."""
    known = {line.split()[0] for line in RESULTS.read_text(encoding="utf-8").splitlines() if line[:1] != "#"}
    unknown = [case for case in every if case.digest not in known]
    print(
        f"herd7 is not installed: the litmus tests are not run. Of {len(every)} cases results.txt holds the outcome of "
        f"{len(every) - len(unknown)}. herd7 belongs to herdtools7, which Debian 12 does not package; 7.57 is the "
        "newest that builds with Debian 12's OCaml. See https://github.com/herd/herdtools7 (tag 7.57, INSTALL.md)."
    )
    for case in unknown:
        print(f"{'NEVER RUN':9} {case.title}".rstrip())
    return 0


def main(record: bool) -> int:
    every = [case for path in sorted(HERE.glob("*.litmus")) for case in cases(path)]
    herd = shutil.which("herd7")
    if herd is None:
        return without_herd(every) or int(record)  # there is nothing to record
    version = subprocess.run([herd, "-version"], capture_output=True, text=True, check=True).stdout.split(",")[0]
    surprises = 0
    lines = [f"# What herd7 {version.strip()} said about each text, by `run.py --record`."]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cxx20(herd, folder)
        for case in every:
            expected = "observable" if case.mutation else "never"
            said = []
            for model in case.models:
                outcome, words = observe(herd, case, model, folder)
                surprises += outcome != expected
                verdict = "ok" if outcome == expected else "SURPRISE"
                said.append(words.partition("\n")[0])
                print(f"{verdict:9} {case.title} {model:16} {said[-1]}")
                if outcome == "error":
                    print(words, file=sys.stderr)
            lines.append(f"{case.digest} {case.title} {' | '.join(said)}")
    if surprises:
        print(f"{surprises} surprise(s): see above.", file=sys.stderr)
        return 1
    if record:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("Every test holds, every mutation is observable.")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--record"]):
        sys.exit(f"usage: {sys.argv[0]} [--record]")
    sys.exit(main(bool(sys.argv[1:])))
