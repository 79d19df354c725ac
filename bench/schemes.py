"""How long does one synchronous send take, from the call until every worker has applied the weights?

    python bench/schemes.py                      every size, with 1, 2, 4 and 8 workers
    python bench/schemes.py --quick              4 workers, less than a minute
    python bench/schemes.py --workers 4 --sizes 5k --contestants shmsync
    python bench/schemes.py --out DIR            where schemes.json and schemes.md go (default ./bench-results)

shmsync's two schemes, TorchRL's two (the same module, workers and start method), and a raw pipe ping-pong with one
memcpy of the bytes take turns in one run, each library with a trainer process of its own, each process with one thread
to compute. Only the ratios mean anything.

"alias" means that the trainer's own parameters are the shared memory, so that nothing is copied: what TorchRL's schemes
do on the CPU to the module that they are given, and alias=True in shmsync. Its floor is the bare ping-pong.

After each row checksums prove that every worker has the weights of the last send, and the trainer its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import torch
from contest import CONTEXT, Company, Contestant
from measure import percentiles

OURS, ALIAS, PIPE = "shmsync SharedMem", "shmsync SharedMem, alias", "shmsync MultiProcess"
TORCHRL, TORCHRL_ALIAS = "TorchRL SharedMem", "TorchRL SharedMem, alias"
TORCHRL_PIPE, TORCHRL_PIPE_ALIAS = "TorchRL MultiProcess", "TorchRL MultiProcess, alias"
QUEUES, RAY = "a queue for each worker", "Ray's object store"  # of the README's chart; by their names only
FLOOR, BARE = "ping-pong + memcpy", "ping-pong"
CONTESTANTS = {
    FLOOR: "baselines.ping_pong:PingPongAndCopy",
    OURS: "scheme_sessions:SharedMem",
    TORCHRL: "baselines.torchrl_schemes:SharedMem",
    PIPE: "scheme_sessions:MultiProcess",
    TORCHRL_PIPE: "baselines.torchrl_schemes:MultiProcess",
    TORCHRL_PIPE_ALIAS: "baselines.torchrl_schemes:MultiProcessAlias",
    BARE: "baselines.ping_pong:PingPong",
    ALIAS: "scheme_sessions:SharedMemAlias",
    TORCHRL_ALIAS: "baselines.torchrl_schemes:SharedMemAlias",
    QUEUES: "baselines.queues:Queues",
    RAY: "baselines.ray_store:RayStore",
}
FLOOR_OF = {OURS: FLOOR, ALIAS: BARE, PIPE: FLOOR}
AT_MOST = 1.4  # x the floor, for SharedMem
AT_LEAST = {("5k parameters, 200 tensors", 4): 10.0, ("25M parameters, 6 tensors", 4): 4.0}  # x faster than TorchRL's
TURN = 0.05  # seconds
Row = dict[str, Any]


def measure(contestants: list[Contestant], size: str, workers: int, seconds: float) -> Row:
    """Everybody's sends, in turns; a slow moment of the machine hits all."""
    samples: dict[str, list[float]] = {each.name: [] for each in contestants}
    for each in contestants:
        each.open(size, workers)
    end, turns = time.monotonic() + seconds, 0
    while (turns < 3 or time.monotonic() < end) and any(each.trouble is None for each in contestants):
        for each in contestants:
            samples[each.name] += each.turn(TURN)
        turns += 1
    row: Row = {"size": size, "workers": workers, "turns": turns, "contestants": {}}
    for each in contestants:
        result: dict[str, Any] = {"checksum": each.check(), "sends": len(samples[each.name])}
        if samples[each.name]:
            p50, p99 = percentiles(samples[each.name])
            result |= {"p50_us": p50 * 1e6, "p99_us": p99 * 1e6}
        if each.trouble is not None:
            result["trouble"] = each.trouble
        row["contestants"][each.name] = result
    for each in contestants:
        each.close()
    for company in {each.company for each in contestants if each.company.trouble is not None}:
        company.start()
        company.answer(None)
    for each in contestants:
        each.trouble = None
    row["ratios"] = ratios(row)
    return row


