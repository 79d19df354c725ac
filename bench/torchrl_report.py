"""From the samples of the benchmark of the scheme for TorchRL to rows, verdicts and tables."""

from __future__ import annotations

import statistics
from typing import Any

from measure import percentiles

OURS, ALIAS, THEIRS = "shmsync", "shmsync, alias", "TorchRL SharedMem"
OWN, LEARNER, NONE = "own", "learner", "none"  # whose weights updates send; none: there are no updates
TIMES_FASTER = {  # at p50, with idle workers
    ("CartPole, 5k parameters", 4): 5.0,
    ("vision, 5M parameters", 4): 5.0,
    ("200 tensors, 1.6 MB", 4): 20.0,
}
COLLECTORS = {"sync": "every batch", "async": "every 10 ms"}
Row = dict[str, Any]


def idle(policy: str, workers: int, whose: str, samples: dict[str, list[float]]) -> Row:
    row: Row = {"policy": policy, "workers": workers, "weights": whose, "contestants": {}, "ratios": []}
    for name, times in samples.items():
        row["contestants"][name] = {"updates": len(times), **_spent(times)}
    aim = TIMES_FASTER.get((policy, workers))
    for name in (OURS, ALIAS):
        if not samples.get(name) or not samples.get(THEIRS):
            continue
        ratio = row["contestants"][THEIRS]["p50_us"] / row["contestants"][name]["p50_us"]
        verdict = None if aim is None else "met" if ratio >= aim else "MISSED"
        row["ratios"].append({"of": name, "what": f"{THEIRS} / {name}", "ratio": ratio, "aim": aim, "verdict": verdict})
    return row


def collect(policy: str, kind: str, workers: int, whose: str, turns: dict[str, list[Any]]) -> Row:
    row: Row = {"policy": policy, "sync": COLLECTORS[kind], "workers": workers, "weights": whose, "contestants": {}}
    row["ratios"] = []
    for name, each in turns.items():
        if None not in each:  # it had no trouble
            row["contestants"][name] = _together(each)
    theirs = turns.get(THEIRS, []) if THEIRS in row["contestants"] else []
    for name in row["contestants"]:
        if name.startswith("shmsync") and theirs:
            pairs = [a["frames_per_s"] / b["frames_per_s"] for a, b in zip(turns[name], theirs, strict=False)]
            low, median, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
            verdict = "met" if median >= 1 else "even" if high >= 1 else "MISSED"
            ratio = {"ratio": median, "quartiles": (low, high), "aim": 1, "verdict": verdict}
            row["ratios"].append({"of": name, "what": f"frames/s, {name} / {THEIRS}", **ratio})
    return row


def resources(policy: str, name: str, trouble: str | None, before: Any, during: Any, after: Any) -> Row:
    row: Row = {"policy": policy, "contestant": name, "trouble": trouble}
    if trouble is None and after is not None:
        row["worker"] = during["worker"]
        for what, counts in (("trainer", during), ("left", after)):
            row[what] = {each: counts["trainer"][each] - count for each, count in before["trainer"].items()}
    return row


def _together(turns: list[Row]) -> Row:
    seconds = sum(turn["seconds"] for turn in turns)
    updates = [sample for turn in turns for sample in turn["updates"]]
    return {
        "frames_per_s": statistics.median(turn["frames_per_s"] for turn in turns),
        "turns": [turn["frames_per_s"] for turn in turns],
        "updates_per_s": len(updates) / seconds,
        **_spent(updates),
        **{key: statistics.median(turn[key] for turn in turns) for key in ("forward_us", "stall_us")},
        **{key: sum(turn[key] for turn in turns) for key in ("frames", "torn", "wrong_version", "wrong_root")},
    }


def _spent(times: list[float]) -> Row:
    p50, p99 = percentiles(times) if times else (None, None)
    return {"p50_us": p50 and p50 * 1e6, "p99_us": p99 and p99 * 1e6}


