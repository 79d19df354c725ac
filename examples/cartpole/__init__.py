"""An asynchronous actor-learner on CartPole-v1: the main job of shmsync, in a few readable files.

    shmsync demo [--slots N] [--consistency pinned|optimistic|live] [--workers N] [--seed N]

```
  actor 0 ─┐  rollouts: shared tensors + one pipe per actor   ┌───────────┐
  actor 1 ─┼─────────────────────────────────────────────────▶│  learner  │
  actor 2 ─┤                                                  └─────┬─────┘
  actor 3 ─┘◀───────────── weights: one shmsync arena ──────────────┘
```

policy.py     the network                       envs.py       a handful of CartPoles per actor
rollout.py    what an actor sends, in bytes     actor.py      reads weights, collects rollouts
fleet.py      starts, hears and ends actors     helper.py     what actors are forked from
ppo.py        the loss, corrected for stale rollouts
learner.py    the training loop                 figures.py    everything that is counted
dashboard.py  live progress                     report.py     closing table, plot, JSON
run.py        one run, start to end             stop.py       Ctrl-C
options.py    the command line
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the command line `argv` (None: sys.argv[1:]) and return its exit status.

    0: the target return was reached. 1: it was not (step limit, or no actor left). 2: bad options, or a missing
    package. 130: ended by Ctrl-C; 143: by SIGTERM.
    """
    from .options import parse
    from .stop import Stop

    options = parse(argv)
    missing = [name for name in ("gymnasium", "matplotlib", "rich") if find_spec(name) is None]
    if missing:
        print(f"The demo needs {', '.join(missing)}: pip install 'shmsync[demo]'", file=sys.stderr)
        return 2
    with Stop() as stop:
        from .helper import context

        context()  # first, so that it imports beside us
        from .run import run  # now, so that importing this package needs none of these

        return run(options, stop)
