"""Memory of the host, as the machine and the control groups of a container say it: files in folders of the tests."""

import pytest

from engine import host_memory

MB = 1 << 20
V1, V2 = "7:cpu,cpuacct:/other\n5:memory:{}\n", "0::{}\n"


@pytest.fixture
def machine(tmp_path):
    """A function that writes files of a machine, of which 40 MB are free, and gives its root."""
    def write(groups, **more):
        for name, text in {"proc/self/cgroup": groups, "proc/meminfo": f"MemFree: 1 kB\nMemAvailable:  {40 << 10} kB\n",
                           **more}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path
    return write


def group(version, name, limit, taken, files=0):
    """The files of a group of a version."""
    folder = f"sys/fs/cgroup/{'memory/' if version == 1 else ''}{name}"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    prefix = "total_" if version == 1 else ""
    stat = f"inactive_file 1\n{prefix}inactive_file {files // 2}\n{prefix}active_file {files - files // 2}\nshmem 5\n"
    if version == 2:
        stat = stat.removeprefix("inactive_file 1\n")
    return {f"{folder}/{names[0]}": f"{limit}\n", f"{folder}/{names[1]}": f"{taken}\n", f"{folder}/memory.stat": stat}


@pytest.mark.parametrize("version, groups", [(1, V1), (2, V2)], ids=["v1", "v2"])
def test_a_limit_counts_as_the_machines_memory(machine, version, groups):
    root = machine(groups.format("/box"), **group(version, "box", 20 * MB, 15 * MB, files=6 * MB))
    assert host_memory.machine_bytes(root) == 20 * MB
    assert host_memory.free_memory(root) == 11 * MB


@pytest.mark.parametrize("version, groups", [(1, V1), (2, V2)], ids=["v1", "v2"])
def test_limits_of_groups_around_count_too(machine, version, groups):
    root = machine(groups.format("/box/inner"), **group(version, "box", 30 * MB, 27 * MB),
                   **group(version, "box/inner", 20 * MB, 4 * MB))
    assert (host_memory.machine_bytes(root), host_memory.free_memory(root)) == (20 * MB, 3 * MB)


@pytest.mark.parametrize("version, groups", [(1, V1), (2, V2)], ids=["v1", "v2"])
def test_a_group_that_only_the_host_knows_by_its_name(machine, version, groups):
    """Inside a container, whose own group is at the root."""
    root = machine(groups.format("/docker/0123"), **group(version, "", 10 * MB, 2 * MB))
    assert (host_memory.machine_bytes(root), host_memory.free_memory(root)) == (10 * MB, 8 * MB)


@pytest.mark.parametrize("version, groups, limit", [(1, V1, 0x7FFFFFFFFFFFF000), (2, V2, "max")], ids=["v1", "v2"])
def test_without_a_limit_the_machine_counts(machine, version, groups, limit):
    root = machine(groups.format("/box"), **group(version, "box", limit, 15 * MB))
    assert host_memory.machine_bytes(root) == host_memory.machine_bytes()
    assert host_memory.free_memory(root) == 40 * MB


def test_a_group_that_is_full_has_nothing_free(machine):
    root = machine(V2.format("/box"), **group(2, "box", 10 * MB, 11 * MB))
    assert host_memory.free_memory(root) == 0


def test_a_system_without_such_files(tmp_path):
    assert host_memory.machine_bytes(tmp_path) == host_memory.free_memory(tmp_path) > 64 * MB


def test_this_machine():
    assert 0 < host_memory.free_memory() <= host_memory.machine_bytes()


@pytest.mark.parametrize("limit, taken", [("max", "max"), ("\u00b2", "5"), ("-1", "5"), ("", ""), ("1e9", "5")])
def test_files_that_say_no_number_are_no_limit(machine, limit, taken):
    root = machine("", **group(2, "box", limit, taken))
    (root / "proc/self/cgroup").write_bytes(b"a line\n0::/b\xffx\n0::/box\n")
    assert host_memory.free_memory(root) == 40 * MB
    assert host_memory.machine_bytes(root) > 40 * MB
