"""A scheme of the user's own: a transport with no more than the three methods that TransportBackend asks for."""

from collections import deque

import pytest

from shmsync.schemes import TransportBackend, WeightSyncScheme
from support.conformance.nets import Stamped, ask


class Mailbox:
    """Carries weights from one side to the other, in one process."""

    def __init__(self):
        self.letters = deque()

    def send_weights(self, model_id, weights):
        self.letters.append((model_id, weights))

    def receive_weights(self, timeout=1.0):
        return self.letters.popleft() if self.letters else None

    def check_connection(self):
        return True


class MailScheme(WeightSyncScheme):
    def create_transport(self, pipe_or_context):
        return pipe_or_context


def test_three_methods_make_a_transport_backend():
    assert isinstance(Mailbox(), TransportBackend)


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_own_scheme_sends_and_receives(strategy):
    boxes, scheme, net = [Mailbox(), Mailbox()], MailScheme(strategy), Stamped(0)
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
    scheme = MailScheme()
    scheme.init_on_sender("policy", pipes=[Mailbox()])
    sender = scheme.get_sender()
    with pytest.raises(RuntimeError, match="no send is pending"):
        sender.wait_async()
    with pytest.raises(ValueError, match="worker 1 is not registered"):
        sender.send(Stamped(1), 1)
    sender.send_async(Stamped(1))
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        sender.send(Stamped(1))
