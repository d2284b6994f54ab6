"""What torch says of this machine, asked in a process of its own: a driver that hangs or crashes takes nobody with it.

``python -m mobius_ds.machine.gpu_probe`` prints a ``TorchReport`` as one line of JSON.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

PACKAGE = Path(__file__).resolve().parents[1]
BUFFER_BYTES = 128 * 2**20
"""Of each GPU's copies: large enough for a link's full rate, small enough to be over in milliseconds."""
REPEATS = 4
GRACE_SECONDS = 1.0


class TorchGpu(NamedTuple):
    """One GPU that torch sees."""

    name: str
    memory_bytes: int
    free_bytes: int
    peers: Sequence[int]
    """The GPUs whose memory it can read."""
    address: Optional[str] = None
    """PCI address as sysfs writes it."""
    alone: Optional[float] = None
    """Bytes/s from pinned memory, no other GPU copying; None if it was not measured."""
    together: Optional[float] = None
    """Bytes/s while all GPUs copy."""


class TorchReport(NamedTuple):
    """What torch says."""

    version: str
    cuda: Optional[str]
    """The CUDA version it is built for; None for a build without."""
    hip: Optional[str]
    cuda_home: Optional[str]
    extensions: str
    """The folder where extensions are built."""
    gpus: Sequence[TorchGpu] = ()
    refused_pin: str = ""
    """Why memory could not be pinned as Mobius pins it; empty if it could, or without a GPU."""
    failed: str = ""
    """What went wrong after the GPUs were listed, if anything."""


class Unanswered(Exception):
    """Torch could not be asked; the message says why."""


def ask_torch(seconds: float) -> TorchReport:
    """Asks in a process of its own.

    Raises:
        Unanswered: it did not answer in time, or crashed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
        filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))}
    child = subprocess.Popen([sys.executable, "-m", "mobius_ds.machine.gpu_probe"], env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        printed, said = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)  # one that hangs in the driver does not end
        raise Unanswered(f"torch did not answer within {seconds:.0f} s") from None
    if child.returncode != 0:
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        raise Unanswered(f"torch ended with status {child.returncode}: {last}")
    try:
        return report_from_json(printed.strip().splitlines()[-1])
    except (IndexError, KeyError, TypeError, ValueError):
        raise Unanswered(f"torch's process printed no report, but {printed[-80:]!r}") from None


def report_from_json(text: str) -> TorchReport:
    """A report as the process prints it."""
    data = json.loads(text)
    return TorchReport(**{**data, "gpus": tuple(TorchGpu(**gpu) for gpu in data["gpus"])})


def main() -> None:
    """Prints the report."""
    report = _asked()
    print(json.dumps({**report._asdict(), "gpus": [gpu._asdict() for gpu in report.gpus]}))


def _asked() -> TorchReport:
    import torch
    from torch.utils import cpp_extension

    report = TorchReport(torch.__version__, torch.version.cuda, torch.version.hip, cpp_extension.CUDA_HOME,
                         _extensions(torch, cpp_extension))
    if not torch.cuda.is_available():
        return report
    report = report._replace(gpus=tuple(_gpu(torch, number) for number in range(torch.cuda.device_count())))
    try:
        return _measured(torch, report)
    except Exception as error:  # whatever a driver can raise: the rest of the report is worth having
        return report._replace(failed=f"{type(error).__name__}: {error}")


def _extensions(torch: Any, cpp_extension: Any) -> str:
    """Where torch builds extensions, by its own rule; it has no function that tells without making the folder."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return given
    built_for = ("rocm", torch.version.hip) if torch.version.hip else ("cu", torch.version.cuda or "")
    kind = f"{built_for[0]}{built_for[1].replace('.', '')}" if built_for[1] else "cpu"
    folder = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}_{kind}"
    return os.path.join(cpp_extension.get_default_build_root(), folder)


def _gpu(torch: Any, number: int) -> TorchGpu:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    others = [other for other in range(torch.cuda.device_count()) if other != number]
    address = None
    if hasattr(properties, "pci_bus_id"):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return TorchGpu(properties.name, total, free,
                    [other for other in others if torch.cuda.can_device_access_peer(number, other)], address)


def _measured(torch: Any, report: TorchReport) -> TorchReport:
    """Host-to-device copies: each GPU alone, then all at once, which shows who shares a root complex."""
    from mobius_ds.runtime.device.pinning import CudaRegistrar

    numbers = range(len(report.gpus))
    hosts = [torch.empty(BUFFER_BYTES, dtype=torch.uint8) for _ in numbers]
    registrars = [CudaRegistrar(torch.device("cuda", number)) for number in numbers]
    refusals = [registrar.pin(host) for registrar, host in zip(registrars, hosts)]
    try:
        begin = [_copier(torch, number, host) for number, host in zip(numbers, hosts)]
        for start in begin:
            start()()  # the first copy also sets things up
        alone = [start()() for start in begin]
        ends = [start() for start in begin]
        together = [end() for end in ends]
    finally:
        for registrar, host, refusal in zip(registrars, hosts, refusals):
            if not refusal:
                registrar.unpin(host)
    gpus = tuple(gpu._replace(alone=one, together=shared) for gpu, one, shared in zip(report.gpus, alone, together))
    return report._replace(gpus=gpus, refused_pin=next(filter(None, refusals), ""))


def _copier(torch: Any, number: int, host: Any) -> Callable[[], Callable[[], float]]:
    """A function that starts copies to a GPU and returns one that waits for them and tells their bytes/s."""
    device = torch.device("cuda", number)
    target, stream = torch.empty_like(host, device=device), torch.cuda.Stream(device)

    def start() -> Callable[[], float]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record()
            for _ in range(REPEATS):
                target.copy_(host, non_blocking=True)
            ended.record()

        def end() -> float:
            ended.synchronize()
            return REPEATS * host.nbytes / (began.elapsed_time(ended) / 1e3)

        return end

    return start


if __name__ == "__main__":
    main()
