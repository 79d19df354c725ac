"""`shmsync completion SHELL`: what a shell needs to complete commands and names of arenas.

The shell completes by itself, from /dev/shm: a program that imports torch would take seconds for each press of Tab.
"""

from __future__ import annotations

import argparse
from typing import Any

from .output import Commands, Page, command

_EXAMPLES = """
eval "$(shmsync completion bash)"            in ~/.bashrc
eval "$(shmsync completion zsh)"             in ~/.zshrc, after compinit
shmsync completion fish > ~/.config/fish/completions/shmsync.fish
"""

_BASH = """_shmsync() {
  local word=${COMP_WORDS[COMP_CWORD]} names=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$word")); return
  fi
  case ${COMP_WORDS[1]} in
@OPTIONS@
  esac
  if [ "${word:0:1}" = - ]; then COMPREPLY=($(compgen -W "$options" -- "$word")); return; fi
  case ${COMP_WORDS[1]} in
    @NAMED@)
      for each in /dev/shm/shmsync.*; do [ -e "$each" ] && names+=("${each#/dev/shm/shmsync.}"); done
      COMPREPLY=($(compgen -W "${names[*]}" -- "$word")) ;;
    completion) COMPREPLY=($(compgen -W "bash zsh fish" -- "$word")) ;;
  esac
}
complete -o default -F _shmsync shmsync
"""

_FISH = """complete -c shmsync -f -n __fish_use_subcommand -a '@COMMANDS@'
set -l named 'string replace /dev/shm/shmsync. "" -- /dev/shm/shmsync.*'
complete -c shmsync -f -n '__fish_seen_subcommand_from @FISH_NAMED@' -a "($named)"
complete -c shmsync -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'
@FISH_OPTIONS@"""


def add(commands: Commands) -> None:
    """Add the command. Call it last: it completes those that were added before."""
    made = command(commands, "completion", "print what a shell needs to complete commands and names", _EXAMPLES)
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    made.set_defaults(run=lambda arguments: _run(arguments.shell, commands.choices))


def _run(shell: str, commands: dict[str, argparse.ArgumentParser]) -> int:
    options = {name: _options(each) for name, each in commands.items()}
    named = [name for name, each in commands.items() if any(action.metavar == "NAME" for action in _actions(each))]
    text = _FISH if shell == "fish" else _BASH
    parts = {
        "@COMMANDS@": " ".join(options),
        "@OPTIONS@": "\n".join(f'    {name}) local options="{" ".join(found)}" ;;' for name, found in options.items()),
        "@NAMED@": "|".join(named),
        "@FISH_NAMED@": " ".join(named),
        "@FISH_OPTIONS@": "".join(
            f"complete -c shmsync -n '__fish_seen_subcommand_from {name}' -l {option[2:]}\n"
            for name, found in options.items()
            for option in found
            if option.startswith("--")
        ),
    }
    for word, found in parts.items():
        text = text.replace(word, found)
    if shell == "zsh":  # it runs completions of bash
        text = "autoload -U +X bashcompinit && bashcompinit\n" + text
    page = Page()
    for line in text.splitlines():
        page.line(line)
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[Any]:
    return list(parser._actions)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in _actions(parser) for option in action.option_strings]
