"""The arguments of every command, and which file carries it out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import ShmSyncError
from . import doctor, exporting, inspecting, listing, publishing, sweeping
from .top import top

_EXAMPLES = """examples:
  shmsync list                    the arenas on this machine, and who publishes them
  shmsync list --json             the same for a program
  shmsync inspect policy          weights, slots and readers of one arena
  shmsync top policy              watch its readers
  shmsync doctor                  does it work here, and what would make it work better
  shmsync export policy p.st      a checkpoint of what is published now
  shmsync publish policy p.st     the weights of a file, for processes that serve them
  shmsync gc --dry-run            what `shmsync gc` would remove from /dev/shm
  shmsync demo --workers 4        train CartPole with four actors

All but export, publish and demo look at shared memory only: the processes of an arena may run, stand
still or be dead, and notice nothing.
"""


# What brings the packages that a command needs.
_EXTRAS = {
    "demo": "shmsync[demo]",
    "export": "shmsync[safetensors]",
    "publish": "shmsync[safetensors]",
}


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    made = argparse.ArgumentParser(
        prog="shmsync",
        description="Zero-copy weight sync on one machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (listing, inspecting, top, doctor, exporting, publishing, sweeping):
        command.add(commands)
    commands.add_parser("demo", help="train CartPole with asynchronous actors (needs shmsync[demo])", add_help=False)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (None: that of sys.argv); returns the exit status."""
    whole = parser()
    arguments, rest = whole.parse_known_args(argv)
    if rest and arguments.command != "demo":
        whole.error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        if arguments.command == "demo":
            from ..examples.cartpole import main as demo

            return int(demo(rest))
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except ShmSyncError as error:
        print(f"shmsync {arguments.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "shmsync").partition(".")[0]
        if arguments.command not in _EXTRAS or sys.modules.get(package) is not None:  # a part of what is there
            raise
        print(f"{arguments.command} needs {error.name}: pip install '{_EXTRAS[arguments.command]}'", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `shmsync list | head`: the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Version(argparse.Action):
    """Look the version up when it is asked for: the other commands need neither the file nor the import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(version("shmsync"))
        parser.exit()
