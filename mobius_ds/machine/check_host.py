"""``mobius-ds doctor`` on memory and cores: what a job can have of this machine, and what a container takes away."""

import resource
import shutil
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple, Optional

import psutil

from mobius_ds.inputs.units import GIB, readable
from mobius_ds.machine.finding import NOTE, PROBLEM, Finding
from mobius_ds.machine.gpu_probe import TorchReport
from mobius_ds.machine.host_memory import PROC, SYSFS, Cap, available_dram, binding_cap, total_dram

BYTES_PER_PARAMETER = 18
"""What training takes of DRAM: 16-bit weight, fp32 master, gradient and Adam's two moments."""
SHARED_MEMORY = GIB
"""Less in /dev/shm is usually a container's default of 64 MiB, with which data loaders end in a bus error."""


class Memory(NamedTuple):
    """A machine's memory, in bytes."""

    total: int
    available: int
    cap: Optional[Cap]
    """The control group that leaves less than the machine does."""


def ask_memory(sysfs: Path = SYSFS, proc: Path = PROC) -> Iterator[Finding]:
    """DRAM."""
    return judge_memory(Memory(total_dram(sysfs, proc), available_dram(sysfs, proc), binding_cap(sysfs, proc)))


def judge_memory(memory: Memory) -> Iterator[Finding]:
    """How large a model may be."""
    room = memory.available / BYTES_PER_PARAMETER / 1e9
    found = f"{readable(memory.total)}, {readable(memory.available)} free: room for {room:.1f} B parameters"
    if memory.cap is None:
        yield Finding("DRAM", found)
    else:
        yield Finding("DRAM", found, NOTE, f"The control group {memory.cap.group} allows {readable(memory.cap.limit)}: "
                      "raise it (docker run --memory, MemoryMax under systemd, --mem under Slurm).")


def ask_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """/dev/shm."""
    try:
        size = psutil.disk_usage(str(folder)).total
    except OSError as error:
        yield Finding("/dev/shm", f"cannot be used: {error.strerror}", NOTE, _SHARED_MEMORY_ADVICE)
        return
    yield judge_shared_memory(size)


_SHARED_MEMORY_ADVICE = "Mobius needs none of it, but NCCL and data loaders do: docker run --shm-size=8g"


def judge_shared_memory(size: int) -> Finding:
    """Whether /dev/shm is large enough for what else a job does."""
    if size < SHARED_MEMORY:
        return Finding("/dev/shm", readable(size), NOTE, _SHARED_MEMORY_ADVICE)
    return Finding("/dev/shm", f"{readable(size)} (Mobius needs none of it)")


def ask_locked_memory(torch: Optional[TorchReport]) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judge_locked_memory(None if soft == resource.RLIM_INFINITY else soft, torch)


def judge_locked_memory(limit: Optional[int], torch: Optional[TorchReport]) -> Finding:
    """Whether the limit keeps memory from being pinned.

    Args:
        limit: bytes; None if there is none.
    """
    found = "unlimited" if limit is None else f"up to {readable(limit)}"
    if limit is None or torch is None or not torch.gpus:
        return Finding("locked memory", found + ("" if limit is None else ", which matters only with a GPU"))
    if torch.refused_pin:
        return Finding("locked memory", f"{found}, and pinning was refused", NOTE, "Raise ulimit -l: copies are slower.")
    return Finding("locked memory", f"{found}, which does not keep CUDA from pinning")


def ask_cores(ranks: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Cores and threads."""
    yield judge_cores(len(psutil.Process().cpu_affinity()), ranks, environment.get("OMP_NUM_THREADS"))
    if shutil.which("numactl") is None:
        yield Finding("numactl", "not installed", NOTE, "deepspeed --bind_cores_to_rank needs it: apt-get install numactl")


def judge_cores(cores: int, ranks: int, threads: Optional[str]) -> Finding:
    """Whether the ranks' threads, which run the CPU optimizer, share the cores evenly.

    Args:
        ranks: one per GPU; zero without a GPU, where nobody knows how many there will be.
        threads: OMP_NUM_THREADS.
    """
    found = f"{cores}, OMP_NUM_THREADS {'is not set' if threads is None else '= ' + threads}"
    if ranks == 0:
        return Finding("cores", f"{found} (best: cores / ranks)")
    best = max(1, cores // ranks)
    if threads is None:
        advice = f"torchrun gives each of several ranks 1 thread, deepspeed all: export OMP_NUM_THREADS={best}"
        return Finding("cores", found, NOTE, advice) if ranks > 1 else Finding("cores", found)
    if not threads.isdigit() or not best / 2 <= int(threads) <= best:
        return Finding("cores", found, NOTE, f"For the CPU optimizer of {ranks} ranks: export OMP_NUM_THREADS={best}")
    return Finding("cores", found)


def ask_ranks(gpus: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What decides how many ranks there are."""
    if "WORLD_SIZE" in environment:
        yield Finding("ranks", f"WORLD_SIZE={environment['WORLD_SIZE']} is set", PROBLEM,
                      "A script started by hand waits for that many ranks: unset WORLD_SIZE RANK LOCAL_RANK")
    elif gpus:
        yield Finding("ranks", f"one per GPU: --num_gpus {gpus} (several on one share its memory)")
