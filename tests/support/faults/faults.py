"""Every system call of a scenario fails once, in turn, in a process that has faults.c preloaded.

    python -m support.faults.faults SCENARIO,SCENARIO... CASES SEED

A scenario is a call of shmsync and what must hold afterwards. It runs once to see which system calls it makes, and
then once for each (system call, error that it can give, position). The call succeeds, or raises a typed error, has
changed nothing, and works when it is repeated. Nothing leaks, and no living process counts as dead.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import random
import re
import sys
import traceback
from collections import Counter

import shmsync
from support.holdings import holdings

ERRORS = {
    "open": "EMFILE ENFILE ENOMEM EINTR EACCES",
    "shm_open": "EMFILE ENFILE ENOMEM EINTR EACCES ENOSPC",
    "shm_unlink": "ENOMEM EACCES",
    "unlink": "ENOMEM EACCES",
    "memfd_create": "EMFILE ENFILE ENOMEM",
    "ftruncate": "EINTR ENOMEM ENOSPC",
    "posix_fallocate": "EINTR ENOMEM ENOSPC",
    "mmap": "EAGAIN ENFILE ENOMEM",
    "madvise": "EAGAIN ENOMEM EINTR",
    "fcntl": "EAGAIN EINTR ENOMEM EMFILE",
    "flock": "EAGAIN EINTR ENOMEM",
    "pidfd_open": "EMFILE ENFILE ENOMEM",
    "futex": "EAGAIN EINTR ENOMEM",
    "read": "EINTR ENOMEM",
    "pread": "EINTR ENOMEM",
    "write": "EINTR ENOMEM",
    "pwrite": "EINTR ENOMEM ENOSPC",
    "poll": "EINTR ENOMEM EAGAIN",
    "ppoll": "EINTR ENOMEM EAGAIN",
    "close": "EINTR ENOSPC",
    "dup": "EMFILE ENOMEM",
    "dup2": "EMFILE EINTR",
    "stat": "ENOMEM EACCES",
    "fstat": "ENOMEM",
    "socket": "EMFILE ENFILE ENOMEM",
    "connect": "EINTR EAGAIN EACCES",
    "sendmsg": "EINTR EAGAIN ENOMEM",
    "recvmsg": "EINTR EAGAIN ENOMEM",
    "recv": "EINTR EAGAIN ENOMEM",
    "send": "EINTR EAGAIN ENOMEM",
    "opendir": "EMFILE ENFILE ENOMEM EACCES",
    "fork": "EAGAIN ENOMEM",
    "kill": "EACCES",
    "getsockopt": "ENOMEM",
}

CURES = {errno.EMFILE: "ulimit -n", errno.ENFILE: "fs.file-max"}  # of what NoSpace says

_library = ctypes.CDLL(None)


class Violation(Exception):
    """What must hold did not."""


def arm(call=b"open", error=0, nth=0):
    _library.faults_arm(call, error, nth)


def disarm():
    return bool(_library.faults_disarm())


def seen():
    counts = {call: _library.faults_seen(call.encode()) for call in ERRORS}
    return {call: count for call, count in counts.items() if count}


def need(condition, text):
    if not condition:
        raise Violation(text)


class Scenario:
    """One call. The class attributes say how it may end."""

    allowed: tuple[type[BaseException], ...] = (shmsync.NoSpace,)  # errors of a call that met the failure
    expected: type[BaseException] | None = None  # the error that it raises without any failure

    def __init__(self, start):
        """Start the partners and whatever else lasts."""

    def prepare(self):
        """Before each call."""

    def act(self):
        """The call."""
        raise NotImplementedError

    def check(self, error):
        """After each call: what must hold, whether it raised or not."""

    def restore(self):
        """Undo a call that succeeded."""

    def end(self):
        """Close what lasts."""


def held():
    """As holdings(), with the descriptors counted by kind."""
    found = holdings(None)
    targets = [re.sub(r"torch_[\d_]+", "torch", target) for target in found["descriptors"]]
    return {**found, "descriptors": Counter(target.partition(":")[0] for target in targets)}


def grown(before, after):
    counts = [(after[key], before[key]) for key in ("mappings", "slabs")]
    counts += [(count, before["descriptors"][kind]) for kind, count in after["descriptors"].items()]
    return any(now > then for now, then in counts) or after["segments"] != before["segments"]


def run(scenario, case):
    """One case; raises Violation. Returns "succeeded", or the name of the error."""
    call, error_number, nth = case
    scenario.prepare()
    error = result = None
    arm(call.encode(), error_number, nth)
    try:
        result = scenario.act()
    except BaseException as raised:
        error = raised
    fired = disarm()
    if error is not None:
        fine = isinstance(error, scenario.allowed) if fired else False
        fine = fine or (scenario.expected is not None and isinstance(error, scenario.expected))
        if not fine:
            text = "".join(traceback.format_exception(error))
            raise Violation(f"it raised {type(error).__name__} ({fired=}):\n{text}")
        name = type(error).__name__
        if fired and isinstance(error, shmsync.NoSpace) and error_number in CURES:
            need(CURES[error_number] in str(error), f"the cure is another one's: {error}")
        error.__traceback__ = None
    else:
        name = f"returned {result}" if scenario.expected else "succeeded"
        need(scenario.expected is None, f"it should have raised {scenario.expected} but returned {result!r}")
    scenario.check(error)
    if error is not None and scenario.expected is None:
        del error
        gc.collect()
        scenario.act()  # the same call works when it is repeated
        scenario.check(None)
    scenario.restore()
    return name


def cases_of(scenario):
    """Each (call, error, position) that the scenario has."""
    for _ in range(2):  # the first time, modules are imported and caches filled
        run(scenario, ("open", 0, 0))
    scenario.prepare()
    arm()
    try:
        scenario.act()
    except Exception as error:
        need(scenario.expected and isinstance(error, scenario.expected), f"it raises {error!r} by itself")
    disarm()
    counts = seen()
    scenario.check(None)
    scenario.restore()
    return [
        (call, getattr(errno, name), nth)
        for call, count in counts.items()
        for name in ERRORS[call].split()
        for nth in range(1, min(count, 25) + 1)
    ]


def chosen(cases, count, seed):
    """So many of them; of each system call one, if they suffice."""
    if count >= len(cases):
        return cases
    mixed = random.Random(seed).sample(cases, len(cases))
    first = {case[:1]: case for case in reversed(mixed)}
    return [*first.values(), *(case for case in mixed if case not in first.values())][:count]


def inject(scenario, count, seed):
    """Choose cases, and run them. What went wrong, and a line about all."""
    found = chosen(cases_of(scenario), count, seed)
    gc.collect()
    gc.freeze()  # no collection walks the million objects of torch
    run(scenario, ("open", 0, 0))
    before, failures, outcomes = held(), [], {}
    for case in found:
        text = f"{case[0]} number {case[2]} fails with {errno.errorcode[case[1]]}"
        print(f"  {text}", flush=True)
        faulthandler.dump_traceback_later(100, exit=True)  # a hang shows where
        try:
            outcome = run(scenario, case)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        except Violation as violation:
            disarm()
            failures.append(f"{text}: {violation}")
            break  # nothing is certain any more
        finally:
            faulthandler.cancel_dump_traceback_later()
        after = held()
        if grown(before, after):
            failures.append(f"{text}: {outcome}, but it leaks\n  before {before}\n  after  {after}")
        before = after
    return failures, f"{len(found)} failures injected: {outcomes}"


def main(names, count, seed):
    from support.faults import scenarios as fault_scenarios
    from support.worker import fork_server, pool

    faulthandler.enable()
    failures = []
    with pool(fork_server()) as start:
        for name in names.split(","):
            print(name, flush=True)
            scenario = getattr(fault_scenarios, name)(start)
            found, line = inject(scenario, int(count), int(seed))
            print(f"{name}: {line}", flush=True)
            failures += [f"{name}: {failure}" for failure in found]
            if not found:
                scenario.end()
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
