"""`shmsync doctor`: does it work here, and what would make it work better?"""

from __future__ import annotations

import argparse
import json

from .findings import Level, examine
from .output import Commands, Page, command

_EXAMPLES = """
shmsync doctor                               each finding with its cure
shmsync doctor || exit 1                     in a script: 1 means that shmsync cannot work here
shmsync doctor --strict                      1 for warnings, too
shmsync doctor --json | jq '.findings[] | select(.level != "ok")'
"""


def add(commands: Commands) -> None:
    """Add the command."""
    made = command(commands, "doctor", "what this machine allows, with a cure for what it does not", _EXAMPLES)
    made.add_argument("--json", action="store_true", help="for programs")
    made.add_argument("--strict", action="store_true", help="end with 1 for warnings too")
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    found, page = examine(), Page()
    bad = {Level.FAILURE, Level.WARNING} if arguments.strict else {Level.FAILURE}
    status = int(any(finding.level in bad for finding in found))
    if arguments.json:
        page.line(json.dumps({"findings": [finding._asdict() for finding in found], "status": status}))
        return status
    for finding in found:
        page.wrapped(f"{finding.check}: {finding.text}", "         ", finding.level.value.ljust(9))
        if finding.cure:
            page.wrapped(f"-> {finding.cure}", "         ")
    counted = {level: sum(finding.level is level for finding in found) for level in Level}
    page.line()
    page.line(f"{counted[Level.FAILURE]} failures, {counted[Level.WARNING]} warnings, {counted[Level.NOTE]} notes")
    return status
