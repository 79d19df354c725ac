"""The arguments of all commands, and how each of them ends.

Exit status: 0 for success, 1 for a failure with a sentence on stderr, 2 for wrong arguments or a missing package.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..errors import ShmSyncError
from .output import Refused

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
    """The arguments of all commands.

    `run` is the module and the function of each, imported when it runs; `refuse` ends with its usage and a sentence.
    """
    made = argparse.ArgumentParser(
        prog="shmsync",
        description="Zero-copy weight sync on one machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="store_true", help="show the version")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, what: str, module: str, function: str = "run") -> Callable[..., Any]:
        added = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        added.set_defaults(run=(module, function), refuse=added.error)
        return added.add_argument

    add = command("list", "the arenas on this machine, and who publishes them", "listing", "run_list")
    add("--json", action="store_true", help="for programs")

    add = command("inspect", "weights, slots and readers of one arena", "inspecting")
    add("name", metavar="NAME", help="the arena's name, as `shmsync list` shows it")
    add("--digest", action="store_true", help="attach as a reader, and show a hash of each tensor")

    add = command("top", "watch arenas and their readers, on a terminal until Ctrl-C", "top")
    add("name", nargs="?", metavar="NAME", help="one arena, with its readers")
    add("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (1)")
    add("--count", type=int, default=-1, metavar="N", help="end after so many looks")

    add = command("doctor", "what this machine allows, with a cure for what it does not", "doctor")
    add("--strict", action="store_true", help="end with 1 for warnings too")

    add = command("export", "write a consistent checkpoint of a live arena (needs shmsync[safetensors])", "exporting")
    add("name", metavar="NAME", help="the arena's name, as `shmsync list` shows it")
    add("file", metavar="FILE", help="the safetensors file to make")
    add("--force", action="store_true", help="replace the file if there is one")
    add("--timeout", type=_seconds, default=10.0, metavar="S", help="for the weights to be readable (10)")

    add = command("publish", "publish the weights of a file, until SIGTERM or Ctrl-C", "publishing")
    add("name", metavar="NAME", help="the arena's name; subscribers attach by it")
    add("file", metavar="FILE", help="a safetensors file, the index of its shards, or a state_dict() of torch.save()")

    add = command("gc", "remove what killed publishers left in /dev/shm", "listing", "run_gc")
    add("--dry-run", action="store_true", help="remove nothing, and say what would be removed")

    commands.add_parser("demo", help="train CartPole with asynchronous actors (needs shmsync[demo])", add_help=False)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (None: that of sys.argv); returns the exit status."""
    whole = parser()
    arguments, rest = whole.parse_known_args(argv)
    if arguments.version:
        from importlib.metadata import version

        print(version("shmsync"))
        return 0
    if arguments.command is None:
        whole.error("the following arguments are required: COMMAND")
    if rest and arguments.command != "demo":
        arguments.refuse(f"unrecognised arguments: {' '.join(rest)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no name or command line fails in a narrow encoding
    try:
        if arguments.command == "demo":
            from ..examples.cartpole import main as demo

            return int(demo(rest))
        module, function = arguments.run
        status = int(getattr(import_module(f".{module}", __package__), function)(arguments))
        sys.stdout.flush()
        return status
    except (ShmSyncError, Refused) as error:
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


def _seconds(text: str) -> float:
    """The type of an argument that is a time."""
    if not 0 <= float(text) <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600 seconds")
    return float(text)
