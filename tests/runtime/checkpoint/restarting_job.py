"""A training script as users write it: it saves every second step and begins where the latest checkpoint ends.

    torchrun --standalone --nproc_per_node 2 --max-restarts 1 tests/runtime/checkpoint/restarting_job.py FOLDER STEPS [FAULT...]

Each time it is started, the next of the FAULTs comes, in the fifth step or the first save after it: ``1:backward:killed``
kills rank 1 in its backward. Places are ``forward``, ``backward``, ``save``, and ``script``: the script's own code.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Callable, Dict

import deepspeed

import mobius_ds  # noqa: F401, the plugin, which loads itself where it is installed
from mobius_ds.runtime.checkpoint import checkpoint_files
from mobius_ds.runtime.sweeps.stage_work import ACTIONS
from mobius_ds.schedule.tasks import Kind
from tests.runtime.jobs import config, language_model, mine

FAULTY_STEP = 4
KINDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD}
FAULTS: Dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: sys.exit(7),
    "raises": lambda: 1 / 0,
}


def happen(place: str, fault: Callable[[], None]) -> None:
    """Lets the fault come now, or as soon as this rank is at a place inside the engine."""
    if place == "script":
        fault()
    elif place == "save":
        write, written = checkpoint_files.write_tensors, []

        def write_or_fail(*arguments):
            written.append(arguments)
            return fault() if len(written) > 5 else write(*arguments)

        checkpoint_files.write_tensors = write_or_fail
    else:
        action = ACTIONS[KINDS[place]]
        ACTIONS[KINDS[place]] = action._replace(do=lambda *arguments: (fault(), action.do(*arguments))[1])


def main(folder: Path, steps: int, *faults: str) -> None:
    """Trains to ``steps``; every rank adds its losses to a file: which start of the job it was, the step, the loss."""
    (folder / f"pid {os.getpid()}").touch()
    settings = config(timeout_seconds=30)
    settings["mobius"]["layers_per_stage"] = 1
    model = language_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    engine.load_checkpoint(str(folder / "checkpoints"))
    rank, start = os.environ["RANK"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    while engine.global_steps < steps:
        step = engine.global_steps
        if step == FAULTY_STEP and start < len(faults) and faults[start].startswith(f"{rank}:"):
            _, place, fault = faults[start].split(":")
            happen(place, FAULTS[fault])
        loss = engine(*mine(step)).loss
        engine.backward(loss)
        engine.step()
        with open(folder / f"losses of rank {rank}", "a") as file:
            file.write(f"{start} {step} {loss.item().hex()}\n")
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint(str(folder / "checkpoints"))


if __name__ == "__main__":
    # DeepSpeed's launcher puts the rank on the node before a script's own arguments.
    folder, steps, *faults = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank="))
    main(Path(folder), int(steps), *faults)
