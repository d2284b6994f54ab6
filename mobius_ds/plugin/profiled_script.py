"""One rank of a training script up to its first forward, whose profile it leaves in a file.

    python -m mobius_ds.plugin.profiled_script FILE SCRIPT ARGS...
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import List

from mobius_ds.plugin import import_hook
from mobius_ds.plugin.launcher import run_script


class ProfileTaken(BaseException):
    """Ends the script, which may catch any ``Exception``: there is nothing left to run it for."""


def main(arguments: List[str]) -> None:
    """Runs ``SCRIPT ARGS...`` as the launcher does, until its first forward is profiled into ``FILE``."""
    file, *script = arguments
    # As the launcher, it imports neither torch nor DeepSpeed before the script, which may have something to set up first.
    import_hook.after_import("mobius_ds.runtime.engine.engine", lambda: _profile_into(Path(file)))
    try:
        run_script(script)
    except ProfileTaken:
        pass


def _profile_into(file: Path) -> None:
    """Gives every engine a pipeline that profiles the first forward, for a GPU of 1 FLOP/s, where others plan and run it."""
    from mobius_ds.inputs.topology import Gpu
    from mobius_ds.profiling.computed import computed_profile
    from mobius_ds.runtime.engine.engine import MobiusEngine
    from mobius_ds.runtime.job.job import Chosen, Job
    from mobius_ds.runtime.sweeps.pipeline import Pipeline

    class ProfilingPipeline(Pipeline):

        def _check_config(self, model) -> None:
            """Nothing: what is profiled is yet to be planned, and for more ranks than this one."""

        def _choose_plan(self, job: Job) -> Chosen:
            traced = job.traced()
            profile = computed_profile(traced, Gpu("of 1 FLOP/s", 1, 1.0), type(traced.entry.model).__name__)
            file.write_text(json.dumps(asdict(profile)))
            raise ProfileTaken

    MobiusEngine.pipeline_class = ProfilingPipeline


if __name__ == "__main__":
    main(sys.argv[1:])
