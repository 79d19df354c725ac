"""What is published: every change to a source is seen, however it was made."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import shmsync


def flat(key):
    return {".".join(key): torch.zeros(1)}


def tree(key):
    made = torch.zeros(1)
    for part in reversed(key):
        made = {part: made}
    return made


def modules(key):
    made = root = nn.Module()
    for part in key[:-1]:
        made._modules[part] = made = nn.Module()  # add_module() refuses some of these names, a subclass may not
    made._buffers[key[-1]] = torch.zeros(1)
    return root


def tensordict(key):
    return TensorDict(tree(key[:200]))  # TensorDict itself makes no deeper one


ODD_KEYS = {
    "a lone surrogate": ("a", "b\ud800c"),
    "an empty part": ("a", "", "b"),
    "levels": ("a",) * 3000,
}
FORMS = [flat, tree, modules, tensordict]


@pytest.mark.parametrize("reason", ODD_KEYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_key_that_no_leaf_can_have_is_refused_with_the_reason(form, reason):
    source = form(ODD_KEYS[reason])
    with pytest.raises(shmsync.ManifestMismatch, match=reason) as error:
        shmsync.Publisher(source)
    str(error.value).encode()
    source = form(("sound",))
    with shmsync.Publisher(source) as pub, pytest.raises(shmsync.ManifestMismatch):
        pub.publish(form(ODD_KEYS[reason]))
