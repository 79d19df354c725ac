"""How does the time of a publish grow with bytes, leaves and workers, and how many versions a second are there?

    make bench BENCH=growth                   growth-*.png, growth.md and growth.json in bench-results
    make bench BENCH=growth ARGS="--seconds 60"
    make bench BENCH=growth ARGS=--docs       the plots of docs/performance.md too, in docs/plots

The model is  fixed cost + bytes / bandwidth + workers x cost,  fitted by least squares of the relative error to
publish(wait="all") at every size with every number of workers. The plots show the measured medians, the model, and its
residuals: how far each measurement is from it. Every worker checks the last weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from common import measure, page
from common.measure import percentiles, rounds, timed
from cost_model import fit
from sections.readers import applying_readers

import shmsync

SIZES = [1 << power for power in range(12, 29, 2)]  # bytes: 4 KB to 256 MB
WORKERS = [0, 1, 2, 4, 8]
LEAVES = [1, 10, 100, 1000, 10000]
BOUND = [500, 2000, 8000, 20000]  # leaves of a module that is bound
LEAF_BYTES = 1 << 20  # of all leaves together


class Point(NamedTuple):
    amount: int  # bytes, or leaves
    workers: int
    p50: float  # seconds
    p99: float


def measured(weights: dict[str, torch.Tensor], workers: int) -> tuple[float, float]:
    """A publish(wait="all") of these; every worker checks the values of the last."""
    samples = []
    with applying_readers(weights, workers) as pub:
        for number in rounds(200, fewest=5):
            for tensor in weights.values():
                tensor.fill_(number + 2)
            samples.append(timed(lambda: pub.publish(wait="all")))
        assert all(pub.weights[name].eq(float(pub.version)).all() for name in list(weights)[:100]), "checksum"
    return percentiles(samples)


def bound(leaves: int, slots: int) -> tuple[float, float]:
    """Attaching, bind() and the first call of a module of small layers."""
    trainer, worker = (torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(leaves // 2)) for _ in range(2))
    x = torch.zeros(1, 2)

    def attach_bind_and_call() -> None:
        with shmsync.Subscriber(pub.handle) as sub, torch.no_grad():
            sub.bind(worker)
            assert torch.equal(worker[-1](x), trainer[-1](x)), "not the trainer's weights"

    with shmsync.Publisher(trainer, slots=slots) as pub:
        return percentiles([timed(attach_bind_and_call) for _ in rounds(20, fewest=3)])


def exponent(points: list[Point]) -> float:
    """With which power of the amount the time grows, from the first of these points to the last: 1 is in step."""
    return float(numpy.log(points[-1].p50 / points[0].p50) / numpy.log(points[-1].amount / points[0].amount))


def measure_all(seconds: float) -> dict[str, Any]:
    parts = len(SIZES) * len(WORKERS) + len(LEAVES) + 2 * len(BOUND)
    measure.limit(0.6 * seconds / parts)  # the rest is for starting
    points = []
    for size in SIZES:
        for workers in WORKERS:
            points.append(Point(size, workers, *measured({"t": torch.zeros(size // 4)}, workers)))
    leaves = []
    for count in LEAVES:
        weights = {"t": torch.zeros(16)} | {f"leaf{n}": torch.zeros(LEAF_BYTES // 4 // count) for n in range(count)}
        leaves.append(Point(count, 0, *measured(weights, 0)))
    binds = {str(slots): [Point(count, 0, *bound(count, slots)) for count in BOUND] for slots in (1, 2)}
    return {"points": points, "leaves": leaves, "binds": binds, **fitted(points)}


def fitted(points: list[Point]) -> dict[str, Any]:
    """The three numbers of the model, in seconds, and each point's measured / predicted."""
    inputs = numpy.array([[1.0, point.amount, point.workers] for point in points])
    seconds = numpy.array([point.p50 for point in points])
    numbers = fit(inputs, seconds)
    for _ in range(30):  # so that twice too much counts as much as half: relative to the mean of measured and predicted
        numbers = fit(inputs, seconds, numpy.sqrt(seconds * (inputs @ numbers)))
    fixed, for_byte, for_worker = numbers
    return {
        "fixed": float(fixed), "for_byte": float(for_byte), "for_worker": float(for_worker),
        "residuals": (seconds / (inputs @ numbers)).tolist(),
    }  # fmt: skip


