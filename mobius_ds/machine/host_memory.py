"""How much DRAM a process can have: the machine's, or less where a control group caps it (a container, a batch system)."""

import re
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Tuple

import psutil

SYSFS, PROC = Path("/sys"), Path("/proc")


class Cap(NamedTuple):
    """The limit of a control group. Beyond it the kernel kills a process of the group."""

    group: str
    """Its name, as /proc/self/cgroup has it."""
    limit: int
    used: int
    """Bytes in use that the kernel cannot take back: not the cache of files."""

    @property
    def available(self) -> int:
        """Bytes that are left."""
        return max(0, self.limit - self.used)


def available_dram(sysfs: Path = SYSFS, proc: Path = PROC) -> int:
    """Bytes of DRAM that this process can still get."""
    return min([psutil.virtual_memory().available, *(cap.available for cap in caps(sysfs, proc))])


def total_dram(sysfs: Path = SYSFS, proc: Path = PROC) -> int:
    """The machine's DRAM, or the smallest limit on it, in bytes."""
    return min([psutil.virtual_memory().total, *(cap.limit for cap in caps(sysfs, proc))])


def binding_cap(sysfs: Path = SYSFS, proc: Path = PROC) -> Optional[Cap]:
    """The control group that leaves less than the machine does; None where none does."""
    tightest = min(caps(sysfs, proc), key=lambda cap: cap.available, default=None)
    return tightest if tightest and tightest.available < psutil.virtual_memory().available else None


def caps(sysfs: Path = SYSFS, proc: Path = PROC) -> List[Cap]:
    """The limits on this process, of its own control group and of those around it, in versions 1 and 2."""
    found = [_cap(name, folder, "memory.max", "memory.current", "{}_file")
             for mount in (sysfs / "fs/cgroup", sysfs / "fs/cgroup/unified")
             for name, folder in _groups(mount, _own_group(proc, ""))]
    found += [_cap(name, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file")
              for name, folder in _groups(sysfs / "fs/cgroup/memory", _own_group(proc, "memory"))]
    return [cap for cap in found if cap is not None]


def _own_group(proc: Path, controller: str) -> str:
    """The group of this process: version 1 has one per controller, version 2 one with no controller's name."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            return group
    return "/"


def _groups(mount: Path, group: str) -> Iterator[Tuple[str, Path]]:
    """A group and those around it. In a container the mount itself is its group, and the name may lie outside."""
    path = Path(group)
    for inner in (path, *path.parents):
        yield str(inner), mount / str(inner).lstrip("/")


def _cap(name: str, folder: Path, limit_file: str, usage_file: str, cache_key: str) -> Optional[Cap]:
    limit = _read(folder / limit_file)
    if not limit.isdigit():  # "max", or no such file
        return None
    usage = _read(folder / usage_file)
    statistics = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "memory.stat"), re.MULTILINE))
    cache = sum(int(statistics.get(cache_key.format(kind), 0)) for kind in ("active", "inactive"))
    return Cap(name, int(limit), max(0, int(usage if usage.isdigit() else 0) - cache))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
