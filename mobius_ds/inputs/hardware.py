"""Published figures of GPUs, PCIe and NVLink, and the shares of them that training reaches.

Everything a topology assumes about hardware it was not measured on stands here, with its source.
"""

from typing import Dict, NamedTuple, Optional

from mobius_ds.inputs.units import GIB

GB = 10**9

SUSTAINED_FLOPS = 0.6
"""Share of the published dense matrix rate that a transformer's matrix products reach. Assumption: published model
FLOP utilisations lie between 0.4 and 0.7."""

PCIE3_X16 = 13.1 * GB
"""Bytes/s over PCIe 3.0 x16 in one direction, as measured by the paper (15.75 GB/s after line coding)."""

NVLINK_EFFICIENCY = 0.9
"""Share of NVLink's nominal rate that large copies reach. Assumption: about 270 of 300 GB/s are usual on an A100."""

# Bytes/s of a lane after line coding: 8b/10b up to generation 2, 128b/130b up to 5, flits of 236 data bytes in 256 in 6.
_LANE = {1: 0.25 * GB, 2: 0.5 * GB, 3: 8 * GB / 8 * 128 / 130, 4: 16 * GB / 8 * 128 / 130, 5: 32 * GB / 8 * 128 / 130,
         6: 64 * GB / 8 * 236 / 256}  # yapf: disable


def pcie_bandwidth(generation: int, width: int) -> float:
    """Sustained bytes/s of a PCIe link in one direction.

    Assumption: every generation and width loses the share to packet headers and flow control that the paper measured
    on 3.0 x16 (17 %).

    Args:
        generation: 1 to 6.
        width: lanes.
    """
    return PCIE3_X16 * (_LANE[generation] * width) / (_LANE[3] * 16)


class GpuModel(NamedTuple):
    """What is published about a GPU."""

    memory_bytes: int
    peak_flops: float
    """Dense 16-bit matrix FLOP/s with fp32 accumulation, as training uses."""
    nvlink: Optional[float] = None
    """Nominal bytes/s of one NVLink (or one xGMI connection) in one direction; None without."""

    @property
    def flops(self) -> float:
        """What large matrix products reach."""
        return SUSTAINED_FLOPS * self.peak_flops


def _model(memory_gib: int, tera_flops: float, nvlink_gb: Optional[float] = None) -> GpuModel:
    return GpuModel(memory_gib * GIB, tera_flops * 1e12, None if nvlink_gb is None else nvlink_gb * GB)


# By name without maker and form factor (``model_name``). Rates with sparsity, as many data sheets print, are halved.
GPU_MODELS: Dict[str, GpuModel] = {
    # Volta and Turing: NVIDIA's architecture papers (WP-08608, WP-09183) and data sheets. GeForce accumulates
    # in fp32 at half rate. No bf16 in hardware: fp16 rates.
    "v100": _model(32, 125, 25), "v100 pcie": _model(32, 112), "t4": _model(16, 65),
    "rtx 2080 ti": _model(11, 53.8, 25), "titan rtx": _model(24, 130.5, 25),
    "rtx 6000": _model(24, 130.5, 25), "rtx 8000": _model(48, 130.5, 25),
    # Ampere: GA102 architecture paper (3080, 3090), data sheets (A series). The 3090 Ti, 3070, 3060 by their
    # shader count and clock at the 3090's rate per shader.
    "rtx 3060": _model(12, 25.5), "rtx 3070": _model(8, 40.6), "rtx 3080": _model(10, 59.5), "rtx 3080 ti": _model(12, 68.2),
    "rtx 3090": _model(24, 71, 14.0625), "rtx 3090 ti": _model(24, 80, 14.0625),
    "rtx a4000": _model(16, 76.7), "rtx a5000": _model(24, 111.1, 14.0625), "rtx a6000": _model(48, 154.8, 14.0625),
    "a10": _model(24, 125), "a10g": _model(24, 70), "a30": _model(24, 165, 25), "a40": _model(48, 149.7, 14.0625),
    "a100": _model(80, 312, 25), "a100 pcie": _model(80, 312, 25), "a800": _model(80, 312, 25),
    # Ada: Ada architecture paper V2.1, data sheets.
    "rtx 4070": _model(12, 58.3), "rtx 4070 ti": _model(12, 80.2), "rtx 4080": _model(16, 97.5),
    "rtx 4080 super": _model(16, 104.4), "rtx 4090": _model(24, 165.2), "rtx 4090 d": _model(24, 147),
    "rtx 5000 ada": _model(32, 261), "rtx 6000 ada": _model(48, 364.2),
    "l4": _model(24, 121), "l40": _model(48, 181), "l40s": _model(48, 362),
    # Hopper and Blackwell: architecture papers and data sheets. An RTX PRO 6000's rate is an eighth of its fp4 rate.
    "h100": _model(80, 989, 25), "h100 pcie": _model(80, 756, 25), "h100 nvl": _model(94, 835, 25),
    "h800": _model(80, 989, 25), "h20": _model(96, 148, 25), "h200": _model(141, 989, 25), "h200 nvl": _model(141, 835, 25),
    "b200": _model(180, 2250, 50),
    "rtx 5070 ti": _model(16, 87.9), "rtx 5080": _model(16, 112.6), "rtx 5090": _model(32, 209.5),
    "rtx pro 6000 blackwell workstation": _model(96, 500), "rtx pro 6000 blackwell server": _model(96, 500),
    # AMD's data sheets; an MI250X shows as two GPUs, so half of its rate each.
    "mi210": _model(64, 181, 50), "mi250x": _model(64, 191.5, 50), "mi300x": _model(192, 1307, 64),
    "mi325x": _model(256, 1307, 64), "rx 7900 xtx": _model(24, 122.8),
}  # yapf: disable

# An RTX 3090's: the slowest GPU with memory enough that this package is of use on it. Assumption, always warned of.
UNKNOWN_GPU_FLOPS = GPU_MODELS["rtx 3090"].flops
UNKNOWN_NVLINK = GPU_MODELS["rtx 3090"].nvlink

# Words that do not tell GPUs apart.
_MAKERS = {"nvidia", "amd", "geforce", "tesla", "quadro", "instinct", "radeon", "graphics", "generation", "edition", "gpu",
           "oam"}  # yapf: disable


def model_name(name: str) -> str:
    """A GPU's name as ``GPU_MODELS`` has it: without maker, memory size, and form factors that leave the rate alone.

    ``NVIDIA A100-SXM4-80GB`` is ``a100``; ``NVIDIA GeForce RTX 4090 Laptop GPU`` stays a ``rtx 4090 laptop``, which is
    another GPU.
    """
    words = name.lower().replace("-", " ").replace("/", " ").split()
    return " ".join(word for word in words if word not in _MAKERS and not _is_size_or_socket(word))


def _is_size_or_socket(word: str) -> bool:
    return word.startswith(("sxm", "hbm")) or (word.endswith("gb") and word[:-2].isdigit())


def known_gpu(name: str) -> Optional[GpuModel]:
    """What is published about the GPU of that name (as a driver reports it), or None."""
    return GPU_MODELS.get(model_name(name))