def model(found: dict[str, Any]) -> str:
    rate = f"{1e-9 / found['for_byte']:.1f} GB/s" if found["for_byte"] else "no time for bytes"
    return f"{found['fixed'] * 1e6:.1f} µs + bytes / ({rate}) + workers x {found['for_worker'] * 1e6:.1f} µs"


COLORS = 128  # of a plot's palette: half the bytes, and every line keeps its own color
MARKERS = "os^Dv"


def plots(found: dict[str, Any], out: Path) -> list[Path]:
    """Draw the plots; each is readable without the others, and small enough to be committed."""
    import matplotlib

    matplotlib.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    return [_by_bytes(found, out), _by_workers(found, out), _leaves_and_rate(found, out)]


def _by_bytes(found: dict[str, Any], out: Path) -> Path:
    lines = {workers: _name(workers) for workers in WORKERS}
    grid = numpy.geomspace(SIZES[0], SIZES[-1], 60)
    figure, below = _curves(found, "bytes", lines, grid, lambda workers: _predicted(found, grid, workers))
    below.set_xscale("log", base=2)
    below.set_xticks(SIZES[::2], [human(size) for size in SIZES[::2]])
    return _saved(figure, below, "bytes of the weights", out / "growth-bytes.png")


def _by_workers(found: dict[str, Any], out: Path) -> Path:
    lines = {size: human(size) for size in SIZES[::2]}
    grid = numpy.linspace(0, WORKERS[-1], 20)
    figure, below = _curves(found, "workers", lines, grid, lambda size: _predicted(found, size, grid))
    below.set_xticks(WORKERS)
    return _saved(figure, below, "workers that are waited for", out / "growth-workers.png")


def _curves(found: dict[str, Any], by: str, lines: dict[int, str], grid: Any, fit_of: Callable[[int], Any]) -> Any:
    """A line for each number of workers, against bytes, or the other way round; below, its distance from the fit."""
    x, of = ("amount", "workers") if by == "bytes" else ("workers", "amount")
    figure, (axis, below) = _figure(2, 1, height_ratios=(3, 1), sharex=True)
    for number, (value, label) in enumerate(lines.items()):
        amounts, micros, off = _of(found, lambda point, value=value: getattr(point, of) == value, x)
        axis.plot(amounts, micros, MARKERS[number], color=f"C{number}", label=label)
        axis.plot(grid, fit_of(value), "-", color=f"C{number}", linewidth=1)
        below.plot(amounts, off, MARKERS[number], color=f"C{number}")
    names = axis.get_legend_handles_labels()
    figure.legend(*names, loc="outside right upper", title="measured: dots\nthe fit: lines")  # beside the data
    axis.grid(alpha=0.3)
    axis.set(title=f'publish(wait="all") grows with {by}\nfit: {model(found)}', ylabel="p50, µs", yscale="log")
    return figure, below


def _leaves_and_rate(found: dict[str, Any], out: Path) -> Path:
    figure, (left, right) = _figure(1, 2)
    leaves = found["leaves"]
    left.plot([p.amount for p in leaves], [p.p50 * 1e6 for p in leaves], "o-", label="p50")
    left.plot([p.amount for p in leaves], [p.p99 * 1e6 for p in leaves], "x--", label="p99")
    left.legend(loc="upper left")
    left.set(title=f"{human(LEAF_BYTES)} in so many leaves, no worker", ylabel="µs", xscale="log", yscale="log")
    left.set_xlabel("leaves")
    left.grid(alpha=0.3)
    for number, workers in enumerate(WORKERS):
        sizes, micros, _ = _of(found, lambda point, wanted=workers: point.workers == wanted, "amount")
        right.plot(
            sizes, [1e6 / each for each in micros], MARKERS[number] + "-", color=f"C{number}", label=_name(workers)
        )
    right.legend(loc="lower left")
    right.set(title="Versions in a second", ylabel="versions/s", yscale="log")
    right.set_xscale("log", base=2)
    right.set_xticks(SIZES[::4], [human(size) for size in SIZES[::4]])
    right.grid(alpha=0.3)
    return _saved(figure, right, "bytes of the weights", out / "growth-leaves.png")


