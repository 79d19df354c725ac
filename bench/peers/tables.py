"""The figures of the contest as tables: all of them, what a killed reader does, and in short."""

from __future__ import annotations

from statistics import median

from common import page
from common.row import figures

from peers.contest import OURS, Cell, Death

TITLES = [
    "peer", "p50 / p90", "publish() beside it", "ratio", "processor time", "memory of workers",
    "descriptors of a worker", "start",
]  # fmt: skip


CHART = "0.8 MB in 200 tensors, 4 workers"  # of the README
BARS = (  # of a peer in two forms the faster one
    OURS,
    "shared module without lock or copy (unsafe)",
    "share_memory(), a lock and a copy",
    "Sample Factory, ParameterClientAsync",
    "mp.Queue of NumPy arrays",
    "safetensors in /dev/shm",
    "iceoryx2, views",
    "TorchRL, SharedMemWeightSyncScheme",
    "Ray, zero-copy tensors",
)


def chart(cells: list[Cell]) -> str | None:
    """The README's bars as SVG. None: this run has not measured all of them."""
    here = (each for each in merged(cells) if place(each) == CHART and not each.trouble)
    found = {each.peer: (each.p50 * 1e6, _ratio(each)) for each in here}
    if not found.keys() >= set(BARS):
        return None
    title = f"{CHART}: median time until all have computed with new weights"
    return page.chart(title, {name: found[name] for name in BARS}, OURS)


def merged(cells: list[Cell]) -> list[Cell]:
    """One cell for each peer and place: of OURS, which is in every heat, the medians."""
    found: dict[tuple[str, int, str], list[Cell]] = {}
    for each in cells:
        found.setdefault((each.size, each.workers, each.peer), []).append(each)
    return [_median(each) for each in found.values()]


def _median(same: list[Cell]) -> Cell:
    good = [each for each in same if not each.trouble] or same
    return Cell(*good[0][:4], *(median(values) for values in list(zip(*good, strict=True))[4:]))


def place(each: Cell) -> str:
    return f"{each.size}, {each.workers} worker{'s' if each.workers > 1 else ''}"


def costs(cells: list[Cell]) -> str:
    lines, last = [_line(TITLES), "|---" * len(TITLES) + "|"], ""
    for each in sorted(merged(cells), key=lambda each: _order(cells, each)):
        if place(each) != last:
            last = place(each)
            lines.append(_line([f"**{last}**", *[""] * (len(TITLES) - 1)]))
        lines.append(line(each))
    return "\n".join(lines) + "\n"


def line(each: Cell) -> str:
    if each.trouble:
        return _line([each.peer, f"failed: {each.trouble}", *[""] * (len(TITLES) - 2)])
    times = figures((each.p50 * 1e6, each.p90 * 1e6), "us")
    beside, spent, start = map(_time, (each.beside, each.processor, each.start))
    memory, descriptors = f"{each.memory:,.0f} MB", f"{each.descriptors:.0f}"
    return _line([each.peer, times, beside, _ratio(each), spent, memory, descriptors, start])


def short(cells: list[Cell], deaths: list[Death]) -> str:
    """The ratios of all places, and the deaths."""
    places = list(dict.fromkeys(place(each) for each in sorted(cells, key=lambda each: _order(cells, each))))
    titles = ["peer", *places, "after SIGKILL of a reader"]
    lines = [_line(titles), "|---" * len(titles) + "|"]
    found = {(each.peer, place(each)): each for each in merged(cells)}
    ends = {each.peer: fate(each) for each in deaths}
    for peer in dict.fromkeys(each.peer for each in cells):
        ratios = [_ratio(found.get((peer, where))) for where in places]
        lines.append(_line([peer, *ratios, ends.get(peer, "not measured")]))
    return "\n".join(lines) + "\n"


def fate(each: Death) -> str:
    if each.trouble:
        return f"failed: {each.trouble}"
    if each.seconds is None:
        return each.others
    time = _time(each.seconds)
    verb = f"raises {each.raised}" if each.raised else "returns"
    return f"{verb} after {time}" + ("" if each.others == "have it" else f"; the others {each.others}")


def bad(cells: list[Cell], deaths: list[Death]) -> list[str]:
    """What failed, or had other weights than expected."""
    found = [f"{each.peer}, {place(each)}: {each.trouble}" for each in cells if each.trouble]
    return found + [f"{each.peer}, killed: {fate(each)}" for each in deaths if each.trouble or "WRONG" in each.others]


def _ratio(each: Cell | None) -> str:
    if each is None or each.trouble or not each.beside:
        return "–" if each is None else "failed"
    return f"{each.ratio:.2f}" if each.ratio < 10 else f"{each.ratio:.0f}"


def _time(seconds: float) -> str:
    return figures((seconds * 1e6,) * 2, "us")


def _order(cells: list[Cell], each: Cell) -> int:
    """By the order in which places came; heats have the same one."""
    return list(dict.fromkeys((one.size, one.workers) for one in cells)).index((each.size, each.workers))


def _line(found: list[str]) -> str:
    return "| " + " | ".join(found) + " |"
