"""The command line: `shmsync demo`, `shmsync list`, `shmsync gc`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from .errors import ShmSyncError
from .memory import segment


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="shmsync", description="Zero-copy weight sync on one machine.")
    parser.add_argument("--version", action="version", version=version("shmsync"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="train CartPole with asynchronous actors (needs shmsync[demo])", add_help=False)
    commands.add_parser("list", help="the arenas on this machine, and who publishes them")
    commands.add_parser("gc", help="remove what killed publishers left in /dev/shm")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "demo":
        return _demo(rest)
    if rest:
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    return _list() if arguments.command == "list" else _gc()


def _demo(arguments: list[str]) -> int:
    try:
        from .examples.cartpole import main as demo
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'shmsync[demo]'", file=sys.stderr)
        return 2
    return int(demo(arguments))


def _list() -> int:
    names = segment.names()
    for name in names:
        print(f"{name}\t{segment.owner_of(name)}")
    if not names:
        print("no arenas")
    return 0


def _gc() -> int:
    for name in segment.names():
        try:
            owner = segment.sweep(name)
        except ShmSyncError as error:
            print(f"kept {name}: {error}")
            continue
        print(f"removed {name}" if owner is None else f"kept {name}: process {owner} is alive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
