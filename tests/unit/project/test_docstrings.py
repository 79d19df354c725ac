"""Every public name is described where it is defined. ruff checks that each Python function has a docstring."""

import enum
import inspect
import re

import pytest

import shmsync
import shmsync.collectors
import shmsync.metrics
import shmsync.schemes

MODULES = [shmsync, shmsync.schemes, shmsync.collectors, shmsync.metrics]
ALIKE = {"self", "cls", "args", "kwargs"}
ELSEWHERE = re.compile(r"arguments are those of (\w+)")


def public():
    for module in MODULES:
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        for name in names:
            if not name.startswith("_"):
                yield f"{module.__name__}.{name}", getattr(module, name)


def parts(name, value):
    """(name, parameters or fields, all docstrings where they may be described) of a public thing and what it has."""
    if not inspect.isclass(value):
        yield name, parameters(value), [value.__doc__]
        return
    if value.__module__.split(".")[0] != "shmsync":
        return
    texts = [each.__doc__ for each in value.__mro__ if each.__module__.startswith("shmsync")]
    texts += [getattr(shmsync, each).__doc__ for text in texts for each in ELSEWHERE.findall(text or "")]
    if value.__init__ is not object.__init__ and not issubclass(value, (tuple, BaseException, enum.Enum)):
        yield name, parameters(value.__init__), [*texts, value.__init__.__doc__]
    yield f"{name} (fields)", list(getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", ())), texts
    for attribute, member in vars(value).items():
        if attribute.startswith("_"):
            continue
        if inspect.isfunction(member):
            docs = [getattr(getattr(each, attribute, None), "__doc__", None) for each in value.__mro__]
            yield f"{name}.{attribute}", parameters(member), [*docs, *texts]


def parameters(function):
    return [each for each in inspect.signature(function).parameters if each not in ALIKE and not each.startswith("_")]


@pytest.mark.parametrize("name", sorted(dict(public())))
def test_every_parameter_and_field_is_described(name):
    value = dict(public())[name]
    assert inspect.getdoc(value)  # a class of the native core is not seen by ruff
    missing = [
        f"{where}: {word}"
        for where, words, texts in parts(name, value)
        for word in words
        if not any(re.search(rf"\b{word}\b", text or "") for text in texts)
    ]
    assert not missing
