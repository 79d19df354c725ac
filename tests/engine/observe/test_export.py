"""`shmsync export`: a checkpoint is one version, has each tied tensor once, and is whole or not there."""

import os
import re

import pytest
import torch
from torch import nn

import shmsync
from shmsync import cli
from support.jobs.engine import begin_update
from support.processes import segment_path

safetensors = pytest.importorskip("safetensors.torch", reason="export needs shmsync[safetensors]")


@pytest.fixture
def export(capsys):
    """export(name, path) -> status, stdout and stderr."""

    def run(name, path, *options):
        status = cli.main(["export", name, str(path), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.decoder = nn.Linear(5, 7, bias=False)
        self.decoder.weight = self.encoder.weight


@pytest.mark.parametrize("slots", [1, 3])
def test_a_module_is_loaded_again_by_safetensors_own_means(tmp_path, export, slots):
    net, other = Tied(), Tied()
    path = tmp_path / "net.safetensors"
    with shmsync.Publisher(net, slots=slots) as pub:
        pub.publish()
        status, said, _ = export(pub.name, path)
        assert (status, pub.readers()) == (0, [])
    assert f"{path}: version 2 of {pub.name}, 6 tensors" in said
    assert safetensors.load_model(other, path) == (set(), [])
    assert other.decoder.weight is other.encoder.weight
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key])
    with safetensors.safe_open(path, "pt") as file:
        about = file.metadata()
        assert (about["format"], about["shmsync.version"], about["shmsync.arena"]) == ("pt", "2", pub.name)
        assert about["encoder.weight"] == "decoder.weight"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_is_there_is_kept_without_force(tmp_path, export):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"precious")
    with shmsync.Publisher({"t": torch.ones(3)}) as pub:
        status, _, said = export(pub.name, path)
        assert (status, path.read_bytes()) == (1, b"precious")
        assert f"{path} exists; --force replaces it" in said
        assert export(pub.name, path, "--force")[0] == 0
        assert torch.equal(safetensors.load_file(path)["t"], torch.ones(3, device="cpu"))
        assert export(pub.name, tmp_path)[2].endswith("is a folder; name a file in it\n")
        assert "there is no folder" in export(pub.name, tmp_path / "no" / "w")[2]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_exported_says_why_and_leaves_nothing(open_trainer, name, tmp_path, export):
    assert "there is no arena" in export(name, tmp_path / "w")[2]
    trainer = open_trainer(2)
    trainer.call(begin_update, 3)
    status, _, said = export(name, tmp_path / "w", "--timeout", "0.1")
    assert status == 1
    assert re.search("shmsync export: .*kept readers out until the deadline", said)
    trainer.kill()
    status, _, said = export(name, tmp_path / "w", "--timeout", "0.1")
    assert status == 1
    assert "shmsync export: " in said
    assert os.listdir(tmp_path) == []
    segment_path(name).unlink(missing_ok=True)
