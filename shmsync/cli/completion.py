"""`shmsync completion SHELL`: what a shell needs to complete commands, options and names of arenas, by argcomplete.

The shell then starts `shmsync` for each press of Tab, which takes as long as `shmsync --help`.
"""

from __future__ import annotations

import argparse
import os

from ..memory.control import leftovers
from .output import Commands, command

_EXAMPLES = """
eval "$(shmsync completion bash)"            in ~/.bashrc
eval "$(shmsync completion zsh)"             in ~/.zshrc, after compinit
shmsync completion fish > ~/.config/fish/completions/shmsync.fish
"""


def add(commands: Commands) -> None:
    """Add the command."""
    what = "print what a shell needs to complete commands and names (needs shmsync[completion])"
    made = command(commands, "completion", what, _EXAMPLES)
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from argcomplete import shellcode

    print(shellcode(["shmsync"], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks for completions, and end the process; return at once if no shell asks."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    from argcomplete import autocomplete

    autocomplete(parser)


def complete_names(action: argparse.Action) -> None:
    """Complete this argument to the names of the arenas on this machine."""
    action.completer = lambda **_: leftovers.names()  # type: ignore[attr-defined]
