"""Ray runs once in a process: a new start ends the one before, which waited for more tests until then."""

SYSTEM = {
    "worker_niceness": 0,  # by default Ray's workers come last, behind all tests that run beside these
    # When Ray's head is slow to hear of a death, calls wait for it so long, and only then say "unavailable".
    "timeout_ms_task_wait_for_death_info": 10_000,
}
_ends = []


def instead_of_the_last(end):
    """Ends the last Ray. `end()`: ends the one that begins now; more than once, too."""
    while _ends:
        _ends.pop()()
    _ends.append(end)
