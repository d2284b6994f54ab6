"""``mobius-ds doctor`` on software: versions, the plugin, the compiler, and what earlier jobs have left in folders."""

import os
import re
import site
import sys
from importlib import metadata
from pathlib import Path
from typing import Iterator, List, Mapping, Optional, Sequence

from mobius_ds.machine.build_locks import is_abandoned
from mobius_ds.machine.finding import NOTE, PROBLEM, Finding
from mobius_ds.machine.gpu_probe import TorchReport
from mobius_ds.machine.topology_sources import Command, SourceMissing, run_command
from mobius_ds.names import CACHE_VARIABLE, FLAG_VARIABLE, HOOK_FILE, KNOWN_DEEPSPEED

TESTED = {"transformers": "5.24.", "accelerate": "1.15.", "peft": "0.21.", "trl": "1.16."}
"""Releases that the tests run on; ``setup.py`` installs the same for them."""
OLDEST_PYTHON = (3, 11)
RESTARTS_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def ask_versions(torch: Optional[TorchReport]) -> Iterator[Finding]:
    """What is installed."""
    return judge_versions(sys.version_info[:3], {name: _version(name) for name in ("torch", "deepspeed", *TESTED)}, torch)


def _version(name: str) -> Optional[str]:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge_versions(python: Sequence[int], installed: Mapping[str, Optional[str]],
                   torch: Optional[TorchReport]) -> Iterator[Finding]:
    """The versions of Python, torch, DeepSpeed, and of what trains with them."""
    written = ".".join(map(str, python))
    yield Finding("Python", written) if tuple(python[:2]) >= OLDEST_PYTHON else \
        Finding("Python", written, PROBLEM, f"mobius_ds needs {'.'.join(map(str, OLDEST_PYTHON))} or newer.")
    if installed["torch"] is None:
        yield Finding("torch", "not installed", PROBLEM, "pip install torch")
    else:
        built_for = "" if torch is None else f", for {_build(torch)}"
        yield Finding("torch", f"{installed['torch']}{built_for}")
    if installed["deepspeed"] is None:
        yield Finding("DeepSpeed", "not installed", PROBLEM, f"pip install 'deepspeed=={KNOWN_DEEPSPEED}*'")
    elif not installed["deepspeed"].startswith(KNOWN_DEEPSPEED):
        yield Finding("DeepSpeed", installed["deepspeed"], NOTE, f"Not tested: pip install 'deepspeed=={KNOWN_DEEPSPEED}*'")
    else:
        yield Finding("DeepSpeed", installed["deepspeed"])
    yield _libraries(installed)


def _build(torch: TorchReport) -> str:
    if torch.hip is not None:
        return f"ROCm {torch.hip}"
    return "the CPU" if torch.cuda is None else f"CUDA {torch.cuda}"


def _libraries(installed: Mapping[str, Optional[str]]) -> Finding:
    there = {name: installed[name] for name in TESTED if installed[name] is not None}
    found = ", ".join(f"{name} {version}" for name, version in there.items()) or "none installed, none needed"
    untested = [f"{name}=={TESTED[name]}*" for name, version in there.items() if not version.startswith(TESTED[name])]
    if not untested:
        return Finding("libraries", found)
    return Finding("libraries", found, NOTE, f"If one fails, take a tested release: pip install {' '.join(untested)}")


