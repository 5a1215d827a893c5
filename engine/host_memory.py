"""Memory of this machine, and what this process may still take of it.

A container may have less than the machine has: the limit of its control group, or of a group around it. What the files
of a group have in the page cache counts as free, as it does for the machine (MemAvailable of /proc/meminfo).

    version 2   /sys/fs/cgroup/GROUP/           memory.max              memory.current          memory.stat
    version 1   /sys/fs/cgroup/memory/GROUP/    memory.limit_in_bytes   memory.usage_in_bytes   memory.stat

GROUP is what /proc/self/cgroup names. A container may see there the name of a folder of the host, which it cannot open:
then the root of the files is the group. Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of
Linux.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILES = "inactive_file", "active_file"      # of memory.stat: bytes of files in the page cache


class Version(NamedTuple):
    """Where a version of control groups says what a group may take, and has taken, of the memory."""

    folder: str
    limit: str
    taken: str
    prefix: str             # of the lines of memory.stat that count groups inside this one, too


VERSIONS = {1: Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            2: Version("sys/fs/cgroup", "memory.max", "memory.current", "")}


def machine_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine, or of the container."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, *_ in groups(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of it that nothing needs now."""
    found = re.search(r"^MemAvailable: *(\d+) kB$", text_of(root / "proc/meminfo"), re.MULTILINE)
    free = [int(found[1]) << 10] if found else []
    return max(min([machine_bytes(root), *free, *(limit - taken_by(*group) for limit, *group in groups(root))]), 0)


def groups(root: Path) -> Iterator[tuple[int, Path, Version]]:
    """(limit, its folder, version) of each group with a limit that this process is in."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = VERSIONS[1 if controllers else 2]
        top = root / version.folder
        group = top / name.lstrip("/")
        group = group if group.is_dir() else top
        for folder in (group, *group.parents):
            limit = number_of(folder / version.limit)
            if limit is not None:           # not "max"
                yield limit, folder, version
            if folder == top:
                break


def taken_by(group: Path, version: Version) -> int:
    """Bytes that a group has taken, without its files in the page cache."""
    counts = dict(re.findall(r"^(\w+) (\d+)$", text_of(group / "memory.stat"), re.MULTILINE))
    files = sum(int(counts.get(version.prefix + name, 0)) for name in FILES)
    return (number_of(group / version.taken) or 0) - files


def number_of(file: Path) -> int | None:
    """The number that a file holds, or None."""
    text = text_of(file).strip()
    return int(text) if re.fullmatch("[0-9]+", text) else None


def text_of(file: Path) -> str:
    """"" if there is no such file, or if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
