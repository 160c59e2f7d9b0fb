from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse.machine.limits import find_core_limit, find_cpu_model, find_memory_limit
from packhorse.units import GIB, MIB

UNLIMITED_V1 = "9223372036854771712\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {50 * 1024**2} kB\n",
            "proc/cpuinfo": "\n\n".join(
                f"processor\t: {cpu}\nmodel name\t: Test  CPU\nphysical id\t: 0\n"
                f"core id\t: {cpu % 4}"
                for cpu in range(8)
            ),
            "proc/self/status": "VmSize:\t1048576 kB\nCpus_allowed_list:\t0-7\n",
            "proc/self/limits": "Max address space    unlimited    unlimited    bytes\n",
        },
    )
    return tmp_path


def mounted_v2(root: Path, group: str, mount_root: str = "/") -> None:
    write(
        root,
        {
            "proc/self/cgroup": f"0::{group}\n",
            "proc/self/mountinfo": f"30 20 0:26 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2"
            " rw,nsdelegate\n",
        },
    )


def test_no_limit_at_all(root: Path) -> None:
    limit = find_memory_limit(root)
    assert limit.limit_bytes == limit.machine_bytes == 64 * GIB
    assert limit.available_bytes == 50 * GIB
    assert limit.limit_from == str(root / "proc/meminfo")
    assert find_cpu_model(root) == "Test CPU"


def test_v2_own_group(root: Path) -> None:
    mounted_v2(root, "/user/run")
    write(
        root,
        {
            "sys/fs/cgroup/user/run/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/user/run/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/user/run/memory.stat": f"anon 5\ninactive_file {512 * MIB}\n",
            "sys/fs/cgroup/user/run/cpu.max": "150000 100000\n",
        },
    )
    limit = find_memory_limit(root)
    assert limit.limit_bytes == 2 * GIB
    assert limit.limit_from == str(root / "sys/fs/cgroup/user/run/memory.max")
    assert limit.available_bytes == 2 * GIB - 512 * MIB
    cores = find_core_limit(root)
    assert (cores.num_allowed, cores.num_physical, cores.quota) == (8, 4, 1.5)
    assert cores.num_cores == 1


def test_v2_limit_of_a_level_above_and_high(root: Path) -> None:
    mounted_v2(root, "/user/run")
    write(
        root,
        {
            "sys/fs/cgroup/user/run/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/user/memory.high": f"{6 * GIB}\n",
            "sys/fs/cgroup/user/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/user/run/cpu.max": "max 100000\n",
        },
    )
    limit = find_memory_limit(root)
    assert limit.limit_bytes == 6 * GIB
    assert limit.limit_from.endswith("user/memory.high")
    assert find_core_limit(root).num_cores == 2


def test_v2_in_its_own_namespace(root: Path) -> None:
    mounted_v2(root, "/")
    write(root, {"sys/fs/cgroup/memory.max": f"{3 * GIB}\n"})
    assert find_memory_limit(root).limit_bytes == 3 * GIB


def test_v2_host_names_but_only_the_own_group_mounted(root: Path) -> None:
    mounted_v2(root, "/docker/abc", mount_root="/docker/abc")
    write(root, {"sys/fs/cgroup/memory.max": f"{3 * GIB}\n"})
    assert find_memory_limit(root).limit_bytes == 3 * GIB


def test_v2_host_names_with_a_mount_that_does_not_match(root: Path) -> None:
    mounted_v2(root, "/../other")
    write(root, {"sys/fs/cgroup/memory.max": f"{3 * GIB}\n"})
    assert find_memory_limit(root).limit_bytes == 3 * GIB


def test_v1_and_its_word_for_no_limit(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/jobs/7\n2:cpu,cpuacct:/jobs/7\n0::/\n",
            "proc/self/mountinfo": (
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/jobs/memory.stat": f"total_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": UNLIMITED_V1,
            "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000\n",
        },
    )
    (root / "sys/fs/cgroup/unified").mkdir(parents=True)
    limit = find_memory_limit(root)
    assert limit.limit_bytes == 4 * GIB
    assert limit.limit_from.endswith("jobs/memory.limit_in_bytes")
    assert limit.available_bytes == 2 * GIB
    cores = find_core_limit(root)
    assert cores.quota == 3.0
    assert cores.num_cores == 3


def test_address_space_limit(root: Path) -> None:
    write(root, {"proc/self/limits": f"Max address space         {5 * GIB}   {6 * GIB}   bytes\n"})
    limit = find_memory_limit(root)
    assert limit.limit_bytes == 5 * GIB
    assert "ulimit -v" in limit.limit_from
    assert limit.available_bytes == 4 * GIB


def test_affinity_and_hardware_threads(root: Path) -> None:
    write(root, {"proc/self/status": "Cpus_allowed_list:\t0,4-5\n"})
    cores = find_core_limit(root)
    assert (cores.num_allowed, cores.num_physical, cores.num_cores) == (3, 2, 2)


def test_cpuinfo_without_core_ids(root: Path) -> None:
    write(root, {"proc/cpuinfo": "processor\t: 0\n\nprocessor\t: 1\n"})
    write(root, {"proc/self/status": "Cpus_allowed_list:\t0-1\n"})
    assert find_core_limit(root).num_cores == 2
    assert find_cpu_model(root) == "unknown processor"


def test_not_linux(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot tell how much memory"):
        find_memory_limit(tmp_path)


def test_this_machine() -> None:
    limit = find_memory_limit()
    assert 0 < limit.available_bytes <= limit.limit_bytes <= limit.machine_bytes
    assert find_core_limit().num_cores >= 1
