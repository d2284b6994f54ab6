"""``mobius-ds doctor`` on GPUs: what there is, how it is wired, and how fast pinned memory is copied."""

from typing import Iterable, Iterator, List, Mapping, Optional, Sequence

from mobius_ds.inputs.hardware import GB
from mobius_ds.inputs.topology import Topology, TopologyError
from mobius_ds.inputs.units import readable
from mobius_ds.machine.finding import NOTE, PROBLEM, Finding
from mobius_ds.machine.gpu_listing import ListedGpu
from mobius_ds.machine.gpu_probe import TorchGpu, TorchReport
from mobius_ds.machine.topology_detection import Detection, topology_from_sources
from mobius_ds.machine.topology_sources import SourceMissing, Sources, read_sources

SLOW = 0.7
"""A measured share of the expected bandwidth that is worth a word: large pinned copies reach 0.9 and more of it."""
IN_USE = 0.1
"""Share of a GPU's memory that others may use unnoticed: a desktop takes a few hundred MiB."""


def ask_gpus(torch: Optional[TorchReport], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Asks the drivers and sysfs, and judges."""

    def devices_of_torch() -> List[ListedGpu]:
        if torch is None or not torch.gpus:
            raise SourceMissing("torch sees no GPU")
        return [ListedGpu(gpu.name, gpu.memory_bytes, gpu.address) for gpu in torch.gpus]

    return judge_gpus(read_sources(torch_devices=devices_of_torch), torch, environment)


def judge_gpus(sources: Sources, torch: Optional[TorchReport], environment: Mapping[str, str]) -> Iterator[Finding]:
    """The lines on GPUs.

    Args:
        torch: what it says; None if it could not be asked.
    """
    if not sources.devices:
        yield Finding("GPUs", "none found: jobs here run on the CPU", NOTE,
                      "For another machine: mobius-ds advise --model ... --topology 3090ti-4-2+2")
        return
    try:
        detection = topology_from_sources(sources)
    except TopologyError as error:
        yield Finding("GPUs", str(error), PROBLEM, "Write the topology by hand: mobius-ds topology --preset 3090-2 --json")
        return
    topology, gpus = detection.topology, () if torch is None else torch.gpus
    yield Finding("GPUs", f"{topology.name}, {readable(min(gpu.memory_bytes for gpu in topology.gpus))} each")
    if torch is not None and not gpus:
        yield _unseen(topology, torch, environment)
    yield from _memory(gpus)
    yield _wiring(detection)
    yield from _peers(topology, gpus)
    if torch is not None and torch.failed:
        yield Finding("copies", f"not measured: {torch.failed}", NOTE, "See whether another job holds the GPUs: nvidia-smi")
    if gpus and all(gpu.alone for gpu in gpus):
        yield _copies(topology, gpus, torch.refused_pin)


def _unseen(topology: Topology, torch: TorchReport, environment: Mapping[str, str]) -> Finding:
    if torch.cuda is None and torch.hip is None:
        way_out = f"torch {torch.version} is built for the CPU: install the build for your driver's CUDA."
    elif environment.get("CUDA_VISIBLE_DEVICES") is not None:
        way_out = f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} may hide them: unset it."
    else:
        way_out = "The driver may be too old: python -c 'import torch; torch.cuda.init()' tells."
    return Finding("torch's GPUs", f"torch sees none of the {topology.size}", PROBLEM, way_out)


def _memory(gpus: Sequence[TorchGpu]) -> Iterator[Finding]:
    for number, gpu in enumerate(gpus):
        used = gpu.memory_bytes - gpu.free_bytes
        if used > IN_USE * gpu.memory_bytes:
            yield Finding("GPU memory", f"GPU {number}: {readable(used)} of {readable(gpu.memory_bytes)} in use", NOTE,
                          "Another process holds it; nvidia-smi says which.")


def _wiring(detection: Detection) -> Finding:
    topology = detection.topology
    groups = " | ".join(" ".join(map(str, group)) for group in topology.groups)
    found = (f"root complexes {groups}; {_rates(topology.link_bandwidth)} GB/s a GPU, "
             f"{_rates(topology.share_of_root(gpu) for gpu in range(topology.size))} if all copy")
    if not detection.warnings:
        return Finding("PCIe", found)
    first, *more = detection.warnings
    return Finding("PCIe", found, NOTE, first + (f" (and {len(more)} more: mobius-ds topology --detect)" if more else ""))


def _peers(topology: Topology, gpus: Sequence[TorchGpu]) -> Iterator[Finding]:
    if topology.size < 2:
        return
    if topology.peer_bandwidth is None:
        yield Finding("NVLink", "none: GPUs meet in DRAM, which is what Mobius is made for")
    else:
        yield Finding("NVLink", f"{topology.peer_bandwidth / GB:.0f} GB/s between any two", NOTE,
                      "ZeRO-3 may be as fast here: mobius-ds advise --model ...")
    if gpus:
        able, pairs = sum(len(gpu.peers) for gpu in gpus) // 2, len(gpus) * (len(gpus) - 1) // 2
        yield Finding("peer access", f"{able or 'none'} of {pairs} pairs of GPUs (Mobius needs none)")


def _copies(topology: Topology, gpus: Sequence[TorchGpu], refused_pin: str) -> Finding:
    """Measured rates beside what plans count on. The GPUs are in the same order where both obey the environment."""
    found = f"{_rates(gpu.alone for gpu in gpus)} GB/s alone, {_rates(gpu.together for gpu in gpus)} all at once"
    if refused_pin:
        return Finding("copies", f"{found}, not pinned ({refused_pin})", NOTE,
                       "Raise ulimit -l (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity under systemd).")
    found = f"pinned: {found}"
    if len(gpus) != topology.size:
        return Finding("copies", found)
    for number, gpu in enumerate(gpus):
        link, share = topology.link_bandwidth[number], topology.share_of_root(number)
        if gpu.alone < SLOW * link:
            return Finding("copies", found, NOTE, f"GPU {number}'s link should carry {link / GB:.1f} GB/s: look at its "
                           "slot, riser and BIOS setting, and for other jobs.")
        if gpu.together < SLOW * share:
            return Finding("copies", found, NOTE, f"Plans count on {share / GB:.1f} GB/s for GPU {number} when all copy. "
                           "Correct root_bandwidth in mobius-ds topology --detect --json, and name the file in "
                           '"mobius": {"topology": ...}.')
    return Finding("copies", found)


def _rates(values: Iterable[float]) -> str:
    """GB/s of each GPU; once if they are alike."""
    texts = [f"{value / GB:.1f}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)
