#!/usr/bin/env python
"""Writes the fp32 weights of a checkpoint of mobius_ds as an ordinary state dict. Needs torch only.

Lies as ``zero_to_fp32.py`` beside the checkpoints:

    python zero_to_fp32.py . output_dir/
    python zero_to_fp32.py . output_dir/ -t global_step100 --safe_serialization --max_shard_size 2GB
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
         "TIB": 2**40}


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir: str, tag: Optional[str] = None,
                                             exclude_frozen_parameters: bool = False) -> Dict[str, torch.Tensor]:
    """The fp32 state dict of a checkpoint; tied names share one tensor.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    return fp32(saved_tensors(folder_of(Path(checkpoint_dir), tag), exclude_frozen_parameters))


def saved_tensors(folder: Path, exclude_frozen: bool) -> Dict[str, torch.Tensor]:
    """Parameters and buffers of a tag's folder as they were saved, mapped; tied names share one tensor."""
    names = json.loads((folder / "mobius.json").read_text())["parameters"]
    with torch.serialization.safe_globals(harmless()):  # it holds what the script gave as well
        state = torch.load(folder / "mp_rank_00_model_states.pt", map_location="cpu", mmap=True, weights_only=True)
    tensors: Dict[str, torch.Tensor] = {}
    for name in names:
        trained = folder / "zero" / name / "fp32.pt"
        if trained.exists() or not exclude_frozen:
            path = trained if trained.exists() else folder / "zero" / name / "frozen.pt"
            tensors[name] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["param"]
    for alias, name in state["shared_params"].items():
        if name in tensors:
            tensors[alias] = tensors[name]
    tensors.update({name: state["module"][name] for name in state["buffer_names"]})
    return tensors


def harmless() -> List[Any]:
    """Types and functions, beyond those of torch, that only hold what they are given; scripts save them with their state."""
    try:
        import numpy
    except ImportError:
        return [argparse.Namespace]
    makers = [value.__reduce__()[0] for value in (numpy.float64(0), numpy.empty(0))]  # of a scalar and of an array
    return [argparse.Namespace, numpy.ndarray, numpy.dtype, *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__),
            *((maker, f"{module}.multiarray.{maker.__name__}")
              for maker in makers for module in ("numpy.core", "numpy._core"))]  # NumPy 1 and 2


def fp32(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """The same in fp32, what is no floating point number as it is."""
    whole = {}
    for names in _tied(tensors):
        tensor = tensors[names[0]]
        whole.update(dict.fromkeys(names, tensor.float() if tensor.is_floating_point() else tensor))
    return whole


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir: str, output_dir: str, max_shard_size: str = "5GB",
                                               safe_serialization: bool = False, tag: Optional[str] = None,
                                               exclude_frozen_parameters: bool = False) -> List[Path]:
    """Writes the fp32 state dict, in shards with an index where it is larger than one, a shard in memory at a time.

    safetensors cannot hold one tensor under two names: there, tied weights are written under their first name.

    Returns:
        The files.
    """
    tensors = saved_tensors(folder_of(Path(checkpoint_dir), tag), exclude_frozen_parameters)
    if safe_serialization:
        tensors = {names[0]: tensors[names[0]] for names in _tied(tensors)}
    base, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    shards = list(_shards(tensors, max_shard_size))
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    index, files = {}, []
    for number, names in enumerate(shards, start=1):
        name = f"{base}{suffix}" if len(shards) == 1 else f"{base}-{number:05d}-of-{len(shards):05d}{suffix}"
        files.append(output / name)
        _write({name: tensors[name] for name in names}, files[-1], safe_serialization)
        index.update({parameter: name for parameter in names})
    if len(shards) > 1:
        size = sum(_nbytes(tensors[names[0]]) for names in _tied(tensors))
        files.append(output / f"{base}{suffix}.index.json")
        files[-1].write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2))
    return files


def folder_of(checkpoint_dir: Path, tag: Optional[str]) -> Path:
    """The folder of a tag, by default the latest one's."""
    if tag is None:
        latest = checkpoint_dir / "latest"
        if not latest.is_file():
            raise FileNotFoundError(f"Unable to find 'latest' file at {latest}; name a checkpoint with --tag")
        tag = latest.read_text().strip()
    folder = checkpoint_dir / tag
    if not folder.is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def _nbytes(tensor: torch.Tensor) -> int:
    """In the file."""
    return tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())


def _tied(tensors: Dict[str, torch.Tensor]) -> List[List[str]]:
    """The names, those of one tensor together."""
    together: Dict[int, List[str]] = {}
    for name, tensor in tensors.items():
        together.setdefault(id(tensor), []).append(name)
    return list(together.values())


def _shards(tensors: Dict[str, torch.Tensor], max_shard_size: str) -> Iterator[List[str]]:
    """Names of each shard, in order; tied names stay in one."""
    number, unit = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(max_shard_size)).groups()
    limit = float(number) * UNITS[unit.upper()]
    shard: List[str] = []
    size = 0
    for names in _tied(tensors):
        nbytes = _nbytes(tensors[names[0]])
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard, size = shard + names, size + nbytes
    yield shard


def _write(tensors: Dict[str, torch.Tensor], path: Path, safe: bool) -> None:
    whole = fp32(tensors)
    if safe:
        from safetensors.torch import save_file
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(whole, path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", help="the folder with 'latest', e.g. path/checkpoint-12")
    parser.add_argument("output_dir", help="where the fp32 state dict goes")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of one file, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint, e.g. global_step1; default: the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, as DeepSpeed's script does")
    return parser.parse_args()


def main() -> None:
    """The command line."""
    options: Dict[str, Any] = vars(_arguments())
    options.pop("debug")
    if not (folder_of(Path(options["checkpoint_dir"]), options["tag"]) / "mobius.json").exists():
        # Checkpoints of ZeRO lie here as well.
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
    else:
        convert = convert_zero_checkpoint_to_fp32_state_dict
    written: Optional[Tuple] = convert(**options)
    for path in written or ():
        print(path)


if __name__ == "__main__":
    main()
