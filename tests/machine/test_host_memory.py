"""How much DRAM this job may use: the machine's, or the tightest control group's."""

from pathlib import Path
from typing import Any, Tuple

import psutil
import pytest

from mobius_ds.inputs.units import GIB
from mobius_ds.machine.host_memory import available_dram, binding_cap, caps, total_dram

MIB = 2**20


# Control groups.

def group(root: Path, name: str, **files: Any) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file.replace("__", ".")).write_text(f"{content}\n")


def own_groups(root: Path, text: str) -> Tuple[Path, Path]:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)
    return root / "sys", root / "proc"


def test_the_tightest_control_group_counts_without_the_cache_of_files(tmp_path):
    group(tmp_path, "", memory__current=9 * GIB)  # the root has no limit
    group(tmp_path, "jobs", memory__max=3 * GIB, memory__current=2 * GIB,
          memory__stat=f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nshmem 99")
    group(tmp_path, "jobs/mine", memory__max="max", memory__current=GIB)
    where = own_groups(tmp_path, "1:name=systemd:/\n0::/jobs/mine\n")
    assert [(cap.group, cap.limit, cap.available) for cap in caps(*where)] == [("/jobs", 3 * GIB, 7 * GIB // 4)]
    assert available_dram(*where) == 7 * GIB // 4 and total_dram(*where) == 3 * GIB
    assert binding_cap(*where).group == "/jobs"


@pytest.mark.parametrize("name", ["", "slurm/job_7"])
def test_control_groups_of_version_1_are_read_whether_or_not_a_container_shows_its_name(tmp_path, name):
    group(tmp_path, f"memory/{name}", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB,
          memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0")
    where = own_groups(tmp_path, "4:memory,cpu:/slurm/job_7\n0::/\n")
    assert available_dram(*where) == 3 * GIB // 2


def test_without_a_limit_the_machine_counts(tmp_path):
    group(tmp_path, "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    where = own_groups(tmp_path, "4:memory:/\n")
    assert total_dram(*where) == psutil.virtual_memory().total and binding_cap(*where) is None
    assert caps(tmp_path / "nothing", tmp_path / "nothing") == []
