"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What one run of the demo was asked to do."""

    slots: int = 1
    consistency: str = "pinned"
    workers: int = 4
    seed: int = 0
    target: float = 475.0
    max_steps: int = 2_000_000
    out: Path = Path("demo-results")

    @property
    def title(self) -> str:
        """The run in a few words."""
        return f"CartPole-v1: {self.workers} actors, slots={self.slots}, {self.consistency}, seed {self.seed}"

    @property
    def one_version_per_rollout(self) -> bool:
        """Whether an actor holds one read section around a whole rollout.

        A held version blocks its slot. With `workers` actors each holding a different old version, the
        learner still finds a free slot only if there are `workers + 2` of them (one more is current, one
        more is being written). With fewer slots the learner would stand still for a whole rollout (tens of
        milliseconds), so then an actor holds a version for one forward pass (tens of microseconds) and
        tags each step with the version that chose its action.
        """
        return self.consistency == "pinned" and self.slots >= self.workers + 2


def _whole(low: int, high: int = 10**12) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`."""

    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return number


def parse(argv: Sequence[str] | None) -> Options:
    """Options from the command line; prints the reason and exits with status 2 if they make no sense."""
    parser = argparse.ArgumentParser(
        prog="shmsync demo",
        description="Train CartPole-v1 with asynchronous actors that read the learner's weights in place.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Options()
    for flag, kind, text in (
        ("slots", _whole(1, 127), "copies of the weights: 1 trains in place, more publish"),
        ("workers", _whole(1, 256), "actor processes"),
        ("seed", _whole(0), "for weights, environments and sampling; not for timing"),
        ("target", float, "stop at this mean return of the last 100 episodes"),
        ("max-steps", _whole(1), "environment steps after which to give up, with status 1"),
        ("out", Path, "folder for the plot and the raw figures"),
    ):
        initial = getattr(default, flag.replace("-", "_"))
        parser.add_argument(f"--{flag}", type=kind, default=initial, help=text, metavar="X")
    ways = ("pinned", "optimistic", "live")
    parser.add_argument("--consistency", choices=ways, default=ways[0], help="how actors read")
    return Options(**vars(parser.parse_args(argv)))
