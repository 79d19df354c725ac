"""What stays readable when an arena was closed."""

import gc
from math import inf as for_ever

import pytest
import torch

import shmsync
from support.jobs.engine import look, read, refresh, wait_version
from support.weights import Net, stamped, stamps


@pytest.mark.parametrize("slots", [1, 2])
def test_last_version_of_a_closed_arena_stays_readable(attached, slots):
    pub = shmsync.Publisher(stamped(1), slots=slots)
    with shmsync.Subscriber(pub.handle) as sub:
        waiter = attached(pub)
        waiter.start(wait_version, 3, timeout=for_ever)
        pub.publish(stamped(2))
        assert sub.refresh() is True
        pub.close()
        with pytest.raises(shmsync.ClosedError):
            waiter.result()
        assert sub.refresh() is False
        assert read(sub) == waiter.call(look) == (2, 2, 2)
        assert sub.wait_version(2) == 2
        with pytest.raises(shmsync.ClosedError):
            sub.wait_version(3, timeout=for_ever)
        assert waiter.call(refresh) is False
        with pytest.raises(shmsync.ArenaNotFound):
            shmsync.Subscriber(pub.handle)
        for call in (pub.publish, pub.readers, lambda: pub.weights):
            with pytest.raises(shmsync.ClosedError):
                call()
        pub.close()
    with pytest.raises(shmsync.ClosedError):
        sub.refresh()
    with pytest.raises(shmsync.ClosedError):
        read(sub)


def test_views_never_dangle(open_trainer):
    writer = open_trainer(3)
    sub = shmsync.Subscriber(writer.handle)
    module_view, whole = sub.weights["layer", "weight"], sub.weights
    sub.close()
    del sub
    gc.collect()
    writer.kill()
    assert (module_view == 3).all()
    assert stamps(whole) == (3, 3)
    del whole
    gc.collect()
    assert (module_view == 3).all()


def test_views_of_a_publisher_outlive_it():
    net = Net(0)
    pub = shmsync.Publisher(net)
    sub = shmsync.Subscriber(pub.handle)
    module = sub.bind(Net(1)).eval()
    pub.adopt(net)
    view = pub.weights["0", "weight"]
    with pub.update() as weights:
        written = weights["0", "bias"]
        written.fill_(5)
    expected = net[0].weight.detach().clone()
    pub.close()
    sub.close()
    del pub, sub, weights
    gc.collect()
    assert torch.equal(view, expected)
    assert (written == 5).all()
    assert torch.equal(module[0].weight, expected)
    with torch.no_grad():
        net[0].weight.add_(1)  # private again
    assert torch.equal(view, expected)
