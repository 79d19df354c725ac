"""A storm: random troubles hit a trainer and its workers, while everything that they promise is checked.

    python -m support.storms.storm --of shared-memory --seconds 600 --seed 7

Prints a line every ten seconds and a table at the end. The exit status is 1 when a promise was broken; then the seed
and the last events are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import math
import secrets
import sys
import threading
import time
from functools import partial

import psutil

from support.conformance.fleet import Crew, Fleet
from support.processes import descriptors, segments
from support.storms.board import Sky
from support.storms.engine import ENGINES
from support.storms.fleets import FORMS, STORMS, Call, carry_out, source
from support.storms.judge import CALM, Violation, await_computing
from support.storms.model import Weather
from support.storms.trouble import DEADLY, KINDS, Hand, Life, finish, resume
from support.storms.worker import live
from support.worker import fork_server

SENDS = ("send", "wait_async", "resend")  # calls that publish, by the names of their counts
SHORT, LONG = (0.02, 0.1, 0.3), (1.0, CALM, 2 * CALM)


class Storm:
    """Over one scheme. `step()` makes one call of the trainer, perhaps with a trouble beside it."""

    def __init__(self, name, sky):
        self.over = STORMS[name]
        self.sky = sky
        self.random, self.judge, self.counts = sky.random, sky.judge, sky.counts
        self.crew = Crew(fork_server())
        self.hand = Hand()
        self.fleet = None
        self._number = 0
        self.begin()

    # The trainer and its workers.

    def begin(self):
        """A new trainer, with workers that are all new to it."""
        self.fleet = Fleet(self.over.entry, self.crew)
        self.scheme = self.fleet.make(**{"timeout": CALM, **self.over.options})
        self.sender = self.fleet.open("policy", Weather, scheme=self.scheme)
        self.by_version = {}
        self.lives = [None] * len(self.fleet.workers)
        for index in range(len(self.lives)):
            self.enliven(index)

    def enliven(self, index):
        number, row = self.sky.new_row()
        worker = self.fleet.workers[index]
        earlier = self.lives[index]
        life = Life(index, worker, row, number, sent=set() if earlier is None else set(earlier.sent))
        self.lives[index] = life
        worker.start(live, self.sky.board.path, number)
        await_computing(life, lambda: row.get("forwards"))
        self.sky.pids.add(row.get("pid"))

    def end(self):
        """End the trainer and the workers."""
        finish(self.lives)
        self.judge.look(self.lives)
        self.fleet.close()
        self.fleet = None
        for life in self.lives:
            life.row.close()

    def close(self):
        if self.fleet is not None:
            with contextlib.suppress(BaseException):
                self.end()
        self.hand.close()
        self.crew.close()

    # One call.

    def step(self):
        self.repair()
        timeout = self.timeout()
        troubles = self.throw(timeout) if self.random.random() < 0.7 else 0
        name = self.random.choices(["send", "async", "resend"], [6, 2, 1])[0]
        try:
            getattr(self, f"do_{name}")(timeout)
        finally:
            self.hand.await_all(troubles)
        self.judge.look(self.lives)

    def throw(self, timeout):
        """A trouble for one of the workers, beside the next call or just before it; others may stand still too.

        How many are still to be carried out.
        """
        choice = [life for life in self.lives if life.whole]
        if not choice:
            return 0
        life, kind = self.random.choice(choice), self.random.choice(KINDS)
        if kind == "stop" and timeout in LONG and self.random.random() < 0.9:
            kind = "stop and go on"
        delay = self.random.choice([0, 0.001, 0.003, 0.01, 0.05]) * self.random.random()
        choice.remove(life)
        gust = self.random.sample(choice, self.random.randint(0, len(choice))) if self.random.random() < 0.5 else []
        troubles = [(kind, life, delay), *(("stop and go on", other, 0.0) for other in gust)]
        for kind, life, delay in troubles:
            self.counts[kind] += 1
            self.counts["kills"] += kind in DEADLY
            self.sky.note(f"{kind} worker {life.index} (pid {life.row.get('pid')}) in {delay:.4f} s")
            self.hand.order(kind, life, delay)
        if self.random.random() < 0.3:
            self.hand.await_all(len(troubles))
            return 0
        return len(troubles)

    def timeout(self):
        held = any(not life.whole and not life.doomed for life in self.lives)  # then a long one is waited for in full
        return self.random.choice(SHORT if self.random.random() < (0.95 if held else 0.4) else LONG)

    def chosen(self):
        """Worker ids for a call, and the lives that they stand for."""
        if not self.over.partial or self.random.random() < 0.6:
            return None, list(self.lives)
        some = self.random.sample(self.lives, self.random.randint(1, len(self.lives)))
        ids = [life.index for life in some]
        return (ids[0] if len(ids) == 1 and self.random.random() < 0.5 else ids), some

    def do_send(self, timeout):
        self._judge(*self._post("send", timeout))

    def do_async(self, timeout):
        call, lives = self._post("send_async", timeout)
        if call.error is not None:
            self._judge(call, lives)
            return
        self.judge.ended(call, call.start, call.end, call.timeout, call.waited)
        waiting = Call("wait_async", f"for {self._number}", timeout, sent_by=call)
        carry_out(self.sender, waiting, {"timeout": waiting.timeout})
        self._judge(waiting, lives)

    def do_resend(self, timeout):
        lives = [life for life in self.lives if not life.reported]
        if not self.by_version or not lives:
            return
        number = self.by_version[max(self.by_version)]
        for life in lives:  # a worker that others have gone on without may get the newest
            life.sent.add(number)
        call = Call("resend", f"{number} to {[life.index for life in lives]}", timeout)
        carry_out(self.sender, call, {"worker_ids": [life.index for life in lives], "timeout": call.timeout})
        self._judge(call, lives, 0 if self.over.partial else number)

    def _post(self, name, timeout):
        """Send the next weights by this method; the call, and the lives that it went to."""
        self._number += 1
        ids, lives = self.chosen()
        form = self.random.choice(FORMS)
        call = Call(name, f"{form} of {self._number}, worker_ids={ids}", timeout)
        for life in lives:
            life.sent.add(self._number)
        weights = source(form, self._number)
        carry_out(self.sender, call, {"weights": weights, "worker_ids": ids, "timeout": timeout})
        return call, lives

    def _judge(self, call, lives, number=None):
        self.counts[call.name] += 1
        self.counts["failed"] += call.error is not None
        error = call.error
        outcome = call.value if error is None else f"{type(error).__name__} {getattr(error, 'missing', '')}"
        took = (call.end - call.start) / 1e9
        self.sky.note(f"{call} -> {outcome} after {took:.4f} s")
        version = self.sender.version
        if version not in self.by_version:
            self.by_version[version] = self._number
        number = self._number if number is None else number
        if call.error is None and call.name != "resend" and self.by_version.get(call.value) != number:
            raise Violation(f"{call} returned version {call.value}, which is that of {self.by_version.get(call.value)}")
        self.judge.check(call, lives, number, self.lives, self.sender.is_dead)

    # Afterwards.

    def repair(self):
        """New workers in the place of the dead, sooner or later; the stopped go on; now and then a new trainer."""
        for life in self.lives:
            if life.stopped_since != math.inf and self.random.random() < 0.6:
                resume(life)
                self.sky.note(f"worker {life.index} goes on")
        dead = [life for life in self.lives if life.doomed]
        if len(dead) == len(self.lives) or self.random.random() < 0.004:
            self.restart()
            return
        for life in dead:
            if life in self.lives and self.random.random() < 0.7:  # a new trainer has new workers
                self.replace(life)

    def restart(self):
        self.counts["trainer restarts"] += 1
        self.sky.note("a new trainer")
        self.end()
        self.begin()

    def replace(self, life):
        index = life.index
        self.judge.look([life])
        life.worker.process.join()
        self.fleet.replace(index)
        self.counts["worker restarts"] += 1
        self.sky.note(f"a new worker {index}")
        self.fleet.join(index, self.scheme, "policy", Weather)
        self.fleet.register(self.sender, index)
        life.row.close()
        self.enliven(index)


# What makes a storm for a Sky, by its name.
KINDS_OF_STORMS = {**{name: partial(Storm, name) for name in STORMS}, **ENGINES}


def what_is_there():
    """Of this process: descriptors, threads, arenas, and processes that come from it."""
    gc.collect()
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": len(descriptors()),
        "threads": threading.active_count(),
        "arenas": len(segments()),
    }


def run(name, seconds, seed, say=print):
    """A storm of so many seconds; the counts. Raises Violation."""
    sky = Sky(seed)
    storm = None
    try:
        storm = KINDS_OF_STORMS[name](sky)
        start = said = time.monotonic()
        while time.monotonic() < start + seconds:
            storm.step()
            sky.counts["steps"] += 1
            if time.monotonic() > said + 10:
                said = time.monotonic()
                say(line(name, sky, said - start))
        storm.end()
        return sky
    except BaseException:
        say(f"seed {seed}; the last events:\n" + "\n".join(sky.log))
        raise
    finally:
        if storm is not None:
            storm.close()
        left = [pid for pid in sky.pids if segments(pid)]
        sky.close()
        if sys.exc_info()[0] is None and left:
            raise Violation(f"arenas of {left} are left")


def line(name, sky, elapsed):
    counts, judge = sky.counts, sky.judge
    sends = sum(counts[each] for each in SENDS)
    return (
        f"{name} {elapsed:5.0f} s: {sends} sends, {counts['failed']} of them failed, {counts['kills']} kills, "
        f"{counts['stop'] + counts['stop and go on']} stops, {counts['worker restarts']} workers and "
        f"{counts['trainer restarts']} trainers restarted, worst overrun {judge.worst_overrun:.3f} s, "
        f"the machine {sky.lateness.worst:.3f} s"
    )


def table(name, sky, seconds):
    rows = [(what, sky.counts[what]) for what in sorted(sky.counts) if what != "steps"]
    rows += [("worst overrun", f"{sky.judge.worst_overrun:.3f} s")]
    rows += [("lateness of the machine", f"{sky.lateness.worst:.3f} s"), ("seed", sky.seed)]
    return f"{name}, {seconds} s\n" + "\n".join(f"  {what:26}{value}" for what, value in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=KINDS_OF_STORMS, default="shared-memory")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.seconds + 240, exit=True)  # where it hangs
    seed = secrets.randbits(31) if given.seed is None else given.seed
    print(f"{given.of}: {given.seconds:g} s, seed {seed}", flush=True)
    before = None
    try:
        for seconds in (1, given.seconds):  # the first lets everything be imported that is imported only once
            sky = run(given.of, seconds, seed, lambda text: print(text, flush=True))
            after, until = what_is_there(), time.monotonic() + 20
            while before is not None and any(after[each] > before[each] for each in after) and time.monotonic() < until:
                time.sleep(0.1)  # what was killed needs a moment to be gone
                after = what_is_there()
            if before is not None and any(after[each] > before[each] for each in after):
                raise Violation(f"left behind: {before} before, {after} after")
            before = after
    except Violation as error:
        print(f"VIOLATION: {error}", flush=True)
        return 1
    print(table(given.of, sky, given.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
