"""The public names: those that programs outside this repository use are there, and only documented ones are shown."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import shmsync
from shmsync import collectors, schemes

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
KINDS = {"Publisher": "pub", "Subscriber": "sub"}
BESIDE = {"name"}  # a Subscriber has it as a Publisher does

FIXED = {  # parameters of calls
    "Publisher": "weights name slots max_readers device dtype include exclude timeout first_version",
    "Publisher.publish": "weights wait timeout after",
    "Publisher.update": "wait timeout",
    "Publisher.adopt": "optimizer",
    "Publisher.wait_readers": "workers timeout procs",
    "Workers": "pub work n args start_method threads restart timeout",
    "Subscriber": "consistency worker timeout follow",
    "Subscriber.bind": "module prefix guard clone_outputs",
    "Subscriber.on_version": "fn",
    "Subscriber.read": "version timeout",
    "Subscriber.run": "fn args with_version kwargs",
    "Subscriber.versions": "timeout",
    "Subscriber.wait_version": "version timeout",
}
SCHEMES = """WeightSyncScheme WeightSender WeightReceiver WeightStrategy TransportBackend MultiProcessWeightSyncScheme
MPTransport SharedMemWeightSyncScheme SharedMemTransport NoWeightSyncScheme RayWeightSyncScheme RayTransport
RayModuleTransformScheme RayActorTransport RayModuleTransformSender RayModuleTransformReceiver RPCWeightSyncScheme
RPCTransport DistributedWeightSyncScheme DistributedTransport WeightUpdaterBase RayWeightUpdater"""
COLLECTOR = """create_env_fn policy num_workers frames_per_batch total_frames weight_sync_scheme sync device
envs_per_worker seed restart_workers max_lag on_lag timeout start_timeout start_method"""
TYPES = "Handle ReadSection Snapshot VersionStamp ReaderInfo PublisherStats SubscriberStats Latency ProcessState"


def parameters(call):
    return set(inspect.signature(call).parameters)


@pytest.mark.parametrize("name", FIXED)
def test_calls_take_the_arguments_that_programs_give(name):
    call = shmsync
    for part in name.split("."):
        call = getattr(call, part)
    assert set(FIXED[name].split()) <= parameters(call)


def test_names_of_schemes_collectors_and_types_are_there():
    for name in SCHEMES.split():
        assert getattr(shmsync, name) is getattr(schemes, name)
    assert set(COLLECTOR.split()) <= parameters(collectors.MultiprocessCollector)
    assert set(TYPES.split()) <= set(shmsync.__all__)
    for name in shmsync.__all__:
        assert getattr(shmsync, name).__module__.startswith("shmsync")


def in_the_table(kind):
    """The names in the first column of the table of docs/api.md whose first row is the constructor."""
    lines = (ROOT / "docs" / "api.md").read_text().split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| `{kind}("))
    rows = [line for line in lines[start : lines.index("", start)] if line.startswith("|")]
    spans = [span for row in rows for span in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return {re.match(r"\w+", span)[0] for span in spans} - {kind}


def in_the_pages(kind):
    """The names that programs and sentences use: `sub.latest`."""
    return {name for page in PAGES for name in re.findall(rf"\b{KINDS[kind]}\.([a-z]\w*)", page.read_text())}


@pytest.mark.parametrize("kind", KINDS)
def test_only_documented_names_are_shown(publisher, subscriber, kind):
    pub = publisher({"w": torch.zeros(3)})
    shown = {name for name in dir(pub if kind == "Publisher" else subscriber(pub)) if not name.startswith("_")}
    assert in_the_table(kind) <= shown
    assert shown <= in_the_table(kind) | in_the_pages(kind) | BESIDE
