"""`shmsync doctor`: each check sees what is wrong, says what to do about it, and tells scripts by its exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shmsync import cli
from shmsync.cli import doctor
from shmsync.cli.doctor import Level


def test_this_machine_runs_the_tests_so_nothing_fails_here(capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "0 failures" in shown
    for check in ("system", "shm", "memory", "memfd", "workers", "cuda"):
        assert f" {check}: " in shown
    assert [each for each in doctor.examine() if each.level is Level.WARNING and not each.cure] == []


FULL, SMALL = (f"mount -t tmpfs -o size={size} none /dev/shm" for size in ("512k", "2m"))
# Flags of unshare, what is done there and the arguments; the status, and the check with its level, text and cure. In a
# pid namespace without its own /proc, the pids that a process knows are not those that /proc shows.
ELSEWHERE = {
    "a full /dev/shm": (["-Urm"], FULL, [], 1, ("shm", "failure", "512.0 KiB of 512.0 KiB free", "--shm-size")),
    "a small /dev/shm, for the strict": (["-Urm"], SMALL, ["--strict"], 1, ("shm", "warning", "", "")),
    "a /proc of other processes": (["-Urmp", "--fork"], "true", [], 1, ("workers", "failure", "", "hidepid")),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_in_other_namespaces(where):
    flags, before, arguments, status, (check, level, text, cure) = ELSEWHERE[where]
    script = f'{before} || exit 77; exec "$@"'
    command = ["unshare", *flags, "sh", "-c", script, "sh", sys.executable, "-m", "shmsync", "doctor"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd="/")
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"this system does not allow namespaces or mounts: {done.stderr.strip()}")
    _, found, after = done.stdout.partition(f"{level.ljust(9)}{check}: ")
    said, advised, *_ = after.splitlines()
    assert (done.returncode, bool(found)) == (status, True)
    assert text in said and cure in advised


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


def test_a_logout_that_removes_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.os, "getuid", lambda: 1000)
    assert doctor.remove_ipc(tmp_path).level is Level.OK  # no logind
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    found = doctor.remove_ipc(tmp_path)
    assert found.level is Level.WARNING and "RemoveIPC=no" in found.cure
    (tmp_path / "etc/systemd").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf").write_text("#RemoveIPC=yes\nRemoveIPC = no\n")
    assert doctor.remove_ipc(tmp_path).level is Level.OK


def test_processes_that_share_the_cores_need_fewer_threads(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = doctor.threads(tmp_path)
    assert found.level is Level.NOTE and "torch.set_num_threads(1)" in found.cure
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor.threads(tmp_path).level is Level.OK
