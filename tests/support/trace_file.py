"""What the file of a trace has."""

from __future__ import annotations

import json

from support.processes import descriptors


def events(file):
    """What the file has, which needs no end to be read."""
    found = json.loads(file.read_text() + "]")
    assert found[0]["name"] == "shmsync trace"
    assert file.stat().st_size % 256 == 0  # no line crosses a page, between which the kernel may stop a killed process
    for event in found:
        assert event["ph"] in "XiM" and isinstance(event["pid"], int)
    refuse_overlaps([event for event in found if event["ph"] == "X"])
    return found


def refuse_overlaps(spans):
    """Viewers drop a span that begins inside another one of its thread and ends after it."""
    open_until = {}
    for each in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        end, ends = each["ts"] + each["dur"], open_until.setdefault((each["pid"], each["tid"]), [])
        while ends and ends[-1] <= each["ts"] + 0.0005:  # of what is written in nanoseconds
            ends.pop()
        assert not ends or end <= ends[-1] + 0.0005, f"{each} ends after what it lies in"
        ends.append(end)


def of(file, name, pid=None):
    return [each for each in events(file) if each["name"] == name and pid in (None, each["pid"])]


def versions(file, name, pid=None):
    return [each["args"]["version"] for each in of(file, name, pid)]


def descriptors_of(path):
    """Those of this process."""
    return [fd for fd, target in descriptors().items() if target == str(path)]