def ask_plugin(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether DeepSpeed will find Mobius."""
    yield judge_plugin([Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())])
    if FLAG_VARIABLE in environment:
        value = environment[FLAG_VARIABLE]
        yield Finding("flag", f"{FLAG_VARIABLE}={value} is set", NOTE,
                      f'It overrides "mobius": {{"enabled": ...}} of every config: unset {FLAG_VARIABLE}')


def judge_plugin(folders: Sequence[Path]) -> Finding:
    """Whether one of the folders where Python looks for ``.pth`` files has ours."""
    found = next((folder for folder in folders if (folder / HOOK_FILE).is_file()), None)
    if found is None:
        return Finding("plugin", "not installed: the import hook is not active", NOTE,
                       "pip install the clone, start jobs with mobius-ds run, or import mobius_ds in the script.")
    return Finding("plugin", "active: every script finds it")


def ask_compiler(torch: Optional[TorchReport], environment: Mapping[str, str],
                 command: Command = run_command) -> Iterator[Finding]:
    """What DeepSpeed's CPU optimizer is built with."""
    compiler = environment.get("CXX", "c++")
    try:
        version = command([compiler, "-dumpfullversion", "-dumpversion"]).strip()
        ninja = command(["ninja", "--version"]).strip()
    except SourceMissing as missing:
        yield Finding("compiler", str(missing), PROBLEM, "ZeRO-3's CPU Adam cannot be built: apt-get install g++, pip "
                      'install ninja. (Mobius takes torch\'s; so does ZeRO-3 with "torch_adam": true.)')
        return
    found = f"{compiler} {version}, ninja {ninja}"
    if torch is not None and torch.cuda is not None and torch.gpus:
        yield _judge_cuda(found, torch, command)
    else:
        yield Finding("compiler", found)


def _judge_cuda(found: str, torch: TorchReport, command: Command) -> Finding:
    wanted = ".".join(torch.cuda.split(".")[:2])
    install = f"Install CUDA {wanted}'s toolkit and set CUDA_HOME to it, or DeepSpeed's CUDA operators cannot be built."
    if torch.cuda_home is None:
        return Finding("compiler", f"{found}, no CUDA toolkit (CUDA_HOME)", NOTE, install)
    try:
        release = re.search(r"release (\d+\.\d+)", command([os.path.join(torch.cuda_home, "bin", "nvcc"), "--version"]))
    except SourceMissing as missing:
        return Finding("compiler", f"{found}; {missing}", NOTE, install)
    toolkit = release[1] if release else "unknown"
    if toolkit.split(".")[0] != wanted.split(".")[0]:  # DeepSpeed accepts another minor version
        return Finding("compiler", f"{found}, CUDA {toolkit} in {torch.cuda_home}, but torch's is {wanted}", NOTE, install)
    return Finding("compiler", f"{found}, CUDA {toolkit}")


def ask_extensions(torch: Optional[TorchReport]) -> Iterator[Finding]:
    """What is built, and locks that nobody will remove."""
    if torch is not None:
        yield judge_extensions(Path(torch.extensions))


def judge_extensions(folder: Path) -> Finding:
    """The folder of extensions. A job of Mobius refuses a lock that was left behind; one of ZeRO-3 waits for it."""
    abandoned = [lock for lock in sorted(folder.glob("*/lock")) if is_abandoned(lock)]
    if abandoned:
        return Finding("extensions", f"locks that killed builds left in {folder}: {len(abandoned)}", PROBLEM, "ZeRO-3 waits "
                       f"for them without end. Unless another machine builds: rm {' '.join(map(str, abandoned))}")
    built = sorted(library.parent.name for library in folder.glob("*/*.so"))
    if not built:
        return Finding("extensions", f"none built yet in {folder}; the first job takes a minute or two longer")
    return Finding("extensions", f"{', '.join(built)} built in {folder}")


def ask_plans(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The cache of plans."""
    given = environment.get(CACHE_VARIABLE)
    yield judge_plans(Path(given) if given else Path.home() / ".cache" / "mobius_ds" / "plans")


def judge_plans(folder: Path) -> Finding:
    """Whether plans can be kept."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        return Finding("plans", f"{folder} cannot be written", NOTE, f"Jobs plan anew each time: set {CACHE_VARIABLE}.")
    return Finding("plans", f"{len(list(folder.glob('*.json')))} in {folder}")


def ask_restarts(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A fault of one torch release."""
    yield from judge_restarts(_version("torch") or "", environment)


def judge_restarts(torch: str, environment: Mapping[str, str]) -> List[Finding]:
    """Whether ``torchrun --max-restarts`` works."""
    if not torch.startswith("2.13.") or environment.get(RESTARTS_VARIABLE) == "1":
        return []
    return [Finding("restarts", "torchrun --max-restarts fails with torch 2.13", NOTE, f"export {RESTARTS_VARIABLE}=1")]

