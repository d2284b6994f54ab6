"""Fails when pip would install a CUDA build of torch: ``python check_torch.py PIP_REPORT.json``."""

import json
import sys

from packaging.requirements import Requirement


def cuda_packages(report: dict) -> list:
    """Names of the NVIDIA packages that the torch in a pip installation report pulls in on this machine."""
    needed = [Requirement(text) for item in report["install"] for text in item["metadata"].get("requires_dist", ())]
    here = [need for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [need.name for need in here if need.name.startswith(("nvidia-", "cuda-"))]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        report = json.load(file)
    found = cuda_packages(report)
    if found:
        sys.exit(f"""\
pip offers a CUDA build of torch here (it needs {", ".join(found)}), gigabytes that a machine without a GPU has no use for.
Nothing was installed. Do one of these:
  make PIP_ARGS="--extra-index-url URL"   URL of PyTorch's CPU wheels, which PyTorch's installation page names
  make PIP_ARGS="--find-links FOLDER"     a folder with a CPU wheel of torch
  make ALLOW_CUDA=1                       the CUDA build all the same""")
