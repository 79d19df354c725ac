"""What the judge of a storm takes for a broken promise, and what it does not."""

from __future__ import annotations

import pytest

from shmsync import WorkerDied
from support.storms.fleets import Call, take
from support.storms.judge import Violation
from support.storms.sky import Sky
from support.storms.trouble import Life

SENT, WAITED = (1_000, 2_000), (5_000, 6_000)  # when the two calls of a send began and ended, in ns


@pytest.fixture
def sky():
    made = Sky(seed=1)
    yield made
    made.close()


@pytest.fixture
def wait(sky):
    """wait(dead_since, error) judges a wait_async() that ended so, for one worker that died then."""

    def judge(dead_since, error=None):
        number, row = sky.new_row()
        life = Life(0, None, row, number, touched=[(dead_since - 100, float("inf"))], dead_since=dead_since, sent={1})
        row.set("changes", 1)  # it has computed
        call = Call("send_async", "1", 0.1)
        take(call, (*SENT, 0.0, 1, None))
        waiting = Call("wait_async", "for 1", 0.1, sent_by=call)
        take(waiting, (*WAITED, 0.0, None if error else 1, error))
        try:
            sky.judge.check(waiting, [life], 1, [life], lambda index: True)
        finally:
            row.close()

    return judge


def test_a_worker_that_answered_and_died_before_the_wait_was_served(wait):
    wait(3_000)
    wait(3_000, WorkerDied("it had not answered", missing=[0]))


def test_a_worker_that_was_dead_before_the_sending_has_not_answered(wait):
    with pytest.raises(Violation, match="was dead before"):
        wait(500)
    wait(500, WorkerDied("it was dead", missing=[0]))
    with pytest.raises(Violation, match="does not name worker 0, which was dead"):
        wait(500, WorkerDied("of another worker", missing=[]))
