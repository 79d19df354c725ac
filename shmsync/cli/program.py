"""The arguments of every command, and which file carries it out."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ShmSyncError

_EXTRAS = {  # what brings the packages that a command needs
    "demo": "shmsync[demo]",
    "export": "shmsync[safetensors]",
    "publish": "shmsync[safetensors]",
    "top": "shmsync[top]",
}
_EPILOG = """examples:
  shmsync list                                     the arenas on this machine, and who publishes them
  shmsync inspect policy                           weights, slots and readers of one arena
  shmsync top policy                               watch its readers; `shmsync top policy | cat` writes lines
  shmsync doctor                                   does it work here, and what would make it work better
  shmsync export policy policy.safetensors         a checkpoint of what is published now
  shmsync publish policy policy.safetensors        the weights of a file, for processes that serve them
  shmsync gc --dry-run                             what `shmsync gc` would remove from /dev/shm
  shmsync list --json | jq '.arenas[].name'        for a program: seconds, bytes, null for unknown

`list`, `inspect`, `top`, `doctor` and `gc` look at shared memory only: the processes of an arena may run, stand
still or be dead, and notice nothing.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    from . import doctor, inspecting, listing, top  # these start at once; the others import torch when they run

    made = argparse.ArgumentParser(
        prog="shmsync",
        description="Zero-copy weight sync on one machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str) -> Callable[..., Any]:
        added = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        added.set_defaults(run=run)
        return added.add_argument

    add = command("list", listing.run_list, "the arenas on this machine, and who publishes them")
    add("--json", action="store_true", help="for programs")
    add("--interval", type=_seconds(0), default=0.5, metavar="S", help="count versions for so long (0.5); 0: do not")

    add = command("inspect", inspecting.run, "weights, slots and readers of one arena")
    add("name", metavar="NAME", help="the arena's name, as `shmsync list` shows it")
    add("--json", action="store_true", help="for programs")
    add("--digest", action="store_true", help="attach as a reader, and show a hash of each tensor")
    add("--interval", type=_seconds(0), default=0.5, metavar="S", help="count versions for so long (0.5); 0: do not")

    add = command("top", top.run, "watch arenas and their readers, on a terminal until Ctrl-C")
    add("name", nargs="?", metavar="NAME", help="one arena, with its readers")
    add("--interval", type=_seconds(0.05), default=1.0, metavar="S", help="seconds between two looks (1)")
    add("--count", type=int, default=-1, metavar="N", help="end after so many looks")

    add = command("doctor", doctor.run, "what this machine allows, with a cure for what it does not")
    add("--json", action="store_true", help="for programs")
    add("--strict", action="store_true", help="end with 1 for warnings too")

    add = command("export", _export, "write a consistent checkpoint of a live arena (needs shmsync[safetensors])")
    add("name", metavar="NAME", help="the arena's name, as `shmsync list` shows it")
    add("file", metavar="FILE", help="the safetensors file to make")
    add("--force", action="store_true", help="replace the file if there is one")
    add("--timeout", type=_seconds(0, math.inf), default=10.0, metavar="S", help="for the weights to be readable (10)")

    add = command("publish", _publish, "publish the weights of a file, until SIGTERM or Ctrl-C")
    add("name", metavar="NAME", help="the arena's name; subscribers attach by it")
    add("file", metavar="FILE", help="a safetensors file, the index of its shards, or a state_dict() of torch.save()")
    add("--watch", action="store_true", help="publish each newer file of that name")
    add("--slots", type=int, default=2, metavar="N", help="versions that have room; with 2 no reader waits (2)")
    add("--interval", type=_seconds(0.01), default=0.5, metavar="S", help="seconds between two looks at the file (0.5)")

    add = command("gc", listing.run_gc, "remove what killed publishers left in /dev/shm")
    add("--dry-run", action="store_true", help="remove nothing, and say what would be removed")

    commands.add_parser("demo", help="train CartPole with asynchronous actors (needs shmsync[demo])", add_help=False)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (None: that of sys.argv); returns the exit status."""
    whole = parser()
    arguments, rest = whole.parse_known_args(argv)
    if rest and arguments.command != "demo":
        whole.error(f"unrecognised arguments: {' '.join(rest)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no name or command line fails in a narrow encoding
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
    except KeyboardInterrupt:
        return 130


def _export(arguments: argparse.Namespace) -> int:
    from .exporting import run

    return run(arguments)


def _publish(arguments: argparse.Namespace) -> int:
    from .publishing import run

    return run(arguments)


def _seconds(least: float, most: float = 3600) -> Callable[[str], float]:
    """The type of an argument that is a time, from so many seconds to so many."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most} seconds")
        return value

    return parse


class _Version(argparse.Action):
    """Look the version up when it is asked for: the other commands need neither the file nor the import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(version("shmsync"))
        parser.exit()
