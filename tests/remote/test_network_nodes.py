"""fan_out="node" for RPC and for torch.distributed between two networks.

Two network namespaces are two nodes. A pair of virtual interfaces joins them, which counts the bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

import pytest

import shmsync
from support.processes import until
from support.remote import parts


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def namespaces():
    """Two network namespaces with a cable between them: their names, and those of the ends of the cable. The first one
    is 10.231.0.1, the other one 10.231.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip: apt install iproute2")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"shmsync-{os.getpid()}-{end}" for end in "ab"]
    cable = [f"sv{os.getpid()}{end}" for end in "ab"]
    try:
        try:
            ip("netns", "add", names[0])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
        ip("netns", "add", names[1])
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            ip("-n", name, "address", "add", f"10.231.0.{number}/24", "dev", end)
            for interface in (end, "lo"):
                ip("-n", name, "link", "set", interface, "up")
        for name, end in zip(names, cable, strict=True):
            until(lambda: "state UP" in ip("-n", name, "link", "show", end))  # noqa: B023  some pass over it until then
        yield names, cable
    finally:
        for name in names:  # and the cable goes with them
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def spread(group, names, cable, ends):
    """Move trainer and workers to these ends of the cable."""
    for worker, end in zip(group.everybody, ends, strict=True):
        worker.call(parts.enter_namespace, names[end])
        worker.call(parts.set_environment, GLOO_SOCKET_IFNAME=cable[end], TP_SOCKET_IFNAME=cable[end])
    return group


@pytest.mark.parametrize(("fan_out", "copies"), [("node", 1), (None, 4)])
def test_so_many_copies_cross_the_network(namespaces, fleet, kind, fan_out, copies):
    names, cable = namespaces
    group = spread(fleet(4), names, cable, [0, 1, 1, 1, 1])
    group.connect(kind, host="10.231.0.1").open(500_000, fan_out=fan_out)
    group.send(1)  # with whatever is needed once
    before = group.trainer.call(parts.transmitted, cable[0])
    group.send(2)
    crossed = group.trainer.call(parts.transmitted, cable[0]) - before
    assert group.look() == [(2, 2)] * 4
    assert crossed == pytest.approx(copies * 8_000_000, rel=0.25)


@pytest.mark.parametrize("fan_out", ["node", None])
def test_a_network_that_fails_for_a_while_makes_workers_late(namespaces, fleet, kind, fan_out):
    names, cable = namespaces
    group = spread(fleet(2), names, cable, [0, 1, 1]).connect(kind, host="10.231.0.1").open(fan_out=fan_out)
    group.send(1)
    ip("-n", names[1], "link", "set", cable[1], "down")
    with pytest.raises(shmsync.AckTimeout) as caught:
        group.send(2, timeout=1.0)
    assert {0, 1} <= set(caught.value.missing)
    ip("-n", names[1], "link", "set", cable[1], "up")
    assert group.send(3) == 3
    assert group.look() == [(3, 3)] * 2


@pytest.mark.full  # network namespaces of its own
def test_a_rank_that_the_network_gives_back_is_no_dead_one(namespaces, fleet):
    """Longer than the kernel keeps up the connection that tells of its death."""
    names, cable = namespaces
    group = spread(fleet(2), names, cable, [0, 1, 1]).connect("distributed", host="10.231.0.1").open()
    group.send(1)
    ip("-n", names[1], "link", "set", cable[1], "down")
    with pytest.raises(shmsync.AckTimeout):
        group.send(2, timeout=8.0)
    ip("-n", names[1], "link", "set", cable[1], "up")
    assert group.send(3) == 3
    assert group.look() == [(3, 3)] * 2
    assert group.trainer.call(parts.dead) == []
