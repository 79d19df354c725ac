"""numpy arrays as weights, and the weights as numpy arrays."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import shmsync


def arrays(value):
    read_only = np.full(3, value, dtype=np.float64)
    read_only.setflags(write=False)
    return {
        "net.weight": np.full((2, 3), value, dtype=np.float32),
        "net.reversed": np.arange(4, dtype=np.int64)[::-1] * value,
        "net.transposed": (np.arange(6, dtype=np.float32).reshape(2, 3) * value).T,
        "net.other_order": np.full(2, value, dtype=">f4"),
        "net.read_only": read_only,
        "scalar": np.array(value, dtype=np.int32),
        "flag": np.array([True, False]),
        "tensor": torch.full((2,), value),
    }


@pytest.mark.parametrize("slots", [1, 2])
def test_arrays_are_published_as_their_values(both, slots):
    pub, sub = both(arrays(1), slots=slots)
    for version, value in ((2, 5), (3, 7)):
        given = arrays(value)
        assert pub.publish(given) == version
        with sub.read() as section:
            for key, array in given.items():
                shown = section.weights[key]
                wanted = np.asarray(array)
                assert shown.tolist() == wanted.tolist()
                assert str(shown.dtype)[6:] == wanted.dtype.name
    assert pub.publish({"net.weight": np.zeros((2, 3), dtype=np.float32)}) == 4  # a part
    with sub.read() as section:
        assert section.weights["net.weight"].sum() == 0
        assert section.weights["scalar"].item() == 7


def test_what_does_not_fit_is_refused_before_anything_is_written(publisher):
    with pytest.raises(shmsync.ManifestMismatch, match="text is a numpy array of dtype <U2, which torch lacks"):
        publisher({"text": np.array(["ab"]), "a": np.ones(2)})
    pub = publisher({"a": np.ones(2)})
    with pytest.raises(shmsync.ManifestMismatch, match="float64.*float32"):
        pub.publish({"a": np.ones(2, dtype=np.float32)})
    assert pub.version == 1


@pytest.mark.host_memory(reason="numpy shows no other memory")
def test_a_section_shows_arrays_that_numpy_does_not_write(pair):
    pub, sub = pair()
    with sub.read() as section:
        found = section.numpy()
        assert list(found) == ["t"]
        array = found["t"]
        assert array.tolist() == [0] * 4
        assert array.ctypes.data == section.weights["t"].data_ptr()  # zero-copy
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)
    pub.publish({"t": torch.ones(4)})
    with sub.read() as section:
        assert section.numpy()["t"].tolist() == [1] * 4
    assert pub.publish(found) == 3  # they can be published again


@pytest.mark.host_memory(reason="numpy shows no other memory")
def test_nested_keys_and_dtypes_that_numpy_lacks(publisher, subscriber):
    sub = subscriber(publisher({"a.b": torch.ones(1), "c": torch.zeros(2, dtype=torch.int8)}))
    with sub.read() as section:
        assert {key: array.dtype.name for key, array in section.numpy().items()} == {"a.b": "float32", "c": "int8"}
    sub = subscriber(publisher({"h": torch.ones(1, dtype=torch.bfloat16)}))
    with sub.read() as section, pytest.raises(shmsync.ProtocolError, match="'h' is torch.bfloat16 on cpu"):
        section.numpy()


WITHOUT_TENSORDICT = """
import sys

sys.modules["tensordict"] = None
import torch
import shmsync

with shmsync.Publisher({"a": torch.ones(2)}) as pub, shmsync.Subscriber(pub.handle) as sub:
    with sub.read() as section:
        assert section.numpy()["a"].tolist() == [1, 1]
        try:
            section.weights
        except ImportError:
            pass
        else:
            raise AssertionError
    bound = sub.bind(torch.nn.ParameterDict({"a": torch.zeros(2)}), guard=False)
    assert sub.run(bound["a"].tolist) == [1, 1]
"""


def test_a_process_without_tensordict_reads_arrays_and_bound_modules():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TENSORDICT], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