def show_idle(row: Row) -> None:
    print(f"\n{row['policy']}, {row['workers']} idle workers, {row['weights']} weights: p50 and p99 in us")
    for name, each in row["contestants"].items():
        print(f"  {name:22} {_us(each['p50_us']):>10} {_us(each['p99_us']):>10} {each['updates']:6} updates")
    _show_ratios(row)


def show_collect(row: Row) -> None:
    print(f"\n{row['policy']}, {row['workers']} workers, updates {row['sync']}, weights: {row['weights']}")
    print(f"  {'':22} {'frames/s':>9} {'upd/s':>6} {'p50':>8} {'p99':>8} {'forward':>8} {'stall us':>8}  torn, wrong")
    for name, each in row["contestants"].items():
        print(
            f"  {name:22} {each['frames_per_s']:9,.0f} {each['updates_per_s']:6.0f} {_us(each['p50_us']):>8} "
            f"{_us(each['p99_us']):>8} {each['forward_us']:8,.0f} {each['stall_us']:8,.0f}  {_wrong(each)}"
        )
    _show_ratios(row)


def show_resources(row: Row) -> None:
    print(f"{row['policy']:12} {row['contestant']:22} {' | '.join(_counts(row))}", flush=True)


def _show_ratios(row: Row) -> None:
    for each in row["ratios"]:
        print(f"    {each['what']:46} {_ratio(each)}", flush=True)


def markdown(rows: list[Row], counts: list[Row]) -> str:
    """Three tables for docs/performance.md."""
    lines = ["| update with idle workers | workers | weights | contestant | p50 / p99, us | ratio |", "|---" * 6 + "|"]
    for part in [part for row in rows for part in row["idle"]]:
        ratios = _by_name(part)
        for name, each in part["contestants"].items():
            cells = (part["policy"], part["workers"], part["weights"], name, _pair(each), ratios.get(name, ""))
            lines.append(f"| {' | '.join(map(str, cells))} |")
    titles = "policy, updates | workers | weights | contestant | frames/s | ratio | updates/s | p50 / p99, us | "
    lines += ["", f"| {titles}stall, us | torn, wrong next, wrong root |", "|---" * 10 + "|"]
    for part in [part for row in rows for part in row["collect"]]:
        ratios = _by_name(part)
        for name, each in part["contestants"].items():
            where = (f"{part['policy']}, {part['sync']}", part["workers"], part["weights"], name)
            speed = (f"{each['frames_per_s']:,.0f}", ratios.get(name, ""), f"{each['updates_per_s']:.0f}")
            cells = (*where, *speed, _pair(each), f"{each['stall_us']:,.0f}", _wrong(each))
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| policy | contestant | trainer | worker | left in the trainer |", "|---" * 5 + "|"]
    lines += [f"| {' | '.join((row['policy'], row['contestant'], *_counts(row)))} |" for row in counts]
    return "\n".join(lines) + "\n"


def _by_name(row: Row) -> dict[str, str]:
    return {each["of"]: _ratio(each) for each in row["ratios"]}


def _ratio(each: Row) -> str:
    text = f"{each['ratio']:.2f} x"
    if "quartiles" in each:
        text += " ({:.2f} to {:.2f})".format(*each["quartiles"])
    return text if each["verdict"] is None else f"{text}, at least {each['aim']:g}: {each['verdict']}"


def _counts(row: Row) -> list[str]:
    if row["trouble"] is not None:
        return [row["trouble"], "", ""]
    return [
        "trainer {fds:+} fds, {threads:+} threads".format(**row["trainer"]),
        "worker {fds} fds, {threads} threads".format(**row["worker"]),
        "left {fds:+} fds, {threads:+} threads".format(**row["left"]),
    ]


def _wrong(each: Row) -> str:
    return f"{each['torn']}, {each['wrong_version']}, {each['wrong_root']} of {each['frames']:,}"


def _pair(each: Row) -> str:
    return f"{_us(each['p50_us'])} / {_us(each['p99_us'])}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
