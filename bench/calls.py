"""What the calls of a training loop cost beside their floors, with the aims of each.

    make bench BENCH=calls
    make bench BENCH=calls ARGS="--sections publish --check"     some rows; status 1 if an aim is missed

Aims hold for torch 2.10 or newer on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import common
import torch
from common import Row, beside, in_turns, layers, rounds, timed
from torch import nn

import shmsync


def publish(tensors: int) -> Iterator[Row]:
    module = layers(tensors)
    flat = torch.cat([each.flatten() for each in module.parameters()])
    target = torch.empty_like(flat)
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:
        ours, copy = partial(pub.publish, module), partial(target.copy_, flat)
        yield beside(f"publish(module), {tensors} tensors", ours, "memcpy", copy, f"+ {6 + 0.07 * tensors:g} us")
        state = module.state_dict()
        yield beside(
            f"publish(state_dict), {tensors} tensors", partial(pub.publish, state), "publish(module)", ours, "1.25 x"
        )
        assert all(torch.equal(sub.state_dict()[key], value) for key, value in state.items()), "other bytes arrived"


def refresh(tensors: int, slots: int, buffers: int = 0) -> Iterator[Row]:
    module, worker = layers(tensors, 4, buffers), layers(tensors, 4, buffers)
    aim = 1.5 + 0.15 * buffers if slots == 1 else 2 + 0.12 * (tensors + buffers)
    what = f"refresh() at a new version, slots={slots}, {tensors} tensors" + (f", {buffers} buffers" if buffers else "")
    with shmsync.Publisher(module, slots=slots) as pub, shmsync.Subscriber(pub.handle) as sub:
        sub.bind(worker)
        (samples,) = in_turns(sub.refresh, before=pub.publish)
        common.fill(module, 7.0)
        pub.publish()
        with sub.read():
            assert common.extremes(worker.parameters()) == (7.0, 7.0), "other bytes arrived"
        yield Row(what, samples, aim=f"{aim:g} us")


def small_calls() -> Iterator[Row]:
    module, worker, x = nn.Linear(4, 2), nn.Linear(4, 2), torch.ones(1, 4)
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub, torch.no_grad():
        sub.bind(worker)
        assert torch.equal(worker(x), module(x)), "other bytes arrived"

        def read() -> None:
            with sub.read():
                pass

        ours, theirs = partial(worker, x), partial(module, x)
        yield beside("a bound forward of Linear(4, 2)", ours, "plain", theirs, "+ 0.25 us", most=100, batch=5000)
        yield Row("read section, enter and leave", in_turns(read, most=50, batch=5000)[0])
        yield Row("refresh(), nothing new", in_turns(sub.refresh, most=50, batch=5000)[0])


def update(tensors: int, width: int) -> Iterator[Row]:
    module, private = layers(tensors, width), layers(tensors, width)
    private.load_state_dict(module.state_dict())
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=1e-6) for each in (module, private))
    for parameter in [*module.parameters(), *private.parameters()]:
        parameter.requires_grad_().grad = torch.ones_like(parameter)
    size = f"{sum(each.nbytes for each in module.parameters()) / 1e6:.2g} MB in {tensors} tensors"
    aim = f"{4 + 0.07 * tensors:g} us"
    with shmsync.Publisher(module) as pub, shmsync.Subscriber(pub.handle) as sub:

        def nothing() -> None:
            with pub.update():
                pass

        yield Row(f"update() around nothing, {size}", in_turns(nothing)[0], aim="4 us")
        pub.adopt(module, optimizer)
        yield Row(f"the same, adopted, {size}", in_turns(nothing)[0], aim=aim)
        yield beside(f"step() of an adopted module, {size}", optimizer.step, "plain step()", other.step, f"+ {aim}")
        state = sub.state_dict()
        assert all(torch.equal(state[key], value) for key, value in module.state_dict().items()), "other bytes arrived"


def attach() -> Iterator[Row]:
    samples = []
    with shmsync.Publisher({"t": torch.ones(1 << 28)}) as pub:
        for _ in rounds(10, fewest=3):
            made: list[shmsync.Subscriber] = []
            samples.append(timed(lambda made=made: made.append(shmsync.Subscriber(pub.handle))))
            assert made[0].weights["t"][-1] == 1, "other bytes arrived"
            made[0].close()
    yield Row("attach to 1 GB", samples)


def follow(_: Connection, handle: shmsync.Handle, index: int) -> None:
    """A reader: move to each version until the publisher is closed, then report the values of the last."""
    with shmsync.Subscriber(handle, worker=index, timeout=common.PATIENCE) as sub:
        try:
            while True:
                sub.wait_version(sub.version + 1)
                sub.refresh()
        except shmsync.ClosedError:
            _.send(common.extremes(sub.weights.values()))


def echo(pipe: Connection) -> None:
    """The other end of a ping-pong."""
    while True:
        pipe.recv_bytes()
        pipe.send_bytes(b"ack")


def ping_pong(pipes: list[Connection], message: bytes = b"x") -> None:
    for pipe in pipes:
        pipe.send_bytes(message)
    for pipe in pipes:
        pipe.recv_bytes()


def wait(readers: int, nbytes: int, aim: str = "") -> Iterator[Row]:
    source, message = {"t": torch.zeros(nbytes // 4)}, bytes(1 if nbytes == 4 else nbytes)
    floor = "one-byte ping-pong" if nbytes == 4 else f"ping-pong of {nbytes // 1000} KB"
    with (
        common.crew(echo, [()] * readers) as others,
        shmsync.Publisher(source, timeout=common.PATIENCE) as pub,
        common.crew(follow, [(pub.handle, index) for index in range(readers)]) as workers,
    ):
        pub.wait_readers(list(range(readers)), procs=workers.processes)
        ours = partial(pub.publish, wait="all")
        other = partial(ping_pong, others.pipes, message)
        size = f"{nbytes} bytes" if nbytes < 1000 else f"{nbytes // 1000} KB"
        yield beside(f'publish(wait="all"), {size}, {readers} reader{"s" * (readers > 1)}', ours, floor, other, aim)
        source["t"].fill_(5)
        pub.publish(wait="all")
        pub.close()  # ends the readers
        assert workers.answers() == [(5.0, 5.0)] * readers, "other bytes arrived"


def receive(pipe: Connection, scheme: Any, ours: Connection, tensors: int, index: int) -> None:
    """A worker of a scheme, in a thread; the main one answers with the extremes of its module."""
    import threading

    module = layers(tensors, 40 if tensors == 6 else 6)

    def loop() -> None:
        scheme.init_on_worker("policy", pipe=ours, model=module, worker_idx=index)
        while True:
            scheme.get_receiver().receive(timeout=None)

    threading.Thread(target=loop, daemon=True).start()
    while True:
        pipe.recv()
        with torch.no_grad():
            pipe.send(common.extremes(module.state_dict().values()))


def send(tensors: int, aim: str, workers: int = 4) -> Iterator[Row]:
    module, scheme = (
        layers(tensors, 40 if tensors == 6 else 6),
        shmsync.SharedMemWeightSyncScheme(timeout=common.PATIENCE),
    )
    pairs = [common.CONTEXT.Pipe() for _ in range(workers)]
    arguments = [(scheme, theirs, tensors, index) for index, (_, theirs) in enumerate(pairs)]
    with common.crew(echo, [()] * workers) as others, common.crew(receive, arguments) as crew:
        pipes = [ours for ours, _ in pairs]
        scheme.init_on_sender("policy", model=module, pipes=pipes, procs=crew.processes)
        what = f"SharedMemWeightSyncScheme, send() of {tensors} tensors to {workers} workers"
        sender, floor = scheme.get_sender(), partial(ping_pong, others.pipes)
        yield beside(what, sender.send, "ping-pong over as many pipes", floor, aim)
        common.fill(module, 3.0)
        sender.send()
        assert crew.ask("extremes") == [(3.0, 3.0)] * workers, "other bytes arrived"
        scheme.shutdown()


SECTIONS = {
    "publish": [partial(publish, tensors) for tensors in (2, 200, 1000)],
    "refresh": [partial(refresh, tensors, slots) for tensors in (2, 200, 1000) for slots in (1, 3)]
    + [partial(refresh, 2, 1, 100)],
    "one call": [small_calls, attach],
    "update": [partial(update, tensors, width) for tensors, width in ((2, 50), (14, 185), (14, 1850))],
    "wait": [partial(wait, 1, 4, "0.6 x"), partial(wait, 4, 4, "0.9 x"), partial(wait, 4, 50_000)],
    "send": [partial(send, 6, "2 x"), partial(send, 200, "4 x")],
}

if __name__ == "__main__":
    arguments, rows = common.main(__doc__, SECTIONS)
    common.end(arguments)