def _figure(rows: int, columns: int, **layout: Any) -> Any:
    from matplotlib import pyplot

    size = (8, 5.5 if rows > 1 else 3.6)
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", **layout)


def _of(found: dict[str, Any], wanted: Callable[[Point], bool], by: str) -> tuple[list[int], list[float], list[float]]:
    """Where the wanted points stand, their p50 in microseconds, and how far each is from the fit in per cent."""
    chosen = [pair for pair in zip(found["points"], found["residuals"], strict=True) if wanted(pair[0])]
    return (
        [getattr(point, by) for point, _ in chosen],
        [point.p50 * 1e6 for point, _ in chosen],
        [(ratio - 1) * 100 for _, ratio in chosen],
    )


def _predicted(found: dict[str, Any], size: Any, workers: Any) -> Any:
    return (found["fixed"] + found["for_byte"] * size + found["for_worker"] * workers) * 1e6


def _name(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _saved(figure: Any, last: Any, x: str, path: Path) -> Path:
    """With the residuals' axis, if `last` is below another, and few colors."""
    from matplotlib import pyplot
    from PIL import Image

    last.set_xlabel(x)
    if last.get_subplotspec().rowspan.start > 0:
        last.set_ylabel("measured\nbeyond fit, %")
        last.axhline(0, color="black", linewidth=0.8)
        last.grid(alpha=0.3)
    figure.savefig(path, dpi=75)
    pyplot.close(figure)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE)
    few.save(path, optimize=True)
    return path


def human(size: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f'publish(wait="all"): {model(found)}',
        "",
        "| bytes | workers | p50 / p99, µs | measured / model |",
        "|---" * 4 + "|",
    ]
    for point, residual in zip(found["points"], found["residuals"], strict=True):
        micros = f"{point.p50 * 1e6:,.1f} / {point.p99 * 1e6:,.1f}"
        lines.append(f"| {human(point.amount)} | {point.workers} | {micros} | {residual:.2f} |")
    for slots, binds in found.get("binds", {}).items():  # files of earlier runs lack them
        power = f"the time grows with leaves ** {exponent(binds):.2f}"
        lines += ["", f"Attaching, bind() and the first call, slots={slots}: {power}", "", "| leaves | p50 / p99, ms |"]
        lines.append("|---|---|")
        lines += [f"| {each.amount:,} | {each.p50 * 1e3:,.1f} / {each.p99 * 1e3:,.1f} |" for each in binds]
    return "\n".join(lines) + "\n"


def save(found: dict[str, Any], out: Path) -> list[Path]:
    """The files of a run; the plots' paths."""
    page.save(out / "growth", found, markdown(found))
    return plots(found, out)


def load(path: Path) -> dict[str, Any]:
    """What an earlier run saved."""
    found: dict[str, Any] = json.loads(path.read_text())
    binds = {slots: [Point(*each) for each in points] for slots, points in found.get("binds", {}).items()}
    return found | {name: [Point(*each) for each in found[name]] for name in ("points", "leaves")} | {"binds": binds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--from", dest="earlier", type=Path, help="draw this growth.json instead of measuring")
    parser.add_argument("--docs", action="store_true", help="draw the plots of docs/performance.md too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = load(arguments.earlier) if arguments.earlier else measure_all(arguments.seconds)
    print(markdown(found))
    drawn = save(found, arguments.out)
    if arguments.docs:
        drawn += plots(found, Path(__file__).parents[1] / "docs" / "plots")
    print(*drawn, sep="\n")


if __name__ == "__main__":
    main()
