"""A storm: random troubles hit a trainer and its workers, while everything that they promise is checked.

    python -m support.storms.storm --of shared-memory --seconds 600 --seed 7

Prints a line every ten seconds. The exit status is 1 when a promise was broken; then the seed and the last events are
printed. A seed repeats the events, not the moments at which they meet the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections import Counter, deque
from functools import partial

import shmsync
from support import processes
from support.storms.worker import EXIT, Row, Weather, close, make_publisher, publish, read_on, receive_on
from support.worker import Gone, Worker, fork_server

TIMEOUTS = (0.05, 0.3, 10.0)
CALM = 10.0  # seconds in which a worker that nobody has disturbed answers
OVERRUN = 5.0  # seconds beyond its deadline that a call may take on a loaded machine
KINDS = ("kill", "kill", "exit", "stop", "pause", "pause")


class Violation(AssertionError):
    """A promise was broken."""


class Life:
    """One worker process, and what was done to it."""

    def __init__(self, index, process, row):
        self.index, self.process, self.row = index, process, row
        self.killed = self.exited = self.stopped = self.named = False
        self.hurt = False  # during this step

    @property
    def over(self):
        return self.killed or self.exited

    def suffer(self, kind):
        """Do it to the worker now."""
        if kind == "kill":
            self.process.kill()
        elif kind == "exit":
            self.row.command = EXIT
        else:
            processes.stop(self.process.pid)
            if kind == "pause":
                time.sleep(0.03)
                processes.resume(self.process.pid)
        if kind in ("kill", "exit"):
            self.process.join()


class Storm:
    """What storms have in common. One step is one call of the trainer, perhaps with a trouble beside it.

    A kind of storm has begin(), which starts the trainer and the workers, all of them with the weights of number 1;
    start(index), which starts a worker that the trainer knows; call(timeout), which sends the weights of self.number;
    and finish(), which ends the trainer.
    """

    count = 3
    must_name = True  # does a call name each worker that was dead when it began?

    def __init__(self, seed):
        self.random, self.counts, self.log = random.Random(seed), Counter(), deque(maxlen=30)
        self.context, self.number = fork_server(), 1
        self.lives = []
        self.unnamed = set()  # indices of workers that died, whether or not others have taken their places
        self.begin()

    def new_life(self, index, target, *arguments):
        row = self.context.RawValue(Row)
        process = self.context.Process(target=target, args=(row, index, *arguments), daemon=True)
        process.start()
        return Life(index, process, row)

    def step(self):
        self.number += 1
        self.counts["steps"] += 1
        dead_before = [life for life in self.lives if life.over]
        held = any(life.stopped for life in self.lives)
        timeout = self.random.choice(TIMEOUTS[:2] if held else TIMEOUTS)  # a long one would be waited for in full
        hand = self.trouble(timeout)
        start, error = time.monotonic(), None
        try:
            self.call(timeout)
        except (shmsync.ShmSyncError, Gone) as raised:
            error = raised
        spent = time.monotonic() - start
        hand.join()
        self.note(f"a call with timeout {timeout}: {error!r:.200} after {spent:.3f} s")
        if spent > timeout + OVERRUN:
            raise Violation(f"a call with timeout {timeout} took {spent:.1f} s")
        self.judge(error, timeout, dead_before)
        self.repair()

    def trouble(self, timeout):
        """Begin a trouble of one worker in a thread, after a moment."""
        life, kind = self.random.choice(self.lives), self.random.choice(KINDS)
        kind = "pause" if kind == "stop" and timeout >= CALM else kind
        delay = self.random.choice([0, 0.001, 0.005, 0.02]) * self.random.random()
        hand = threading.Thread(target=lambda: (time.sleep(delay), life.suffer(kind)), daemon=True)
        if self.random.random() < 0.6 and not life.over and not life.stopped:
            self.counts[kind] += 1
            self.note(f"{kind} of worker {life.index}, pid {life.process.pid}, after {delay:.4f} s")
            life.hurt, life.stopped = True, kind == "stop"
            life.killed, life.exited = kind == "kill", kind == "exit"
            self.unnamed |= {life.index} if life.over else set()
        else:
            hand = threading.Thread(target=bool)
        hand.start()
        return hand

    def judge(self, error, timeout, dead_before):
        """Was the call right about every worker, and are all weights whole?"""
        missing = list(getattr(error, "missing", ()))
        self.counts["failed" if error else "sent"] += 1
        for life in dead_before:
            # ReaderStalled is before any worker was asked, and names those in the way.
            asked = self.must_name and not isinstance(error, shmsync.ReaderStalled)
            if asked and not life.named and life.index not in missing:
                raise Violation(f"worker {life.index} was dead before the call, which does not name it: {error!r}")
        for life in self.lives:
            calm = not (life.hurt or life.over or life.stopped)
            if calm and life.index in missing and life.index not in self.unnamed and timeout >= CALM:
                raise Violation(f"worker {life.index} is named, and nothing has befallen it: {error!r}")
            if calm and error is None:
                self.await_number(life, self.number)
            life.named |= life.over and life.index in missing
            for what in ("mixed", "backwards"):
                if getattr(life.row, what):
                    raise Violation(f"worker {life.index} has seen weights that are {what}")
            if life.row.number > self.number:
                raise Violation(f"worker {life.index} has weights that nobody sent")
        if isinstance(error, shmsync.WorkerDied):
            if not self.unnamed & set(missing):
                raise Violation(f"no worker is dead: {error!r}")
            self.unnamed -= {index for index in missing if not self.lives[index].over}

    def await_number(self, life, number):
        end = time.monotonic() + 60
        while life.row.number < number:
            if time.monotonic() > end or not life.process.is_alive():
                raise Violation(f"worker {life.index} computes with {life.row.number} after {number} has arrived")
            time.sleep(0.001)

    def repair(self):
        """The stopped go on, and new workers take the place of most of the dead."""
        for life in list(self.lives):
            life.hurt = False
            if life.stopped and self.random.random() < 0.7:
                processes.resume(life.process.pid)
                life.stopped, life.hurt = False, True  # it may be late once more
            if life.over and self.random.random() < 0.7:
                self.counts["restarts"] += 1
                self.lives[life.index] = self.start(life.index)

    def note(self, text):
        self.log.append(f"{self.counts['steps']}: {text}")

    def end(self):
        """All end in order; nothing of them is left."""
        for life in self.lives:
            if not life.over:
                processes.resume(life.process.pid)
                life.row.command = EXIT
                life.process.join(60)
                if life.process.exitcode != 0:
                    raise Violation(f"worker {life.index} ended with {life.process.exitcode}")
        self.finish()

    def close(self):
        """After whatever has happened."""
        for life in self.lives:
            with contextlib.suppress(ProcessLookupError):
                life.process.kill()
            life.process.join()


class SchemeStorm(Storm):
    """The trainer is this process."""

    def __init__(self, seed, make, **options):
        self.scheme = make(timeout=CALM, **options)
        super().__init__(seed)

    def begin(self):
        self.pipes, self.sender = [None] * self.count, None
        self.lives = [self.start(index) for index in range(self.count)]
        self.scheme.init_on_sender(
            "policy", model=Weather(1), pipes=self.pipes, procs=[life.process for life in self.lives]
        )
        self.sender = self.scheme.get_sender()
        self.sender.send(Weather(1))

    def start(self, index):
        ours, theirs = self.context.Pipe()
        life = self.new_life(index, receive_on, self.scheme, theirs)
        theirs.close()
        self.pipes[index] = ours
        if self.sender is not None:
            self.sender.register_worker(index, ours, life.process)
            life.hurt = True  # the start of a process may take longer than a short deadline
        return life

    def call(self, timeout):
        how, weights = self.random.choice(["send", "send", "async"]), Weather(self.number)
        if self.random.random() < 0.5:
            weights = weights.state_dict()
        if how == "send":
            self.sender.send(weights, timeout=timeout)
        else:
            self.sender.send_async(weights, timeout=timeout)
            self.sender.wait_async(timeout=timeout)

    def finish(self):
        self.scheme.shutdown()
        if left := processes.segments():
            raise Violation(f"{left} are left")

    def close(self):
        super().close()
        with contextlib.suppress(Exception):
            self.scheme.shutdown()


class EngineStorm(Storm):
    """A publisher in a process that is killed too, and readers that follow its name."""

    count = 8
    must_name = False  # an earlier call, or a wait for a slot, may have taken its row

    def __init__(self, seed, device=False):
        self.device = device
        super().__init__(seed)

    def begin(self):
        self.name = f"storm-{os.getpid()}-{secrets.token_hex(4)}"
        self.new_trainer()
        self.lives = [self.start(index) for index in range(self.count)]
        for life in self.lives:
            self.await_number(life, 1)

    def new_trainer(self):
        self.trainer = Worker(self.context)
        self.trainer.call(make_publisher, self.name, self.random.choice([1, 1, 2, 3]), self.number, self.device)

    def start(self, index):
        life = self.new_life(index, read_on, self.name, self.device)
        life.hurt = True
        return life

    def call(self, timeout):
        killer = threading.Timer(0.01 * self.random.random(), lambda: os.kill(self.trainer.pid, signal.SIGKILL))
        if self.random.random() < 0.05:
            killer.start()
        try:
            self.trainer.call(publish, self.random.choice(["module", "mapping", "update"]), self.number, timeout)
        except (Gone, BrokenPipeError) as error:
            raise Gone(None) from error
        finally:
            if killer.is_alive():
                killer.join()

    def repair(self):
        self.trainer.process.join(0.02 if self.trainer.process.is_alive() else None)
        if not self.trainer.process.is_alive():
            self.counts["new trainers"] += 1
            self.trainer.conn.close()
            self.new_trainer()
            for life in self.lives:
                if not life.over and not life.stopped:
                    self.await_number(life, self.number)
        super().repair()

    def finish(self):
        self.trainer.call(close)
        self.trainer.finish()
        if processes.segment_path(self.name).exists():
            raise Violation(f"{processes.segment_path(self.name)} is left")

    def close(self):
        super().close()
        self.trainer.end()
        processes.segment_path(self.name).unlink(missing_ok=True)


STORMS = {
    "multiprocess": partial(SchemeStorm, make=shmsync.MultiProcessWeightSyncScheme),
    "shared-memory": partial(SchemeStorm, make=shmsync.SharedMemWeightSyncScheme),
    "shared-memory-3": partial(SchemeStorm, make=shmsync.SharedMemWeightSyncScheme, slots=3),
    "engine": EngineStorm,
    "engine-device": partial(EngineStorm, device=True),
}


def run(name, seconds, seed, say=print):
    """A storm of so many seconds; the counts. Raises Violation."""
    before = threading.active_count()
    storm = STORMS[name](seed)
    try:
        start = said = time.monotonic()
        while time.monotonic() < start + seconds:
            storm.step()
            if time.monotonic() > said + 10:
                said = time.monotonic()
                say(f"{name} {said - start:.0f} s: {dict(storm.counts)}")
        storm.end()
    except BaseException:
        say(f"seed {seed}; the last events:\n" + "\n".join(storm.log))
        raise
    finally:
        storm.close()
    end = time.monotonic() + 20  # what was killed needs a moment to be gone
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.1)
    if threading.active_count() > before:
        raise Violation(f"threads are left: {threading.enumerate()}")
    return storm.counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=STORMS, default="shared-memory")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.seconds + 240, exit=True)  # where it hangs
    seed = secrets.randbits(31) if given.seed is None else given.seed
    print(f"{given.of}: {given.seconds:g} s, seed {seed}", flush=True)
    try:
        print(dict(run(given.of, given.seconds, seed, lambda text: print(text, flush=True))), flush=True)
    except Violation as error:
        print(f"VIOLATION: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
