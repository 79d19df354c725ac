"""The guide for containers: what it says of /dev/shm, users and namespaces, in namespaces made here; its manifests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.programs.pages import File, Typed, same, steps

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "containers.md"
FILES = {each.name: each.text for each in steps(PAGE) if isinstance(each, File)}
PYTHON = sys.executable


def shell(script, directory, *before):
    """Run it with a private /dev/shm of 64 MB, as Docker makes it."""
    script = f"set -e; mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm; {script}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = ["unshare", "--mount", *before, "bash", "-c", script]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=250)


@pytest.fixture
def container():
    """A folder with the files of the page. Other users may look into it, which they may not into pytest's own."""
    with tempfile.TemporaryDirectory(prefix="container-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        for name, text in FILES.items():
            (folder / name).write_text(text)
        if (done := shell("true", folder)).returncode != 0:
            needed = "needs the right to make namespaces: run as root, outside of a restricted container"
            pytest.skip(f"{needed}: {done.stderr.strip()}")
        yield folder


@pytest.mark.slow
def test_weights_need_no_room_in_dev_shm(container):
    done = shell(f"{PYTHON} check.py", container)
    assert done.returncode == 0, done.stderr
    (shown,) = (each.output for each in steps(PAGE) if isinstance(each, Typed) and "docker run" in each.command)
    assert same(shown, done.stdout, loose=True), done.stdout
    assert done.stdout.startswith("/dev/shm has 64 MiB") and "200 MB" in done.stdout
    assert int(re.search(r"(\d+) KiB", done.stdout)[1]) < 1024


TRAINER = """
import sys, torch, shmsync
with shmsync.Publisher({"w": torch.arange(4.0)}, name="policy"):
    print("ready", flush=True)
    sys.stdin.readline()
"""
WORKER = """
import shmsync
with shmsync.Subscriber("policy", follow=True, timeout={seconds}, worker=0) as sub, sub.read() as section:
    print("sum", section.weights["w"].sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "said"),
    [
        pytest.param("unshare --mount", "sum 6.0", id="a container of the same pod"),
        pytest.param("unshare --mount --pid --fork --mount-proc", "has pid namespace", id="another process namespace"),
    ],
)
def test_a_worker_in_another_container(container, around, said):
    (container / "trainer.py").write_text(TRAINER)
    (container / "work.py").write_text(WORKER.replace("{seconds}", "60" if said.startswith("sum") else "0"))
    script = (
        f"mkfifo end; {PYTHON} trainer.py <end >ready & exec 3>end; until grep -q ready ready; do sleep 0.1; done; "
        f"set +e; {around} {PYTHON} work.py; echo >&3; wait"
    )
    done = shell(script, container)
    assert said in done.stdout + done.stderr, done.stdout + done.stderr
    if not said.startswith("sum"):
        assert "ArenaNotFound" in done.stderr
        assert said in PAGE.read_text()


def test_the_manifest_is_of_kubernetes_schema():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: shmsync[guides] brings it")
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: shmsync[guides] brings it")
    pod = yaml.safe_load(FILES["pod-of-two.yaml"])
    validate.validate(pod, validate.latest_version(), strict=True)
    spec = pod["spec"]
    assert spec["shareProcessNamespace"] is True and "runAsUser" in spec["securityContext"]
    (volume,) = (each["name"] for each in spec["volumes"] if each["emptyDir"]["medium"] == "Memory")
    for each in spec["containers"]:
        assert {"name": volume, "mountPath": "/dev/shm"} in each["volumeMounts"]
