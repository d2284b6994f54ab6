"""``mobius-ds topology``: the server a plan is made for, as a table or as JSON to edit and pass on."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mobius_ds.inputs.hardware import GB, GIB
from mobius_ds.inputs.topology import PRESETS, Topology, TopologyError, preset, topology_from_json
from mobius_ds.machine.topology_detection import Detection, detect_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options to ``parser``."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--detect", action="store_true", help="this machine, from sysfs and nvidia-smi (default)")
    source.add_argument("--preset", metavar="NAME", help=f"a known server: {', '.join(PRESETS)}")
    source.add_argument("--file", type=Path, metavar="F", help="a topology in JSON, as --json prints it")
    parser.add_argument("--json", action="store_true", help="print JSON, to edit and pass to --file")


def main(args: argparse.Namespace) -> int:
    """Prints a topology on stdout, and what was assumed about it on stderr.

    Returns:
        0, or 1 if there is no such topology.
    """
    errors = Console(stderr=True)
    try:
        detection = _chosen(args)
    except TopologyError as error:
        errors.print(f"[red]mobius-ds topology:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    for warning in detection.warnings:
        errors.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    if args.json:
        json.dump(detection.topology.to_json(), sys.stdout, indent=2)
        print()
    else:
        Console().print(topology_table(detection.topology))
    return 0


def _chosen(args: argparse.Namespace) -> Detection:
    if args.preset is not None:
        return Detection(preset(args.preset))
    if args.file is not None:
        return Detection(topology_from_json(args.file))
    return detect_topology()


def topology_table(topology: Topology) -> RenderableType:
    """One row per GPU, in groups by root complex, and what they share below."""
    table = Table("root", "GPU", "model", "memory\nGiB", "sustained\nTFLOP/s", "own link\nGB/s", "if all copy\nGB/s",
                  title=escape(topology.name), title_justify="left")
    for column in table.columns[3:]:
        column.justify = "right"
    for root, group in enumerate(topology.groups):
        table.add_section()
        for gpu in group:
            model = topology.gpus[gpu]
            table.add_row(str(root), str(gpu), escape(model.name), f"{model.memory_bytes / GIB:.1f}",
                          f"{model.flops / 1e12:.1f}", f"{topology.link_bandwidth[gpu] / GB:.1f}",
                          f"{topology.share_of_root(gpu) / GB:.1f}")
    roots = ", ".join(f"{root}: {bandwidth / GB:.1f} GB/s" for root, bandwidth in enumerate(topology.root_bandwidth))
    peers = "none, GPUs meet in DRAM"
    if topology.peer_bandwidth is not None:
        peers = f"{topology.peer_bandwidth / GB:.1f} GB/s"
    return Group(table, Text(f"root complexes: {roots}"), Text(f"direct connection of any two GPUs: {peers}"),
                 Text(f"DRAM: {topology.dram_bytes / GIB:.0f} GiB; the optimizer updates at "
                      f"{topology.update_bandwidth / GB:.1f} GB/s"),
                 Text("bandwidths are sustained, in each direction"))
