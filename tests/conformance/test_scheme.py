"""What every scheme is before it sends: initialisation, contexts, model ids, pickles."""

import gc
import multiprocessing
import pickle
import threading
import weakref

import pytest
import torch
from nets import FORMS, Stamped, ask, stamp
from peers import Context, Lookup
from tensordict import TensorDictBase

from shmsync.schemes import TransportBackend, WeightReceiver, WeightSender, WeightStrategy, WeightSyncScheme


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_scheme_is_abstract_in_its_transport_alone():
    with pytest.raises(TypeError, match="create_transport"):
        WeightSyncScheme()
    assert WeightSyncScheme.__abstractmethods__ == {"create_transport"}


def test_strategy_of_an_unknown_name_is_a_value_error(scheme):
    with pytest.raises(ValueError, match="not 'pickle'"):
        type(scheme)(strategy="pickle")


def test_get_sender_before_init_is_a_runtime_error(scheme):
    with pytest.raises(RuntimeError, match=r"call init_on_sender\(\) before"):
        scheme.get_sender()


def test_get_receiver_before_init_is_a_runtime_error(scheme):
    with pytest.raises(RuntimeError, match=r"call init_on_worker\(\) before"):
        scheme.get_receiver()


def test_init_on_one_side_is_not_init_on_the_other(scheme, pipe):
    scheme.init_on_sender("policy", pipes=[pipe[0]])
    assert isinstance(scheme.get_sender(), WeightSender)
    with pytest.raises(RuntimeError):
        scheme.get_receiver()


def test_init_on_worker_gives_a_receiver(scheme, pipe):
    scheme.init_on_worker("policy", pipe=pipe[1], model=Stamped())
    assert isinstance(scheme.get_receiver(), WeightReceiver)
    with pytest.raises(RuntimeError):
        scheme.get_sender()


def test_create_sender_and_create_receiver_know_nobody_yet(scheme):
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    assert isinstance(sender, WeightSender) and sender.worker_ids == []
    assert isinstance(receiver, WeightReceiver) and receiver.receive() is False


def test_transport_is_a_transport_backend(scheme, pipe):
    transport = scheme.create_transport(pipe[0])
    assert isinstance(transport, TransportBackend)
    assert transport.check_connection() is True
    for method in ("send_weights_async", "wait_ack", "send_ack", "check_ack"):
        assert callable(getattr(transport, method))


def test_sender_takes_pipes_from_keyword_arguments_or_a_context(scheme, pipe):
    scheme.init_on_sender("policy", pipes=[pipe[0]], num_workers=1)
    assert scheme.get_sender().worker_ids == [0]
    copy = pickle.loads(pickle.dumps(scheme))
    context = Context(pipes=[pipe[0]], num_workers=1)
    copy.init_on_sender("policy", context)
    assert copy.get_sender().worker_ids == [0]


def test_num_workers_that_contradict_the_pipes_are_a_value_error(scheme, pipe):
    with pytest.raises(ValueError, match="num_workers is 2 but there are 1 pipes"):
        scheme.init_on_sender("policy", pipes=[pipe[0]], num_workers=2)
    with pytest.raises(RuntimeError):
        scheme.get_sender()


def test_init_without_pipes_is_a_value_error(entry):
    scheme = entry.make()
    with pytest.raises(ValueError, match="pipes must be given"):
        scheme.init_on_sender("policy")
    with pytest.raises(ValueError, match="pipe must be given"):
        scheme.init_on_worker("policy", model=Stamped())
    scheme.shutdown()


def test_model_id_that_is_no_path_is_a_value_error(scheme, pipe):
    with pytest.raises(ValueError, match="model_id is a path"):
        scheme.init_on_sender(7, pipes=[pipe[0]])


# ---- contexts


def test_sender_holds_its_context_weakly(scheme, pipe):
    context = Context(pipes=[pipe[0]], policy=Stamped())
    scheme.init_on_sender("policy", context)
    gone = weakref.ref(context)
    del context
    gc.collect()
    assert gone() is None


def test_receiver_holds_its_context_weakly(scheme, pipe):
    context = Context(pipe=pipe[1], policy=Stamped())
    scheme.init_on_worker("policy", context)
    gone = weakref.ref(context)
    del context
    gc.collect()
    assert gone() is None


PATHS = {
    "policy": lambda context: context.policy,
    "env.value_net": lambda context: context.env.value_net,
    "env.transform[0]": lambda context: context.env.transform[0],
    "env.transform[1].nets[-1]": lambda context: context.env.transform[1].nets[-1],
}


