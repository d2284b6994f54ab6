"""The advice: which way of training suits a model on a server, decided on predictions alone.

Candidates keep the model in the GPUs' memory (DDP, ZeRO-2, ZeRO-3, GPipe) or in DRAM (ZeRO-3 offload, Mobius). Of
those that fit, the shortest predicted step wins, unless another is so close that the simulator cannot tell them apart.
"""

from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

from mobius_ds.inputs.hardware import GB
from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.inputs.units import readable
from mobius_ds.prediction.pipelines import predict_gpipe
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.prediction.zero import (accumulated, offloaded_bytes, predict_ddp, predict_zero2_on_gpu,
                                       predict_zero3_offload, predict_zero3_on_gpu)
from mobius_ds.schedule.plan import InfeasiblePlan

DDP, ZERO2, ZERO3, ZERO3_OFFLOAD, MOBIUS, GPIPE = "ddp", "zero2-on-gpu", "zero3-on-gpu", "zero3-offload", "mobius", "gpipe"
SIMPLEST_FIRST = (DDP, ZERO2, ZERO3, ZERO3_OFFLOAD, MOBIUS, GPIPE)
"""By what a script written for ZeRO-3 offload has to change: settings first, the script itself last."""

TOSS_UP = 1.4
"""Steps whose ratio is less are not told apart. ``comparisons/paper.py`` sets predicted ratios of ZeRO-3's step to
Mobius' against published ones: on the paper's server, with one-sample micro-batches of 1024 tokens, they are up to 1.36
times too high. On eight RTX 4090 they are too low, up to 1.9 times, as the software's overhead is not simulated."""
_SEEN = f"predicted ratios were found up to {TOSS_UP:g} times off on RTX 3090 Ti, and 1.9 times on RTX 4090"


class Candidate(NamedTuple):
    """One way of training."""

    name: str
    prediction: Optional[Prediction]
    """None if there is none: ``why_not`` says why."""
    dram_bytes: int
    """For weights and training state; zero where the GPUs hold them."""
    why_not: str
    """Why it cannot run; empty if it can."""


class Advice(NamedTuple):
    """What to use."""

    chosen: Optional[Candidate]
    """None if nothing fits."""
    equals: Tuple[Candidate, ...]
    """Those that the simulator cannot tell from it, fastest first."""
    sentences: Tuple[str, ...]


def candidates(profile: ModelProfile, topology: Topology, mobius: Union[Prediction, str],
               micro_batches: int = 1) -> Tuple[Candidate, ...]:
    """The ways to train a model on a server; of those that replicate or shard it on the GPUs only the simplest that fits.

    Args:
        mobius: its step with one micro-batch per GPU, or why there is no plan.
        micro_batches: accumulated by each rank in a step. Each is swept by itself, but GPipe has them in one.
    """
    need = offloaded_bytes(profile)
    found = [Candidate(MOBIUS, None, need, mobius) if isinstance(mobius, str) else
             _judged(accumulated(mobius, micro_batches), topology,
                     need + mobius.bytes_by_category.get("activations_out", 0)),
             _judged(accumulated(predict_zero3_offload(profile, topology), micro_batches), topology, need)]
    if topology.size > 1:
        found.append(_gpipe(profile, topology, micro_batches * topology.size))
    return (*found, _data_parallel(profile, topology, micro_batches))


def _gpipe(profile: ModelProfile, topology: Topology, microbatches: int) -> Candidate:
    try:
        return _judged(predict_gpipe(profile, topology, microbatches), topology, 0)
    except InfeasiblePlan as error:
        return Candidate(GPIPE, None, 0, str(error))


def _data_parallel(profile: ModelProfile, topology: Topology, micro_batches: int) -> Candidate:
    """Everything on the GPUs, sharded no more than it has to be: what is sharded less moves less."""
    for predict in (predict_ddp, predict_zero2_on_gpu, predict_zero3_on_gpu):
        candidate = _judged(accumulated(predict(profile, topology), micro_batches), topology, 0)
        if not candidate.why_not or topology.size == 1:
            break
    return candidate


def _judged(prediction: Prediction, topology: Topology, dram_bytes: int) -> Candidate:
    why_not = ""
    if not prediction.fits:
        why_not = (f"it needs {readable(max(prediction.memory_bytes))} on a GPU, of which "
                   f"{readable(prediction.missing_bytes)} are missing")
    elif dram_bytes > topology.dram_bytes:
        why_not = (f"it needs {readable(dram_bytes)} of DRAM, but {topology.name} has {readable(topology.dram_bytes)}: "
                   f"{readable(dram_bytes - topology.dram_bytes)} are missing")
    return Candidate(prediction.name, prediction, dram_bytes, why_not)


