"""What remains of a run: the closing table, a plot and the raw figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

import shmsync

from .figures import EPISODES, Figures
from .fleet import Fleet
from .options import Options

# Legends stand beside the axes, where no data is.
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}


def results(
    options: Options, outcome: str, figures: Figures, fleet: Fleet, stats: shmsync.PublisherStats
) -> dict[str, Any]:
    """The figures of the closing table; times in seconds."""
    messages = fleet.messages()
    seconds = figures.seconds
    return {
        "outcome": outcome,
        "mean_return": figures.mean_return,
        "episodes": len(figures.episodes),
        "env_steps": figures.env_steps,
        "env_steps_per_second": figures.steps_per_second,
        "wall_seconds": seconds,
        "versions": stats.version,
        "bytes_copied": stats.bytes_copied,
        "reads": sum(m.stats.reads for m in messages),
        "torn_reads_acted_upon": sum(m.torn for m in messages),
        "torn_reads_repeated": sum(m.stats.torn - m.torn for m in messages),
        "worst_lag": figures.worst_lag,
        "learner_sync_seconds": stats.publish.total + figures.stalled,
        "learner_stalls": stats.aborted,
        "publish_seconds": asdict(stats.publish),
        "pin_wait_seconds": asdict(stats.pin_wait),
        "actor_wait_seconds": [m.stats.wait.total for m in messages],
        "actors_lost": [str(lost) for lost in fleet.lost],
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()},
    }


def closing_table(r: dict[str, Any]) -> Table:
    """`results` as a table to print."""
    table = Table(title=f"{r['outcome']}", title_justify="left", show_header=False)
    workers, seconds = r["options"]["workers"], r["wall_seconds"]
    mean = r["mean_return"]
    waited = sum(r["actor_wait_seconds"])
    add = table.add_row
    add(f"mean return, last {EPISODES} episodes", "fewer episodes" if mean is None else f"{mean:.1f}")
    add("episodes", f"{r['episodes']:,}")
    add("environment steps", f"{r['env_steps']:,} ({r['env_steps_per_second']:,.0f}/s)")
    add("wall time", f"{seconds:.1f} s")
    add("versions", f"{r['versions']:,}")
    add("bytes copied", f"{r['bytes_copied']:,}")
    add("read sections", f"{r['reads']:,}")
    torn, repeated = r["torn_reads_acted_upon"], r["torn_reads_repeated"]
    add("torn reads", f"{torn:,} acted upon, {repeated:,} noticed and repeated")
    add("worst policy lag", f"{r['worst_lag']:,} versions")
    lost = r["learner_sync_seconds"]
    add("learner: time lost to sync", f"{lost:.2f} s ({lost / seconds:.2%}), {r['learner_stalls']} stalls")
    add("actors: time lost to sync", f"{waited:.2f} s over all ({waited / seconds / workers:.2%} of each)")
    add("actors lost", "\n".join(r["actors_lost"]) or "none")
    return table


def write_json(options: Options, r: dict[str, Any], figures: Figures) -> Path:
    """`results` and the series behind the plot, as `figures.json` in `options.out`."""
    path = options.out / "figures.json"
    series = {
        "episodes": {"columns": ["env_steps", "return"], "rows": figures.episodes},
        "lag": {"columns": ["env_steps", "min", "mean", "max"], "rows": figures.lags},
        "publish": {"columns": ["env_steps", "seconds"], "rows": figures.publishes},
        "ack_seconds": figures.acks,
    }
    path.write_text(json.dumps({"results": r, "series": series}) + "\n")
    return path


def draw(options: Options, figures: Figures) -> Path:
    """Return, policy lag and publish latency over environment steps, as `training.png` in `options.out`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, so not before it is due
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower, lowest = figure.subplots(3, 1, sharex=True)
    upper.set_title(options.title)
    if figures.episodes:
        steps, returns = zip(*figures.episodes, strict=True)
        upper.plot(steps, returns, ".", markersize=2, alpha=0.3, label="episode")
        windows = (returns[max(0, i - EPISODES) : i] for i in range(1, len(returns) + 1))
        upper.plot(steps, [sum(w) / len(w) for w in windows], label=f"mean of the last {EPISODES}")
    upper.axhline(options.target, linestyle="--", linewidth=1, color="grey", label="target")
    upper.set_ylabel("return")
    upper.legend(**_BESIDE)
    if figures.lags:
        steps, low, mean, high = zip(*figures.lags, strict=True)
        lower.fill_between(steps, low, high, alpha=0.3, label="min to max in a rollout")
        lower.plot(steps, mean, linewidth=1, label="mean")
        lower.legend(**_BESIDE)
    lower.set_ylabel("policy lag (versions)")
    if figures.publishes:
        steps, seconds = zip(*figures.publishes, strict=True)
        lowest.plot(steps, [1e6 * each for each in seconds], ".", markersize=3, label="mean since the last point")
        lowest.set_yscale("log")
        lowest.legend(**_BESIDE)
    lowest.set_ylabel("publish (µs)")
    lowest.set_xlabel("environment steps")
    path = options.out / "training.png"
    figure.savefig(path, dpi=120)
    return path
