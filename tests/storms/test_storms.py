"""No torn weights, hang, leak or false death while workers and trainers are killed, stopped and interrupted.

These storms are short; `make storm` makes long ones. What is judged: Storm.judge() in support/storms/storm.py.
"""

from __future__ import annotations

import pytest

from support.storms import storm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared-memory", "shared-memory-3", "multiprocess", "engine", "engine-device"])
def test_a_storm_breaks_no_promise(name):
    assert storm.run(name, 4, seed=12)["sent"] > 0
