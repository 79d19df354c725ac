"""What workers can run, what they are given, and what is refused before a process is started."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import subprocess
import sys

import pytest
import torch

import shmsync
from support.jobs import workers as jobs
from support.jobs.workers import apply, queue


def has_children(sub, answers):
    with contextlib.suppress(shmsync.ClosedError):
        answers.put(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip())
    apply(sub)


def test_each_worker_draws_numbers_of_its_own_and_the_same_in_each_run(pub):
    def drawn():
        answers = queue()
        torch.manual_seed(5)
        with shmsync.Workers(pub, jobs.draw, 3, args=(answers,)):
            return sorted(answers.get() for _ in range(3))

    first = drawn()
    assert first == drawn()
    assert len({number for _, number, _ in first}) == len({number for _, _, number in first}) == 3


def test_a_worker_may_have_children_and_a_bound_module():
    answers = queue()
    policy = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(policy.weight)
    with shmsync.Publisher(policy, timeout=120.0) as pub:
        with shmsync.Workers(pub, has_children, 1, args=(answers,)):
            assert answers.get() == "7"
        with shmsync.Workers(pub, jobs.forward, 1, args=(answers,)):
            assert answers.get() == (1, 4.0)
            torch.nn.init.constant_(policy.weight, 2.0)
            pub.publish(wait=True)
            assert answers.get() == (2, 8.0)


def test_a_callable_that_holds_a_queue(pub):
    answers = queue()
    with shmsync.Workers(pub, functools.partial(jobs.return_at_once, answers=answers), 2):
        assert sorted(answers.get() for _ in range(2)) == [0, 1]


def test_what_is_wrong_with_the_arguments_is_said_with_what_to_write(pub):
    with pytest.raises(TypeError, match=r"pub is a Publisher, not a function; write Workers\(pub, work, n\)"):
        shmsync.Workers(jobs.return_at_once, pub, 2)
    with pytest.raises(TypeError, match=r"args is a tuple, not a .*Queue; write args=\(it,\)"):
        shmsync.Workers(pub, jobs.return_at_once, 2, args=queue())


@pytest.mark.filterwarnings("ignore:Workers of arena .* were made and never started")
def test_workers_take_the_place_of_others_that_were_never_started(pub):
    forgotten = shmsync.Workers(pub, jobs.return_at_once, 2)  # as a cell of a notebook makes them that runs twice
    workers = shmsync.Workers(pub, jobs.return_at_once, 1)
    workers.queue()
    with workers:
        assert workers.get() == 0
    del forgotten


def test_functions_that_no_worker_can_import_are_refused(pub):
    def inner(sub):
        pass

    for work in (inner, lambda sub: None, functools.partial(inner)):
        with pytest.raises(shmsync.ProtocolError, match=r"cannot import .*put it into a file.*start_method='fork'"):
            shmsync.Workers(pub, work, 1).start()
    with shmsync.Workers(pub, inner, 2, start_method="fork"):
        pass


@pytest.mark.parametrize(("kind", "method"), [("Queue", "forkserver"), ("Event", "spawn")])
def test_what_forked_processes_alone_can_use_is_refused_with_the_cure(pub, kind, method):
    forked = getattr(multiprocessing.get_context("fork"), kind)()
    said = rf"get_context\('{method}'\)\.Queue\(\), or pass start_method='fork'"
    with (
        pytest.raises(shmsync.ProtocolError, match=said),
        shmsync.Workers(pub, jobs.apply, 2, args=(forked,), start_method=method),
    ):
        pass
    assert pub.readers() == []
    with shmsync.Workers(pub, jobs.ignore, 1, args=(forked,), start_method="fork") as workers:
        assert workers.alive == [0]


def test_a_daemon_process_is_told_to_pass_the_handle(pub, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(shmsync.ProtocolError, match=r"is a daemon.*pass pub\.handle"):
        shmsync.Workers(pub, jobs.apply, 1).start()


def test_wrong_arguments(pub):
    for wrong, error in (
        ({"n": 0}, ValueError),
        ({"n": 1.5}, TypeError),
        ({"threads": 0}, ValueError),
        ({"restart": -1}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"start_method": "thread"}, ValueError),
        ({"work": 3}, TypeError),
        ({"pub": pub.handle}, TypeError),
    ):
        arguments = {"pub": pub, "work": jobs.apply, "n": 1} | wrong
        with pytest.raises(error):
            shmsync.Workers(arguments.pop("pub"), arguments.pop("work"), arguments.pop("n"), **arguments)
