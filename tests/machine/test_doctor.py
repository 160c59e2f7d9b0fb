import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.machine import doctor
from packhorse.machine.contention import CoreClocks
from packhorse.machine.doctor import Finding, examine_machine
from packhorse.units import GIB

FILES = {
    "proc/meminfo": f"MemTotal: {16 * 1024**2} kB\nMemAvailable: {4 * 1024**2} kB\n",
    "proc/cpuinfo": "\n\n".join(f"processor : {cpu}\nmodel name : Test" for cpu in range(8)),
    "proc/self/status": "Cpus_allowed_list:\t0-7\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "1 1 0:1 / / rw - tmpfs none rw\n"
    "2 1 0:2 / /sys/fs/cgroup rw - cgroup2 none rw\n",
    "proc/sys/vm/overcommit_memory": "2\n",
    "sys/fs/cgroup/memory.max": f"{12 * GIB}\n",
    "sys/fs/cgroup/cpu.max": "200000 100000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
}


def find(findings: tuple[Finding, ...], words: str) -> Finding:
    (found,) = (finding for finding in findings if words in finding.what)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_warnings_of_a_bad_machine(root: Path) -> None:
    findings = examine_machine(root, root=root, environment={"OMP_NUM_THREADS": "8"})
    quota = find(findings, "2.00 of 8 cores")
    assert quota.level == "warning"
    assert "cpu.max" in quota.what
    assert find(findings, "OMP_NUM_THREADS is 8, 2 cores").fix == (
        "unset it, or set OMP_NUM_THREADS=2"
    )
    assert "12.0 GiB may be used" in find(findings, "memory.max").what
    assert find(findings, "a limit holds").level == "note"
    assert find(findings, "less than half of the memory").level == "warning"
    assert "echo madvise" in str(find(findings, "huge pages are off").fix)
    assert find(findings, "overcommit_memory is 2").level == "warning"
    assert find(findings, "lies in memory (tmpfs)").level == "warning"
    for finding in findings:
        assert (finding.fix is None) == (finding.level == "ok")


def test_missing_extras_name_the_command(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    def version(name: str) -> str:
        if name in ("torch", "transformers"):
            raise doctor.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    findings = examine_machine(root, root=root, environment={})
    train = find(findings, "training and probing not possible: torch not installed")
    assert (train.level, train.fix) == ("warning", "pip install 'packhorse[train]'")
    assert find(findings, "transformers not installed").fix == "pip install 'packhorse[hf]'"


def test_unwritable_scratch(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    findings = examine_machine(root / "s", root=root, environment={})
    assert find(findings, "is not writable").level == "error"


def test_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from packhorse.machine.doctor import examine_machine\n"
        "assert len(examine_machine()) > 5\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "[]\n"


def test_other_processes_that_compute_are_warned_of(root: Path) -> None:
    (root / "proc/loadavg").write_text("3.25 2.00 1.00 4/500 1234\n")
    before = CoreClocks(at_s=0.0, busy_s=0.0, own_s=0.0, num_cores=4)
    for busy_s, level in ((0.1, "ok"), (1.0, "warning")):
        after = CoreClocks(at_s=0.5, busy_s=busy_s, own_s=0.0, num_cores=4)
        findings = examine_machine(root, root=root, environment={}, looks=(before, after))
        found = find(findings, "other processes use")
        assert found.level == level
        assert "load average of the last minute: 3.25" in found.what
        assert ("packhorse probe --fresh" in str(found.fix)) == (level == "warning")
    assert "2.0 of 4 cores" in found.what
    plain = examine_machine(root, root=root, environment={})
    assert not any("other processes" in finding.what for finding in plain)
