"""Programs, run as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest

import shmsync
from support.programs.programs import Example

EXAMPLES = Path(shmsync.__file__).parent / "examples"


@pytest.fixture
def run_example(tmp_path):
    """run_example(script, *options, launcher=()) starts an example; it is ended with the test."""
    started = []

    def start(script, *options, launcher=()):
        started.append(Example(tmp_path, *launcher, str(EXAMPLES / script), *options))
        return started[-1]

    yield start
    for each in started:
        each.kill()
