"""What every scheme is before it sends: initialisation, contexts, model ids, pickles."""

import gc
import pickle
import weakref

import pytest
import torch
from tensordict import TensorDictBase

from shmsync.schemes import TransportBackend, WeightReceiver, WeightSender, WeightStrategy
from support.conformance.contexts import Context, Lookup
from support.conformance.nets import Stamped, ask, stamp
from support.conformance.table import MP, only
from support.weights import leaves


def test_init_on_one_side_is_not_init_on_the_other(any_entry, ends):
    with any_entry.make() as sending, any_entry.make() as receiving:
        sending.init_on_sender("policy", **ends.sender)
        receiving.init_on_worker("policy", model=Stamped(), **ends.worker)
        assert isinstance(sending.get_sender(), WeightSender) and isinstance(receiving.get_receiver(), WeightReceiver)
        for missing in (sending.get_receiver, receiving.get_sender):
            with pytest.raises(RuntimeError):
                missing()


def test_transport_is_a_transport_backend(scheme, ends):
    transport = scheme.create_transport(ends.transport)
    assert isinstance(transport, TransportBackend)
    assert transport.check_connection() is ends.connected()
    for method in ("send_weights_async", "wait_ack", "send_ack", "check_ack"):
        assert callable(getattr(transport, method))


def test_sender_takes_its_workers_from_keyword_arguments_or_a_context(scheme, ends):
    scheme.init_on_sender("policy", num_workers=1, **ends.sender)
    assert scheme.get_sender().worker_ids == [0]
    copy = pickle.loads(pickle.dumps(scheme))
    context = Context(num_workers=1, **ends.sender)
    copy.init_on_sender("policy", context)
    assert copy.get_sender().worker_ids == [0]


def test_num_workers_that_contradict_the_workers_are_a_value_error(scheme, ends):
    with pytest.raises(ValueError, match="num_workers is 2 but there are 1"):
        scheme.init_on_sender("policy", num_workers=2, **ends.sender)
    with pytest.raises(RuntimeError):
        scheme.get_sender()


# ---- contexts


@pytest.mark.parametrize("side", ["sender", "worker"])
def test_both_sides_hold_their_contexts_weakly(scheme, ends, side):
    context = Context(policy=Stamped(), **getattr(ends, side))
    getattr(scheme, f"init_on_{side}")("policy", context)
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
@only(MP)
def test_model_id_is_a_path(entry, path):
    inner = Context(nets=[Stamped(), Stamped()])
    context = Context(policy=Stamped(), env=Context(value_net=Stamped(), transform=[Stamped(), inner]))
    net = stamp(PATHS[path](context), 3)
    weights = entry.make().prepare_weights(None, path, WeightStrategy("tensordict"), context)
    assert weights["layer", "weight"].data_ptr() == net.layer.weight.data_ptr()


# ---- prepare_weights


def number(weights):
    into = Stamped()
    WeightStrategy().apply_weights(into, weights)
    return ask(into)


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
@pytest.mark.parametrize("given", [Stamped(4), None], ids=["module", "none"])
@only(MP)
def test_a_module_or_the_contexts_model_is_extracted(entry, given, form):
    context = Lookup(models={"policy": Stamped(2)})
    weights = entry.make().prepare_weights(given, "policy", WeightStrategy(form), context)
    assert isinstance(weights, TensorDictBase if form == "tensordict" else dict)
    assert not any(isinstance(leaf, torch.nn.Parameter) or leaf.requires_grad for leaf in leaves(weights))
    assert number(weights) == (2 if given is None else 4)


@only(MP)
def test_none_falls_back_to_the_fallback_policy(entry):
    scheme = entry.make()
    for context in (Context(_fallback_policy=Stamped(3)), Lookup(models={}, _fallback_policy=Stamped(3))):
        assert number(scheme.prepare_weights(None, "policy", WeightStrategy(), context)) == 3
    context = Context(_fallback_policy=Stamped(3))
    assert scheme.prepare_weights(None, "env.value_net", WeightStrategy(), context) is None


@only(MP)
def test_string_is_a_model_id_in_the_context(entry):
    scheme = entry.make()
    context = Context(best=Stamped(5))
    assert number(scheme.prepare_weights("best", "policy", WeightStrategy(), context)) == 5
    with pytest.raises(ValueError, match="there is none"):
        scheme.prepare_weights("best", "policy", WeightStrategy())


# ---- pickling


def test_pickled_scheme_keeps_its_configuration_alone(scheme, ends):
    scheme.init_on_sender("policy", Lookup(models={}), **ends.sender)
    copy = pickle.loads(pickle.dumps(scheme))
    assert type(copy) is type(scheme) and copy.strategy == scheme.strategy
    with pytest.raises(RuntimeError):
        copy.get_sender()
    with pytest.raises(RuntimeError):
        copy.get_receiver()
    copy.init_on_worker("policy", model=Stamped(), **ends.worker)
    assert copy.get_receiver().receive() is False
    assert scheme.get_sender().worker_ids == [0]  # the original lost nothing


def test_pickled_scheme_keeps_every_option(entry):
    scheme = entry.make(timeout=3.5)
    options = {key: value for key, value in vars(scheme).items() if not key.startswith("_")}
    copy = pickle.loads(pickle.dumps(scheme))
    assert {key: value for key, value in vars(copy).items() if not key.startswith("_")} == options
    assert options["timeout"] == 3.5
