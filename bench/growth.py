"""How does the time of a publish grow with bytes, leaves and workers, and how many versions a second are there?

    make bench BENCH=growth                   growth.png, growth.md and growth.json in bench-results
    make bench BENCH=growth ARGS="--seconds 60"

The model is  fixed cost + bytes / bandwidth + workers x cost,  fitted by least squares of the relative error to
publish(wait="all") at every size with every number of workers. The plot shows the measured medians, the model, and its
residuals: how far each measurement is from it. Every worker checks the last weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import measure
import numpy
import torch
from cost_model import fit
from measure import CONTEXT, percentiles, rounds, timed
from reader_rows import applying_reader

import shmsync

SIZES = [1 << power for power in range(12, 29, 2)]  # bytes: 4 KB to 256 MB
WORKERS = [0, 1, 2, 4, 8]
LEAVES = [1, 10, 100, 1000, 10000]
LEAF_BYTES = 1 << 20  # of all leaves together


class Point(NamedTuple):
    amount: int  # bytes, or leaves
    workers: int
    p50: float  # seconds
    p99: float


def measured(weights: dict[str, torch.Tensor], workers: int) -> tuple[float, float]:
    """A publish(wait="all") of these; every worker checks the values of the last."""
    with shmsync.Publisher(weights, timeout=60) as pub:
        processes = [CONTEXT.Process(target=applying_reader, args=(pub.handle, index)) for index in range(workers)]
        for process in processes:
            process.start()
        pub.wait_readers(list(range(workers)), procs=processes)
        samples = []
        for number in rounds(200, fewest=5):
            for tensor in weights.values():
                tensor.fill_(number + 2)
            samples.append(timed(lambda: pub.publish(wait="all")))
        assert all(pub.weights[name].eq(float(pub.version)).all() for name in list(weights)[:100]), "checksum"
    for process in processes:
        process.join()
        assert process.exitcode == 0, "checksum"
    return percentiles(samples)


def measure_all(seconds: float) -> dict[str, Any]:
    measure.limit(0.6 * seconds / (len(SIZES) * len(WORKERS) + len(LEAVES)))  # the rest is for starting
    points = []
    for size in SIZES:
        for workers in WORKERS:
            points.append(Point(size, workers, *measured({"t": torch.zeros(size // 4)}, workers)))
    leaves = []
    for count in LEAVES:
        weights = {"t": torch.zeros(16)} | {f"leaf{n}": torch.zeros(LEAF_BYTES // 4 // count) for n in range(count)}
        leaves.append(Point(count, 0, *measured(weights, 0)))
    return {"points": points, "leaves": leaves, **fitted(points)}


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


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((bytes_axis, workers_axis), (leaves_axis, rate_axis), (left, right)) = pyplot.subplots(
        3, 2, figsize=(11, 12), layout="constrained", height_ratios=(3, 3, 1.6)
    )
    figure.suptitle(f'publish(wait="all"), p50. Dots: measured. Lines: fitted, {model(found)}')
    points, grid = found["points"], numpy.geomspace(SIZES[0], SIZES[-1], 60)

    def predicted(size: Any, workers: Any) -> Any:
        return (found["fixed"] + found["for_byte"] * size + found["for_worker"] * workers) * 1e6

    for number, workers in enumerate(WORKERS):
        chosen = [point for point in points if point.workers == workers]
        color, name = f"C{number}", f"{workers} worker{'' if workers == 1 else 's'}"
        sizes, micros = [point.amount for point in chosen], [point.p50 * 1e6 for point in chosen]
        bytes_axis.plot(sizes, micros, "o", color=color, label=name)
        bytes_axis.plot(grid, predicted(grid, workers), "-", color=color, linewidth=1)
        rate_axis.plot(sizes, [1e6 / each for each in micros], "o-", color=color, label=name)
    for number, size in enumerate(SIZES[::2]):
        chosen = [point for point in points if point.amount == size]
        workers_axis.plot(
            [p.workers for p in chosen], [p.p50 * 1e6 for p in chosen], "o", color=f"C{number}", label=human(size)
        )
        line = numpy.linspace(0, WORKERS[-1], 20)
        workers_axis.plot(line, predicted(size, line), "-", color=f"C{number}", linewidth=1)
    leaves = found["leaves"]
    leaves_axis.plot([p.amount for p in leaves], [p.p50 * 1e6 for p in leaves], "o-", label="p50")
    leaves_axis.plot([p.amount for p in leaves], [p.p99 * 1e6 for p in leaves], "x--", label="p99")
    off = [(each - 1) * 100 for each in found["residuals"]]
    left.plot([point.amount for point in points], off, "o", color="C7")
    right.plot([point.workers for point in points], off, "o", color="C7")
    for axis, title, x, y in (
        (bytes_axis, "Time grows with bytes", "bytes", "µs"),
        (workers_axis, "Time grows with workers", "workers", "µs"),
        (leaves_axis, f"Time grows with leaves ({human(LEAF_BYTES)} in all, no worker)", "leaves", "µs"),
        (rate_axis, "Versions in a second", "bytes", "versions/s"),
        (left, "Residuals by bytes", "bytes", "measured beyond model, %"),
        (right, "Residuals by workers", "workers", "measured beyond model, %"),
    ):
        axis.set(title=title, xlabel=x, ylabel=y)
        if x != "workers":
            axis.set_xscale("log", base=10 if x == "leaves" else 2)
        if axis in (left, right):
            axis.axhline(0, color="black", linewidth=0.8)
        else:
            axis.set_yscale("log")
            axis.legend()
        axis.grid(alpha=0.3)
    for axis in (bytes_axis, rate_axis, left):
        axis.set_xticks(SIZES[::2], [human(size) for size in SIZES[::2]])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


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
    return "\n".join(lines) + "\n"


def save(found: dict[str, Any], out: Path) -> Path:
    """The files of a run; the plot's path."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "growth.json").write_text(json.dumps(found, indent=1))
    (out / "growth.md").write_text(markdown(found))
    plot(found, out / "growth.png")
    return out / "growth.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure_all(arguments.seconds)
    print(markdown(found))
    print(save(found, arguments.out))


if __name__ == "__main__":
    main()
