"""`shmsync doctor`: each check sees what is wrong, says what to do about it, and tells scripts by its exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shmsync import cli
from shmsync.cli import doctor
from shmsync.cli.doctor import Level


def test_every_finding_that_is_not_fine_has_a_cure():
    found = doctor.examine()
    checks = {"system", "shm", "memory", "memfd", "workers", "descriptors", "cuda"}
    assert {finding.check for finding in found} >= checks
    assert [finding for finding in found if finding.level in (Level.WARNING, Level.FAILURE) and not finding.cure] == []


def test_this_machine_runs_the_tests_so_nothing_fails_here(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "workers: a worker can open the memory of its trainer" in text
    assert text.splitlines()[-1].startswith("0 failures")
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == 0
    assert {"check", "level", "text", "cure"} == set(told["findings"][0])


FULL, SMALL = (f"mount -t tmpfs -o size={size} none /dev/shm" for size in ("512k", "2m"))
READ_ONLY = "mount -t tmpfs none /dev/shm && mount -o remount,ro /dev/shm"
# Flags of unshare, what is done there and the arguments; the status, and the check with its level, text and cure. In a
# pid namespace without its own /proc, the pids that a process knows are not those that /proc shows.
ELSEWHERE = {
    "a full /dev/shm": (["-Urm"], FULL, [], 1, ("shm", "failure", "512.0 KiB of 512.0 KiB free", "--shm-size")),
    "a small /dev/shm": (["-Urm"], SMALL, [], 0, ("shm", "warning", "", "")),
    "a small /dev/shm, for the strict": (["-Urm"], SMALL, ["--strict"], 1, ("shm", "warning", "", "")),
    "a read-only /dev/shm": (["-Urm"], READ_ONLY, [], 1, ("shm", "failure", "", "")),
    "a /proc of other processes": (["-Urmp", "--fork"], "true", [], 1, ("workers", "failure", "", "hidepid")),
    "few descriptors": (["-Ur"], "ulimit -n 128", ["--strict"], 1, ("descriptors", "warning", "", "ulimit -n")),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_in_other_namespaces(where):
    flags, before, arguments, status, (check, level, text, cure) = ELSEWHERE[where]
    script = f'{before} || exit 77; exec "$@"'
    command = ["unshare", *flags, "sh", "-c", script, "sh", sys.executable, "-m", "shmsync", "doctor", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd="/")
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"this system does not allow namespaces or mounts: {done.stderr.strip()}")
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}[check]
    assert (done.returncode, found["level"]) == (status, level)
    assert text in found["text"] and cure in found["cure"]


def test_a_cgroup_that_leaves_little(tmp_path):
    folder = tmp_path / "sys/fs/cgroup/job"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    for name, text in (("memory.max", str(100 << 20)), ("memory.current", "0"), ("memory.stat", "inactive_file 0")):
        (folder / name).write_text(text + "\n")
    found = doctor.memory(tmp_path)
    assert found.level is Level.WARNING
    assert "100.0 MiB can be used" in found.text
    (folder / "memory.max").write_text("max\n")
    assert doctor.memory(tmp_path).level is Level.OK


@pytest.mark.parametrize(
    ("shown", "level"),
    [("always [never] within_size", Level.NOTE), ("always [within_size] never", Level.OK), (None, Level.NOTE)],
)
def test_huge_pages(tmp_path, shown, level):
    path = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    path.parent.mkdir(parents=True)
    if shown:
        path.write_text(shown + "\n")
    assert doctor.huge_pages(tmp_path).level is level


def test_numa_containers_and_gpus(tmp_path):
    for check in (doctor.numa, doctor.containers, doctor.cuda):
        assert check(tmp_path).level is Level.OK
    for name in ("sys/devices/system/node/node0", "sys/devices/system/node/node1", "dev"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / ".dockerenv").touch()
    for check in (doctor.numa, doctor.containers, doctor.cuda):
        found = check(tmp_path)
        assert (found.level, bool(found.cure)) == (Level.NOTE, True)


@pytest.mark.skipif(
    Path("/dev/nvidia0").exists(), reason="on a machine with a GPU doctor asks CUDA whether arenas can lie on it"
)
def test_it_imports_nothing_of_cuda():
    program = (
        "import sys; from shmsync import cli; before = set(sys.modules); cli.main(['doctor']); "
        "print([m for m in set(sys.modules) - before if 'cuda' in m.lower() or 'pynvml' in m or 'cupy' in m])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines()[-1] == "[]"