@contextmanager
def contestants_of(names: list[str], patience: float) -> Iterator[list[Contestant]]:
    """The contestants with these names, whose trainers end with it."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"  # of every process that starts from here on
    # Fork servers have another sys.path, and pass in silence over what they cannot preload.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")]
    )
    module_of = {name: CONTESTANTS[name].partition(":")[0] for name in names}
    CONTEXT.set_forkserver_preload(sorted(set(module_of.values())))
    companies = {module: Company(module) for module in set(module_of.values())}
    try:
        for company in companies.values():
            company.answer(None)
        yield [
            Contestant(name, CONTESTANTS[name].partition(":")[2], companies[module], patience)
            for name, module in module_of.items()
        ]
    finally:
        for company in companies.values():
            company.stop()


def ratios(row: Row) -> list[Row]:
    """What the issue asks for: each with its aim, if it has one."""
    found = row["contestants"]
    p50 = {name: each["p50_us"] for name, each in found.items() if "p50_us" in each}
    wanted: list[tuple[str, str, str, float | None]] = []
    for ours, floor in FLOOR_OF.items():
        wanted.append((ours, floor, "at most", None if ours == PIPE else AT_MOST))
    aim = AT_LEAST.get((row["size"], row["workers"]))
    wanted += [(theirs, OURS, "at least", aim) for theirs in (TORCHRL, TORCHRL_ALIAS)]
    wanted += [(TORCHRL_ALIAS, ALIAS, "at least", aim), (TORCHRL_PIPE, OURS, "at least", None)]
    wanted += [(theirs, PIPE, "at least", None) for theirs in (TORCHRL_PIPE, TORCHRL_PIPE_ALIAS)]
    result = []
    for above, below, kind, limit in wanted:
        if above not in p50 or below not in p50:
            continue
        ratio = p50[above] / p50[below]
        met = None if limit is None else (ratio <= limit if kind == "at most" else ratio >= limit)
        result.append({"what": f"{above} / {below}", "ratio": ratio, "aim": limit and f"{kind} {limit:g}", "met": met})
    return result


def show(row: Row) -> None:
    print(f"\n{row['size']}, {row['workers']} workers, {row['turns']} turns")
    for name, result in row["contestants"].items():
        if "trouble" in result:
            print(f"  {name:26} {result['trouble']}")
            continue
        checked = "" if result["checksum"] == "ok" else f"   CHECKSUM: {result['checksum']}"
        print(f"  {name:26} {result['p50_us']:12,.0f} {result['p99_us']:12,.0f} us {result['sends']:6} sends{checked}")
    for each in row["ratios"]:
        aim = "" if each["aim"] is None else f"   {each['aim']}: {'met' if each['met'] else 'MISSED'}"
        print(f"    {each['what']:54} {each['ratio']:8.2f} x{aim}")


def markdown(rows: list[Row], deaths: list[Row], names: list[str]) -> str:
    """Two tables for docs/performance.md: times, and ratios."""
    lines = ["| send, p50 / p99 in us | workers | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [_cell(row["contestants"][name]) for name in names]
        lines.append(f"| {row['size']} | {row['workers']} | " + " | ".join(cells) + " |")
    columns = list(dict.fromkeys(each["what"] for row in rows for each in row["ratios"]))
    lines += ["", "| ratio of p50 | workers | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        by_name = {each["what"]: each for each in row["ratios"]}
        cells = [_ratio_cell(by_name.get(what)) for what in columns]
        lines.append(f"| {row['size']} | {row['workers']} | " + " | ".join(cells) + " |")
    if deaths:
        lines += [
            "",
            "| a worker's death, p50 / p99 in ms | send() raises | the process is gone | at most |",
            "|---|---|---|---|",
        ]
        for d in deaths:
            floor = f"{d['floor_p50_ms']:.3g} / {d['floor_p99_ms']:.3g}"
            lines.append(f"| {d['row']} | {d['p50_ms']:.3g} / {d['p99_ms']:.3g} | {floor} | {d['limit_ms']:g} |")
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any]) -> str:
    if "p50_us" not in result:
        return str(result.get("trouble"))
    wrong = "" if result["checksum"] == "ok" else f" **{result['checksum']}**"
    return f"{result['p50_us']:,.0f} / {result['p99_us']:,.0f}{wrong}"


def _ratio_cell(each: Row | None) -> str:
    if each is None:
        return ""
    text = f"{each['ratio']:.2f}"
    return f"**{text}** ({each['aim']})" if each["met"] is False else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 workers, few sends")
    parser.add_argument("--sizes", nargs="*", default=[""], help="parts of their names; default: all")
    parser.add_argument("--workers", nargs="*", type=int, help="default: 1 2 4 8")
    parser.add_argument("--contestants", nargs="*", default=[""], help="parts of their names; default: all")
    parser.add_argument("--seconds", type=float, help="for each row")
    parser.add_argument("--kills", type=int, help="0: leave out the row about deaths")
    parser.add_argument("--patience", type=float, default=20, help="seconds until a contestant counts as hung")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    quick = arguments.quick
    seconds = (2.0 if quick else 8.0) if arguments.seconds is None else arguments.seconds
    kills = (5 if quick else 20) if arguments.kills is None else arguments.kills
    names = [name for name in CONTESTANTS if any(part in name for part in arguments.contestants)]
    if arguments.contestants == [""]:
        names = [name for name in names if name not in (QUEUES, RAY)]
    sizes = [size for size in models.SIZES if any(part in size for part in arguments.sizes)]
    print(
        f"torch {torch.__version__}, {multiprocessing.cpu_count()} processors, one thread each; p50 and p99 of a send"
    )
    rows: list[Row] = []
    with contestants_of(names, arguments.patience) as contestants:
        for size in sizes:
            for workers in arguments.workers or ([4] if quick else [1, 2, 4, 8]):
                rows.append(measure(contestants, size, workers, seconds))
                show(rows[-1])
    from death_rows import death_rows  # not above: workers import this file, and the floor's do not need shmsync

    deaths = list(death_rows(kills)) if kills else []
    results = {"torch": torch.__version__, "processors": multiprocessing.cpu_count(), "rows": rows, "deaths": deaths}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "schemes.json").write_text(json.dumps(results, indent=2))
    (arguments.out / "schemes.md").write_text(markdown(rows, deaths, names))
    results_of = [result for row in rows for result in row["contestants"].values()]
    if any("trouble" not in result and result["checksum"] != "ok" for result in results_of):
        raise SystemExit("a checksum is wrong")


if __name__ == "__main__":
    main()
