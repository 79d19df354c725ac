"""The command line: `shmsync demo`, `shmsync list`, `shmsync gc`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from .errors import ShmSyncError
from .memory import leftovers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (None: that of sys.argv); returns the exit status."""
    parser = argparse.ArgumentParser(prog="shmsync", description="Zero-copy weight sync on one machine.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="train CartPole with asynchronous actors (needs shmsync[demo])", add_help=False)
    commands.add_parser("list", help="the arenas on this machine, and who publishes them")
    commands.add_parser("gc", help="remove what killed publishers left in /dev/shm")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "demo":
        return _demo(rest)
    if rest:
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        return _list() if arguments.command == "list" else _gc()
    except ShmSyncError as error:
        print(f"shmsync {arguments.command}: {error}", file=sys.stderr)
        return 1


class _Version(argparse.Action):
    """Looked up when it is asked for, so that the other commands need no file for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version("shmsync"))
        parser.exit()


def _demo(arguments: list[str]) -> int:
    try:
        from .examples.cartpole import main as demo
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'shmsync[demo]'", file=sys.stderr)
        return 2
    return int(demo(arguments))


def _list() -> int:
    names = leftovers.names()
    for name in names:
        print(f"{name}\t{leftovers.owner_of(name)}")
    if not names:
        print("no arenas")
    return 0


def _gc() -> int:
    for name in leftovers.names():
        try:
            owner = leftovers.sweep(name)
        except ShmSyncError as error:
            print(f"kept {name}: {error}")
            continue
        print(f"removed {name}" if owner is None else f"kept {name}: process {owner} is alive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
