"""Storms over the bare engine: a Publisher in a separate process, eight Subscribers that follow it, their troubles.

What happens in a step is decided by the seed and the number of the step alone, whatever came of the steps before: the
same seed gives the same decisions.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from functools import partial
from typing import NamedTuple

import shmsync
from support.processes import segment_path
from support.storms.board import REFUSED
from support.storms.engine_ends import make_publisher, more_than, read_on, send, used_by
from support.storms.fleets import Call, take
from support.storms.judge import CALM, Violation, await_computing
from support.storms.trouble import DEADLY, KINDS, Hand, Life, act, finish, resume
from support.worker import Gone, Worker, fork_server

WORKERS = 8
TIMEOUTS = (0.05, 0.3, 10.0, 20.0)
OF_WORKERS = (*DEADLY[:2], "exit", "stop", "stop and go on", "interrupt")
PASSING = ("stop and go on", "interrupt")
OF_TRAINERS = ("kill", "stop and go on", "interrupt")
SETTLING = 5.0  # seconds in which what two arenas need, while a worker moves on to the next one, is given back


class Step(NamedTuple):
    """One step: what the trainer is asked for, and what befalls whom beside it."""

    how: str  # "module", "mapping", "in place", "fails in place"
    wait: str | None  # "all", "some", None
    chosen: tuple[int, ...]
    timeout: float
    trouble: str | None
    victim: int  # WORKERS: the trainer
    delay: float
    before: bool  # is the trouble over before the call begins?
    gust: tuple[tuple[str, int], ...]  # passing troubles of other workers, one after the other behind it
    goes_on: bool  # do those that stand still go on before it?
    replaces: bool
    restart: bool  # does a new trainer begin?
    slots: int  # of a trainer that begins here
    consistency: str  # of a worker that begins here


def decide(seed: int, number: int) -> Step:
    """The decisions of one step."""
    chance = random.Random(f"{seed} {number}")
    victim = WORKERS if chance.random() < 0.15 else chance.randrange(WORKERS)
    kinds = OF_TRAINERS if victim == WORKERS else OF_WORKERS
    others = [index for index in range(WORKERS) if index != victim]
    blown = chance.sample(others, chance.randint(2, 5)) if chance.random() < 0.5 else []
    return Step(
        how=chance.choices(["module", "mapping", "in place", "fails in place"], [4, 3, 4, 1])[0],
        wait=chance.choice(["all", "all", "some", None]),
        chosen=tuple(sorted(chance.sample(range(WORKERS), chance.randint(1, WORKERS)))),
        timeout=chance.choice(TIMEOUTS),
        trouble=chance.choice(kinds) if chance.random() < 0.6 else None,
        victim=victim,
        delay=chance.choice([0, 0.001, 0.003, 0.01]) * chance.random(),
        before=chance.random() < 0.3,
        gust=tuple((chance.choice(PASSING), index) for index in blown),
        goes_on=chance.random() < 0.6,
        replaces=chance.random() < 0.7,
        restart=chance.random() < 0.03,
        slots=chance.choice([1, 1, 2, 3]),
        consistency=chance.choice(["pinned", "optimistic"]),
    )


class EngineStorm:
    """`step()` makes one call of the publisher. `device`: all arenas lie on a simulated one."""

    def __init__(self, sky, *, device=False):
        self.sky, self.judge, self.counts = sky, sky.judge, sky.counts
        self.device = device
        self._context = fork_server()
        self._name = f"storm-{os.getpid()}-{sky.seed}"
        self._hand = Hand(self._act)
        self._steps = 0
        self._number = 0
        self._used = {}  # what processes have open, once they have settled
        self.trainer = None
        self.lives = [None] * WORKERS
        first = decide(sky.seed, 0)
        self._begin_trainer(first)
        for index in range(WORKERS):
            self._begin_worker(index, first.consistency if index % 2 else "pinned")
        self._meet()

    # Who takes part.

    def _begin_trainer(self, step):
        number, row = self.sky.new_row()
        worker = Worker(self._context)
        self._number += 1
        self.trainer = Life(WORKERS, worker, row, number)
        row.set("pid", worker.pid)
        self.sky.pids.add(worker.pid)
        self.slots = step.slots
        worker.call(make_publisher, self._name, step.slots, self._number, self.device)
        for life in self.lives:
            if life is not None:
                life.sent.add(self._number)

    def _begin_worker(self, index, consistency):
        number, row = self.sky.new_row()
        earlier = self.lives[index]
        worker = Worker(self._context)
        sent = {self._number} if earlier is None else {*earlier.sent, self._number}
        life = self.lives[index] = Life(index, worker, row, number, sent=sent)
        worker.start(read_on, self.sky.board.path, number, self._name, index, consistency, self.device)
        # refused: the update() before it failed
        await_computing(life, lambda: row.get("forwards") or row.get("phase") == REFUSED)
        self.sky.pids.add(row.get("pid"))

    def _meet(self):
        """Every worker that stands computes with this trainer's weights."""
        for life in self.lives:
            if life.stopped_since != math.inf:
                resume(life)
            if life.whole:
                life.reported = False
                await_computing(life, lambda life=life: life.row.last()[1] >= self._number)
            else:
                life.reported = True  # the new trainer has never seen it

    def _restart(self, step, why):
        """A new trainer, of the same name."""
        self.counts["trainer restarts"] += 1
        self.sky.note(f"a new trainer with {step.slots} slots: {why}")
        self._begin_trainer(step)
        self._meet()

    # One step.

    def step(self):
        step = decide(self.sky.seed, self._steps)
        self._steps += 1
        if not self.trainer.worker.process.is_alive():  # an interrupt came after its call
            self._restart(step, "the old one is dead")
        self._repair(step)
        troubles = sum(self._throw(*each) for each in self._troubles(step))
        if step.before:
            self._hand.await_all(troubles)
            troubles = 0
        try:
            if self.trainer.whole:
                self._send(step)
        finally:
            self._hand.await_all(troubles)
        if not self.trainer.whole:
            self.trainer.worker.process.join()
            self.trainer.worker.conn.close()
            self._restart(step, "the old one is dead")
        self.judge.look(self.lives)
        if self._steps % 20 == 0:
            self._look_at_what_is_used()

    def _repair(self, step):
        for life in self.lives:
            if life.stopped_since != math.inf and (step.goes_on or step.timeout >= CALM):
                resume(life)
        for life in list(self.lives):
            if life.doomed and step.replaces:
                life.worker.end()
                self.counts["worker restarts"] += 1
                life.row.close()
                self._begin_worker(life.index, step.consistency)
        if step.restart:
            self._end_trainer()
            self._restart(step, "the old one was closed")

    @staticmethod
    def _troubles(step):
        """(kind, victim, delay) of each trouble of a step."""
        if step.trouble is not None:
            long = step.trouble == "stop" and step.timeout >= CALM
            yield "stop and go on" if long else step.trouble, step.victim, step.delay
        for kind, victim in step.gust:
            yield kind, victim, 0.0

    def _throw(self, kind, victim, delay):
        """Order a trouble; False: it is over already, or there is no process to have it."""
        life = self.trainer if victim == WORKERS else self.lives[victim]
        if not life.whole:
            return False
        self.counts[kind if life is not self.trainer else f"trainer: {kind}"] += 1
        self.counts["kills"] += kind in DEADLY
        self.sky.note(f"{self._steps}: {kind} {life.index} (pid {life.row.get('pid')}) in {delay:.4f} s")
        self._hand.order(kind, life, delay)
        return True

    def _act(self, kind, life):
        if kind in KINDS:
            act(kind, life)
        else:
            now = time.monotonic_ns()
            life.touched.append((now, math.inf))
            try:
                os.kill(life.row.get("pid"), signal.SIGINT)
            finally:
                life.touched[-1] = (now, time.monotonic_ns() + 100_000_000)  # so long it may feel it

    def _send(self, step):
        self._number += 1
        some = [index for index in step.chosen if not self.lives[index].reported]
        ids = {"all": "all", "some": some or None, None: None}[step.wait]
        lives = [life for life in self.lives if step.wait != "some" or life.index in some]
        call = Call("send", f"{step.how} of {self._number}, wait={ids}", step.timeout)
        for life in self.lives:
            life.sent.add(self._number)
        try:
            found, rows, reaped = self.trainer.worker.call(send, step.how, self._number, ids, step.timeout)
        except KeyboardInterrupt:  # that of the trainer, before or after the call itself
            return
        except (Gone, BrokenPipeError, ConnectionResetError):
            self.trainer.touched.append((0, math.inf))
            return
        take(call, found)
        named = getattr(call.error, "missing", ())
        for life in self.lives:  # whose row an earlier call has taken, or this one while it waited for a pin
            if life.doomed and life.dead_since < call.sent and life.index not in named:
                here = life.dead_since < call.start
                life.reported |= life.left or (here and (life.index not in rows or (reaped and ids == "all")))
        self.counts["send"] += 1
        self.counts["failed"] += call.error is not None
        self.sky.note(f"{self._steps}: {call} -> {call.value if call.error is None else repr(call.error)[:300]}")
        if not self.trainer.untouched(call.start, call.end):
            call.waited += 1.0
            if isinstance(call.error, InterruptedError):
                return
        if isinstance(call.error, shmsync.Poisoned):
            return  # an update() after one that failed
        if step.how == "fails in place":
            if not isinstance(call.error, (LookupError, shmsync.ReaderStalled)):
                raise Violation(f"{call} raised {call.error!r}")
            return
        if ids is None and call.error is None:
            self.judge.ended(call, call.start, call.end, call.timeout, call.waited)
            for life in self.lives:
                if life.whole:
                    life.least = max(life.least, self._number)
        else:
            self.judge.check(call, lives, self._number, [*self.lives, self.trainer], lambda index: True)

    # What is open, and the end.

    def _look_at_what_is_used(self):
        """Descriptors, threads and memory of those that nothing has befallen must not grow."""
        for life in (*self.lives, self.trainer):
            if life.touched or (life.row.get("forwards") < 20 and life is not self.trainer):
                continue
            pid = life.row.get("pid")
            first = self._used.setdefault(pid, used_by(pid))
            until = time.monotonic() + SETTLING
            while grown := more_than(first, used_by(pid)):
                if time.monotonic() > until:
                    raise Violation(f"worker {life.index} has {grown} at first")
                time.sleep(0.05)
            self.counts["looks at what is used"] += 1

    def _end_trainer(self):
        if self.trainer.stopped_since != math.inf:
            resume(self.trainer)
        with contextlib.suppress(BrokenPipeError):  # an interrupt came after its last call
            self.trainer.worker.finish()
        self.trainer.worker.process.join()
        self.trainer.row.close()

    def end(self):
        finish(self.lives)
        self.judge.look(self.lives)
        self._end_trainer()
        if segment_path(self._name).exists():
            raise Violation(f"{segment_path(self._name)} is left")
        self.close()

    def close(self):
        if self._hand is None:
            return
        for life in (*self.lives, self.trainer):
            if life is not None:
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(life.worker.pid, signal.SIGCONT)
                    os.kill(life.worker.pid, signal.SIGKILL)
                life.worker.process.join()
                life.worker.conn.close()
        self._hand.close()
        self._hand = None
        segment_path(self._name).unlink(missing_ok=True)


ENGINES = {"engine": EngineStorm, "engine-device": partial(EngineStorm, device=True)}
