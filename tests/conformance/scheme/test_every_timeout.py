"""Every public parameter that is a time follows one rule: None is the default, math.inf has no limit, 0 is allowed.

The parameters are found in the signatures of what is public: a new one must follow the rule too. A public
class of which LIVE has no object is a failure.
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import math
import re
from fractions import Fraction

import numpy
import pytest
import torch

import shmsync
from shmsync import collectors, metrics, schemes
from shmsync.cli.program import parser as command_line
from support.conformance.nets import Stamped
from support.conformance.table import NONE, SCHEMES

TIME = re.compile("time|second|interval|deadline|spin|patien|delay|period|grace|linger")
NO_TIMES = {"max_interval", "deadline", "nanoseconds"}  # batches of RayWeightUpdater; between layers of shmsync
WRONG = [math.nan, -1, -math.inf, -(10**400), -(10**5000), True, "2", [1], 1j, numpy.float64("nan"), object()]
RIGHT = [None, 0, 0.5, math.inf, 10**400, 10**5000, Fraction(10**400), numpy.float32(1), numpy.int64(1), 1e300]


def public():
    """Every public name whose packages are installed."""
    modules = [shmsync, schemes, collectors, metrics]
    with contextlib.suppress(ImportError):
        from shmsync.integrations import torchrl

        modules.append(torchrl)
    found = {}
    for module in modules:
        for name in getattr(module, "__all__", None) or [each for each in vars(module) if each[0] != "_"]:
            with contextlib.suppress(ImportError):
                value = getattr(module, name)
                if callable(value) and str(getattr(value, "__module__", "")).startswith("shmsync"):
                    found[value] = name
    return found


def times(function):
    """Its parameters that are times."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    return [name for name in parameters if TIME.search(name) and name not in NO_TIMES]


def timed_methods(kind):
    names = [name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))]
    return {name: found for name in names if (found := times(getattr(kind, name)))}


@contextlib.contextmanager
def ends_of(entry):
    """Its scheme, transport, sender and receiver."""
    ends = entry.ends()
    with entry.make() as ours, entry.make() as theirs:
        ours.init_on_sender("policy", **ends.sender)
        theirs.init_on_worker("policy", model=Stamped(), **ends.worker)
        yield ours, ours.create_transport(ends.transport), ours.get_sender(), theirs.get_receiver()


@contextlib.contextmanager
def engine():
    with shmsync.Publisher(torch.nn.Linear(1, 1)) as pub, shmsync.Subscriber(pub.handle) as sub:
        yield pub, sub


@contextlib.contextmanager
def others():
    made = [object.__new__(collectors.MultiprocessCollector)]  # what is wrong is refused before it looks at workers
    with contextlib.suppress(ImportError):
        from shmsync.integrations import torchrl

        made.append(torchrl.ShmWeightSyncScheme())
    transport = shmsync.SharedMemTransport()
    yield (*made, transport)
    transport.close()


LIVE = {"engine": engine, "others": others}
LIVE |= {entry.name: lambda entry=entry: ends_of(entry) for entry in [*SCHEMES, NONE]}
PLAIN = {
    "version": 1, "workers": [0], "models": {}, "handle_or_name": "nowhere", "weights": {"t": torch.zeros(1)},
    "create_env_fn": [dict], "policy": torch.nn.Linear(1, 1), "frames_per_batch": 1, "total_frames": 1,
    "num_workers": 1, "max_restarts": 0,
}  # fmt: skip


def refuses(call, parameter, value):
    """It names the parameter and the value, as the validator does, before anything else."""
    with pytest.raises((TypeError, ValueError)) as error:
        call(**{parameter: value})
    assert parameter in str(error.value), error.value
    assert "0 or more seconds" in str(error.value), error.value
    with contextlib.suppress(ValueError):
        assert repr(value) in str(error.value)


def with_the_rest(function, parameter):
    """Arguments for its other required parameters."""
    found = inspect.signature(function).parameters.values()
    needed = [each.name for each in found if each.default is each.empty and each.kind not in (2, 4)]
    return {name: PLAIN.get(name) for name in needed if name not in ("self", parameter)}


@pytest.mark.parametrize("live", LIVE)
def test_no_method_takes_what_is_no_time(live):
    with LIVE[live]() as objects:
        for each in objects:
            for name, parameters in timed_methods(type(each)).items():
                method = getattr(each, name)
                for parameter, value in itertools.product(parameters, WRONG):
                    refuses(functools.partial(method, **with_the_rest(method, parameter)), parameter, value)


def test_no_public_class_was_left_out():
    met = set()
    for live in LIVE.values():
        with contextlib.suppress(pytest.skip.Exception), live() as objects:
            met |= {type(each) for each in objects}
    for kind, name in public().items():
        if inspect.isclass(kind) and timed_methods(kind) and kind is not shmsync.TransportBackend:
            assert any(issubclass(each, kind) for each in met), f"{name} has methods that take times: add one to LIVE"


RECORDS = {shmsync.SubscriberStats, shmsync.PublisherStats, collectors.CollectorStats}  # that shmsync makes
CALLED = [
    (each, name, parameter) for each, name in public().items() if each not in RECORDS for parameter in times(each)
]


@pytest.mark.parametrize(("call", "name", "parameter"), CALLED, ids=lambda value: value if type(value) is str else "")
def test_no_constructor_and_no_function_takes_what_is_no_time(call, name, parameter):
    for value in WRONG:
        refuses(functools.partial(call, **with_the_rest(call, parameter)), parameter, value)


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_what_is_a_time_is_one_everywhere_in_the_engine(number):
    value = RIGHT[number]
    with shmsync.Publisher({"t": torch.zeros(1)}, timeout=value) as pub:
        with shmsync.Subscriber(pub.handle, timeout=value, worker=0) as sub:
            with sub.read(timeout=value), sub.read(timeout=value):
                pass
            with sub.read(version=1, timeout=value):
                pass
            assert sub.wait_version(1, value) == 1
            pub.wait_readers([0], timeout=value)
        assert pub.publish(wait=[], timeout=value) == 2
        with pub.update(timeout=value):
            pass


WITH_TIMEOUTS = {entry.name: entry.make for entry in SCHEMES}
WITH_TIMEOUTS |= {"MPTransport": lambda **given: schemes.MPTransport(None, **given)}
WITH_TIMEOUTS |= {"SharedMemTransport": schemes.SharedMemTransport}


@pytest.mark.parametrize("name", WITH_TIMEOUTS)
def test_what_is_a_time_is_one_for_a_scheme_and_none_is_the_default(name):
    make = WITH_TIMEOUTS[name]
    default = make().timeout
    assert default > 0
    with pytest.raises(ValueError, match="0 or more seconds"):
        make(timeout=-1)
    for value in RIGHT:
        try:
            wanted = default if value is None else float(value)
        except OverflowError:
            wanted = math.inf
        assert make(timeout=value).timeout == wanted


OPTIONS = [
    (name, action)
    for each in command_line()._actions
    if isinstance(each, argparse._SubParsersAction)
    for name, command in each.choices.items()
    for action in command._actions
    if TIME.search(action.dest)
]


@pytest.mark.parametrize("text", ["nan", "-1", "-inf", "-1" + "0" * 400, "two", "", "True"])
@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=lambda each: each if isinstance(each, str) else each.dest)
def test_no_option_of_the_commands_takes_what_is_no_time(command, option, text, capsys):
    with pytest.raises(SystemExit):
        command_line().parse_args([command, "name", "file", f"--{option.dest}={text}"])
    said = capsys.readouterr().err
    assert f"--{option.dest}" in said and "seconds" in said
