"""A scheme of the user's own: a transport with no more than the two methods that TransportBackend asks for."""

import pytest

from support.conformance.nets import Stamped, ask
from support.conformance.rigs import Box, BoxScheme


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_own_scheme_sends_and_receives(strategy):
    boxes, scheme, net = [Box(), Box()], BoxScheme(strategy), Stamped(0)
    scheme.init_on_sender("policy", pipes=boxes)
    scheme.init_on_worker("policy", pipe=boxes[1], model=net)
    sender, receiver = scheme.get_sender(), scheme.get_receiver()
    assert receiver.receive() is False
    assert sender.send(Stamped(1)) == 1
    assert receiver.receive() is True
    assert ask(net) == 1
    assert sender.send_async(Stamped(2), 0) == sender.wait_async() == 2
    assert receiver.receive() is False  # it was for the other worker
    assert len(boxes[0].letters) == 2


def test_own_scheme_refuses_what_every_scheme_refuses():
    scheme = BoxScheme()
    scheme.init_on_sender("policy", pipes=[Box()])
    sender = scheme.get_sender()
    with pytest.raises(RuntimeError, match="no send is pending"):
        sender.wait_async()
    with pytest.raises(ValueError, match="worker 1 is not registered"):
        sender.send(Stamped(1), 1)
    sender.send_async(Stamped(1))
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        sender.send(Stamped(1))
