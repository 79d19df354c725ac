"""From what the contestants of a case did to rows: each way of shmsync beside each scheme of TorchRL."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from common.measure import percentiles, rate
from common.row import FAILED, OK, Pair, Row, times

OURS, THEIRS = "shmsync", "TorchRL SharedMem"
OWN, LEARNER, NONE = "own", "learner", "none"  # whose weights updates send; none: there are no updates
AIMS = {"CartPole, 5k": "0.2 x", "200 tensors": "0.05 x"}  # of an update with idle workers, by how its policy begins
Samples = dict[str, list[float]]  # of each contestant, in seconds
EVERY = {"sync": "every batch", "async": "every 10 ms"}


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(a, b) for a in names if a.startswith(OURS) for b in names if not b.startswith(OURS)]


def idle(policy: str, workers: int, whose: str, samples: Samples, checks: dict[str, str]) -> Iterator[Row]:
    spent = {name: _spent(each) for name, each in samples.items()}
    aim = next((aim for begin, aim in AIMS.items() if policy.startswith(begin)), "")
    for ours, theirs in pairs(spent):
        what = f"update, {policy}, {whose} weights, {workers} idle workers{ours.removeprefix(OURS)}"
        yield beside(what, spent[ours], theirs, spent[theirs], aim, check_of(ours, theirs, checks))


def collect(
    policy: str, kind: str, workers: int, whose: str, turns: dict[str, list[Any]], checks: dict[str, str], details: bool
) -> Iterator[Row]:
    """Frames; with details also the updates between them, and how much longer than the median a call took."""
    found = {name: None if None in each else _together(each) for name, each in turns.items()}
    updates = "no update" if whose == NONE else f"an update {EVERY[kind]}"
    where = f"{policy}, {updates}{' of its own weights' if whose == OWN else ''}, {workers} workers"
    for ours, theirs in pairs(found):
        mine, other = found[ours] or {}, found[theirs] or {}
        check = check_of(ours, theirs, checks)
        if _wrong(mine):
            check = f"WRONG: {_wrong(mine)}"
        elif details and _wrong(other):
            check += f"; {theirs}: {_wrong(other)}"
        kinds = [("frames", "speed", ">= 1 x", "/s")]
        if details:
            kinds.append(("stall of a frame", "stall", "", "us"))
        if details and whose != NONE:
            kinds.append(("update while it collects", "update", "", "us"))
        for what, key, aim, unit in kinds:
            name = f"{what}, {where}{ours.removeprefix(OURS)}"
            yield beside(name, mine.get(key), theirs, other.get(key), aim, check, unit)


def resources(policy: str, counts: dict[str, Any]) -> Iterator[Row]:
    """Files and threads: of a worker, of the trainer beyond those before, and what is left after the end."""
    for (ours, theirs), what in itertools.product(pairs(counts), ("fds", "threads")):
        for where in ("worker", "trainer", "left"):
            mine, other = (counts[name] and (float(counts[name][where][what]),) * 2 for name in (ours, theirs))
            name = f"{what}, {where}, {policy}{ours.removeprefix(OURS)}"
            yield beside(name, mine, theirs, other, "", OK if mine else "no figures", what)


def beside(what: str, ours: Pair | None, name: str, theirs: Pair | None, aim: str, check: str, unit: str = "us") -> Row:
    if ours is None:
        return Row(what, floor=name, aim=aim, trouble=f"{FAILED}: {check.removeprefix('WRONG: ')}")
    return Row(what, ours, name, theirs, aim, check, unit=unit)


def check_of(ours: str, theirs: str, checks: dict[str, str]) -> str:
    if checks[ours] != "ok":
        return f"WRONG: {checks[ours]}"
    return OK if checks[theirs] == "ok" else f"ours ok; {theirs}: {checks[theirs]}"


def _together(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median turn and the slowest; updates and wrong frames of all."""
    stalls = [turn["stall_us"] for turn in turns]
    wrong = {key: sum(turn[key] for turn in turns) for key in ("torn", "wrong_version", "wrong_root", "frames")}
    return wrong | {
        "speed": rate(turn["frames_per_s"] for turn in turns),
        "stall": (statistics.median(stalls), max(stalls)),
        "update": _spent([sample for turn in turns for sample in turn["updates"]]),
    }


def _wrong(found: dict[str, Any]) -> str:
    if not found.get("torn") and not found.get("wrong_version"):
        return ""
    return "{torn} torn, {wrong_version} and {wrong_root} of another version, of {frames:,}".format(**found)


def _spent(seconds: list[float]) -> Pair | None:
    return times(percentiles(seconds)) if seconds else None