def advise(found: Sequence[Candidate], topology: Topology) -> Advice:
    """Decides."""
    running = sorted((one for one in found if not one.why_not), key=lambda one: one.prediction.step_seconds)
    refused = tuple(f"{one.name} cannot run: {one.why_not}." for one in found if one.why_not)
    if not running:
        nothing = "Nothing fits. Take a smaller model, fewer trained parameters, or a larger server."
        return Advice(None, (), (nothing, *refused))
    near = [one for one in running if one.prediction.step_seconds <= TOSS_UP * running[0].prediction.step_seconds]
    chosen = min(near, key=lambda one: SIMPLEST_FIRST.index(one.name))
    equals = tuple(one for one in near if one is not chosen)
    sentences = [_headline(chosen, equals), _figures(chosen, topology),
                 _REASONS[chosen.name](chosen, {one.name: one for one in running}, topology)]
    if topology.size == 1:
        sentences.append("One GPU has nobody to share the work with: there is nothing to pipeline and no traffic between "
                         "GPUs to save. Mobius still streams stages and hides their copies, as ZeRO-3 offload does.")
    slower = [f"{one.name} {one.prediction.step_seconds:.3g} s "
              f"({one.prediction.step_seconds / chosen.prediction.step_seconds:.1f} times as long)"
              for one in running if one not in near]
    if slower:
        sentences.append(f"Slower: {', '.join(slower)}.")
    return Advice(chosen, equals, (*filter(None, sentences), *refused))


def _headline(chosen: Candidate, equals: Sequence[Candidate]) -> str:
    step = f"{chosen.prediction.step_seconds:.3g} s a step"
    verb = "Stay with" if chosen.name == ZERO3_OFFLOAD else "Use"
    if not equals:
        return f"{verb} {chosen.name}: {step} predicted."
    others = " and ".join(f"{one.name} ({one.prediction.step_seconds:.3g} s)" for one in equals)
    return (f"A toss-up between {chosen.name} ({step}) and {others}: {_SEEN}. Only measuring "
            f"decides. Until then: {verb.lower()} {chosen.name}, which changes least.")


def _figures(chosen: Candidate, topology: Topology) -> str:
    prediction = chosen.prediction
    dram = f", {readable(chosen.dram_bytes)} of DRAM (there: {readable(topology.dram_bytes)})" if chosen.dram_bytes else ""
    return (f"A step moves {readable(sum(prediction.bytes_by_category.values()))} and takes "
            f"{readable(max(prediction.memory_bytes))} on a GPU (there: {readable(_least_memory(topology))}){dram}.")


def _least_memory(topology: Topology) -> int:
    return min(gpu.memory_bytes for gpu in topology.gpus)


# Why the chosen one: of the candidate, the others that run, and the server.

Running = Dict[str, Candidate]


def _why_mobius(chosen: Candidate, running: Running, topology: Topology) -> str:
    if ZERO3_OFFLOAD not in running or topology.size == 1:
        return ""
    theirs, own = (sum(one.prediction.bytes_by_category.values()) for one in (running[ZERO3_OFFLOAD], chosen))
    return (f"ZeRO-3 offload brings every parameter to each of the {topology.size} GPUs and moves {theirs / own:.1f} times "
            f"as much; its GPUs compute {1 - running[ZERO3_OFFLOAD].prediction.exposed_share:.0%} of the time, Mobius' "
            f"{1 - chosen.prediction.exposed_share:.0%} (both without the CPU optimizer).")


def _why_zero3_offload(chosen: Candidate, running: Running, topology: Topology) -> str:
    if topology.size == 1:
        return ""
    if topology.peer_bandwidth is None:
        return (f"Its GPUs compute {1 - chosen.prediction.exposed_share:.0%} of the time before the CPU optimizer: copies "
                "hide behind compute, and there is little for Mobius to save.")
    return (f"Its collectives use the GPUs' direct connection ({topology.peer_bandwidth / GB:.0f} GB/s) and leave PCIe to "
            "the copies from DRAM; sharing PCIe is what Mobius avoids.")


def _why_on_gpu(what: str) -> Callable[[Candidate, Running, Topology], str]:
    def why(chosen: Candidate, running: Running, topology: Topology) -> str:
        way = "PCIe, through DRAM" if topology.peer_bandwidth is None else \
            f"the GPUs' direct connection ({topology.peer_bandwidth / GB:.0f} GB/s)"
        return f"It fits: {what}" + (f" over {way}." if topology.size > 1 else ".")

    return why


_REASONS: Dict[str, Callable[[Candidate, Running, Topology], str]] = {
    MOBIUS: _why_mobius,
    ZERO3_OFFLOAD: _why_zero3_offload,
    DDP: _why_on_gpu("every GPU holds the model with its training state, and only gradients move"),
    ZERO2: _why_on_gpu("every GPU holds the weights and a share of the training state, and gradients and new weights move"),
    ZERO3: _why_on_gpu("the GPUs together hold the model with its training state, and pass their shares on"),
    GPIPE: _why_on_gpu("every GPU keeps its stage with its training state, and only activations move"),
}
