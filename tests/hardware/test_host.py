from pathlib import Path

import pytest

from llamarack.hardware.host import read_cgroup_limits, read_host
from llamarack.units import GIB, KIB
from tests.hardware.recorded import write_tree

MEMINFO = f"MemTotal: {64 * GIB // KIB} kB\nMemFree: {10 * GIB // KIB} kB\nMemAvailable: {50 * GIB // KIB} kB\n"
CPUINFO = "processor : 0\nmodel name : Xeon\nflags : sse4_2 avx2 avx512f amx_int8\n\nprocessor : 1\nmodel name : x\n"
BARE = {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO, "proc/sys/kernel/osrelease": "6.8.0\n"}
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def test_host_without_cgroup_limits_has_all_of_the_machine(tmp_path: Path) -> None:
    host = read_host(write_tree(tmp_path, BARE), affinity_cores=12)
    assert (host.cores_usable, host.memory_total_bytes, host.memory_available_bytes) == (12, 64 * GIB, 50 * GIB)
    assert (host.processor, host.instruction_sets) == ("Xeon", ("avx2", "avx512f", "amx_int8"))
    assert (host.numa_nodes, host.kernel) == (1, "6.8.0")


def test_host_in_v2_cgroup_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    tree = BARE | {
        "proc/self/cgroup": "0::/rack.slice/llamarack.service\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/rack.slice/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/rack.slice/memory.max": str(32 * GIB),
        "sys/fs/cgroup/rack.slice/memory.current": str(20 * GIB),
        "sys/fs/cgroup/rack.slice/memory.stat": f"anon 1\ninactive_file {6 * GIB}\nactive_file {2 * GIB}\n",
        "sys/fs/cgroup/rack.slice/llamarack.service/cpu.max": "max 100000\n",
        "sys/fs/cgroup/rack.slice/llamarack.service/memory.max": "max\n",
    }
    host = read_host(write_tree(tmp_path, tree), affinity_cores=12)
    assert host.cores_usable == 3
    assert host.memory_total_bytes == 32 * GIB
    assert host.memory_available_bytes == 20 * GIB  # 32 less 12 that are not page cache


def test_host_in_v1_container_is_read_below_the_mounted_part_of_the_tree(tmp_path: Path) -> None:
    tree = BARE | {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        "proc/self/mountinfo": "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "800000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(16 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    }
    host = read_host(write_tree(tmp_path, tree), affinity_cores=64)
    assert (host.cores_usable, host.memory_total_bytes, host.memory_available_bytes) == (8, 16 * GIB, 13 * GIB)


@pytest.mark.parametrize(("quota", "limit"), [("-1", "9223372036854771712"), ("0", "max")])
def test_unlimited_v1_values_are_no_limits(tmp_path: Path, quota: str, limit: str) -> None:
    tree = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
        "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "0" if quota == "0" else "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
    }
    limits = read_cgroup_limits(write_tree(tmp_path, tree))
    assert (limits.cores, limits.memory_bytes) == (None, None)


def test_cgroup_path_that_leaves_its_namespace_is_read_at_the_mount(tmp_path: Path) -> None:
    tree = {
        "proc/self/cgroup": "0::/../../other\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cpu.max": "200000 100000\n",
        "other/cpu.max": "100000 100000\n",
    }
    assert read_cgroup_limits(write_tree(tmp_path, tree)).cores == 2


def test_half_a_core_still_counts_as_one(tmp_path: Path) -> None:
    tree = BARE | {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    assert read_host(write_tree(tmp_path, tree), affinity_cores=4).cores_usable == 1


def test_this_machine_can_be_read() -> None:
    host = read_host()
    assert host.cores_usable >= 1
    assert 0 < host.memory_available_bytes <= host.memory_total_bytes