@pytest.mark.parametrize("path", PATHS)
def test_model_id_is_a_path(scheme, path):
    inner = Context(nets=[Stamped(), Stamped()])
    context = Context(policy=Stamped(), env=Context(value_net=Stamped(), transform=[Stamped(), inner]))
    net = stamp(PATHS[path](context), 3)
    weights = scheme.prepare_weights(None, path, WeightStrategy("tensordict"), context)
    assert weights["layer", "weight"].data_ptr() == net.layer.weight.data_ptr()


# ---- prepare_weights


def number(weights):
    into = Stamped()
    WeightStrategy().apply_weights(into, weights)
    return ask(into)


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_none_is_extracted_from_the_contexts_model(scheme, form):
    context = Lookup(models={"policy": Stamped(2)})
    weights = scheme.prepare_weights(None, "policy", WeightStrategy(form), context)
    assert isinstance(weights, TensorDictBase if form == "tensordict" else dict)
    assert number(weights) == 2


def test_none_falls_back_to_the_fallback_policy(scheme):
    context = Context(_fallback_policy=Stamped(3))
    assert number(scheme.prepare_weights(None, "policy", WeightStrategy(), context)) == 3
    assert scheme.prepare_weights(None, "env.value_net", WeightStrategy(), context) is None


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_module_is_extracted(scheme, form):
    weights = scheme.prepare_weights(Stamped(4), "policy", WeightStrategy(form))
    assert isinstance(weights, TensorDictBase if form == "tensordict" else dict)
    assert number(weights) == 4


def test_string_is_a_model_id_in_the_context(scheme):
    context = Context(best=Stamped(5))
    assert number(scheme.prepare_weights("best", "policy", WeightStrategy(), context)) == 5
    with pytest.raises(ValueError, match="there is none"):
        scheme.prepare_weights("best", "policy", WeightStrategy())


@pytest.mark.parametrize("form", ["state_dict", "tensordict", "nested dict"])
def test_weights_are_taken_as_they_are(scheme, form):
    weights = FORMS[form](1)
    assert scheme.prepare_weights(weights, "policy", WeightStrategy()) is weights


# ---- pickling


def test_pickled_scheme_keeps_its_configuration_alone(scheme, pipe):
    scheme.init_on_sender("policy", Lookup(models={}), pipes=[pipe[0]])
    copy = pickle.loads(pickle.dumps(scheme))
    assert type(copy) is type(scheme) and copy.strategy == scheme.strategy
    with pytest.raises(RuntimeError):
        copy.get_sender()
    with pytest.raises(RuntimeError):
        copy.get_receiver()
    assert scheme.get_sender().worker_ids == [0]  # the original lost nothing


def test_pickled_scheme_keeps_every_option(entry):
    scheme = entry.make(timeout=3.5)
    options = {key: value for key, value in vars(scheme).items() if not key.startswith("_")}
    copy = pickle.loads(pickle.dumps(scheme))
    assert {key: value for key, value in vars(copy).items() if not key.startswith("_")} == options
    assert options["timeout"] == 3.5


def test_pickled_scheme_can_be_initialised_again(scheme, pipe):
    scheme.init_on_sender("policy", pipes=[pipe[0]])
    copy = pickle.loads(pickle.dumps(scheme))
    copy.init_on_worker("policy", pipe=pipe[1], model=Stamped())
    assert copy.get_receiver().receive() is False


def test_sender_is_picklable_without_its_context(scheme, pipe):
    context = Lookup(pipes=[pipe[0]], models={"env.value_net": Stamped()}, lock=threading.Lock())
    scheme.init_on_sender("env.value_net", context)
    copy = pickle.loads(pickle.dumps(scheme.get_sender()))
    assert copy.model_id == "env.value_net"
    assert copy.worker_ids == []  # pipes belong to one process
    assert scheme.get_sender().worker_ids == [0]


def test_receiver_is_picklable_without_its_context(scheme, pipe):
    context = Context(pipe=pipe[1], lock=threading.Lock())
    scheme.init_on_worker("policy", context)
    copy = pickle.loads(pickle.dumps(scheme.get_receiver()))
    assert copy.model_id == "policy"
    assert copy.receive() is False


def test_tensors_of_a_prepared_module_need_no_gradient(scheme):
    weights = scheme.prepare_weights(Stamped(1), "policy", WeightStrategy("tensordict"))
    assert not any(isinstance(leaf, torch.nn.Parameter) or leaf.requires_grad for leaf in weights.values(True, True))
