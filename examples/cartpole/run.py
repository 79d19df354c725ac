"""One run from start to closing table."""

from __future__ import annotations

import torch
from rich.console import Console

from . import report
from .dashboard import Dashboard
from .figures import Figures
from .fleet import Fleet
from .learner import Learner, Outcome, train
from .options import Options
from .stop import Stop


def run(options: Options, stop: Stop) -> int:
    """Train as `options` say, print and write what came of it, and return the exit status."""
    console = Console()
    if not console.is_terminal:
        console.width = 100  # files have no width of their own
    torch.set_num_threads(1)  # the actors have use for the other cores
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)  # better to fail now than after the training
    figures, fleet = Figures(), Fleet()
    learner = Learner(options, figures)
    try:
        fleet.start(learner.pub.handle, options)
        with Dashboard(console, options, figures, fleet, learner.pub) as dashboard:
            outcome = train(learner, fleet, options, stop, dashboard.tick)
    finally:
        fleet.stop()
        stats = learner.pub.stats()
        learner.pub.close()
    results = report.results(options, outcome.value, figures, fleet, stats)
    console.print(report.closing_table(results))
    console.print("figures:", str(report.write_json(options, results, figures)), soft_wrap=True)
    if outcome is Outcome.STOPPED:
        return stop.status  # without the plot: drawing takes longer than one waits after Ctrl-C
    console.print("plot:", str(report.draw(options, figures)), soft_wrap=True)
    if outcome is Outcome.REACHED:
        return 0
    mean = figures.mean_return
    reached = "fewer than 100 episodes ended" if mean is None else f"the mean return is {mean:.1f}"
    console.print(
        f"Not reached: {outcome.value} after {figures.env_steps:,} environment steps; {reached} "
        f"and {options.target:g} was wanted. Try --max-steps with more, or another --seed."
    )
    return 1
