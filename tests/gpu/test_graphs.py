"""CUDA graphs and compiled modules over weights in an arena."""

import threading

import pytest
import torch

import shmsync


@pytest.fixture
def ends(device):
    """ends(slots) -> the trainer's module, its publisher, a subscriber, and a module bound to the weights."""
    opened = []

    def make(slots):
        torch.manual_seed(0)
        module = torch.nn.Linear(32, 32, device=device)
        pub = shmsync.Publisher(module, slots=slots, device=device, timeout=30.0)
        sub = shmsync.Subscriber(pub.handle, worker=0, timeout=30.0)
        opened.extend((pub, sub))
        return module, pub, sub, sub.bind(torch.nn.Linear(32, 32, device=device))

    yield make
    for each in reversed(opened):
        each.close()


def step(module, pub):
    with torch.no_grad():
        module.weight.add_(0.5)
    return pub.publish(wait=[])


def test_a_graph_over_one_slot_shows_each_new_version(ends, device):
    module, pub, sub, bound = ends(1)
    x, graph = torch.ones(4, 32, device=device), torch.cuda.CUDAGraph()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm), torch.no_grad():
        bound(x)
    torch.cuda.current_stream().wait_stream(warm)
    with torch.no_grad(), torch.cuda.graph(graph):
        y = bound(x)
    for _ in range(10):
        step(module, pub)
        with sub.read():
            graph.replay()
        torch.testing.assert_close(y, module(x).detach())


def test_a_graph_over_several_slots_is_refused(ends, device):
    module, pub, _, bound = ends(2)
    x, graph = torch.ones(4, 32, device=device), torch.cuda.CUDAGraph()
    with (
        pytest.raises(shmsync.ProtocolError, match="publish with slots=1"),
        torch.no_grad(),
        torch.cuda.graph(graph),
    ):
        bound(x)
    for _ in range(5):  # nothing is held up
        step(module, pub)
        torch.testing.assert_close(bound(x), module(x))


def test_a_publish_in_a_capture_is_refused_before_anything_changes(ends, device):
    module, pub, sub, _ = ends(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(shmsync.ProtocolError, match="before or after the capture"):
        pub.publish()
    with sub.read() as section:
        assert section.version == 1
    assert step(module, pub) == 2


def test_an_arena_is_used_while_another_thread_captures(ends, device):
    """A capture forbids some calls to all threads; ours must not spoil it."""
    module, pub, sub, _ = ends(2)
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(4, device=device)
    errors = []

    def publish():
        try:
            for _ in range(20):
                step(module, pub)
                with sub.read():
                    pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread.start()
        for _ in range(100):
            y.add_(1)
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert errors == []
    assert set(y.tolist()) == {100.0}


@pytest.mark.parametrize("slots", [1, 2])
def test_reduce_overhead(ends, device, slots):
    module, pub, _, bound = ends(slots)
    compiled = torch.compile(bound, mode="reduce-overhead")
    x = torch.ones(4, 32, device=device)
    with torch.no_grad():
        for _ in range(8):
            step(module, pub)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x).clone(), module(x))
