"""``mobius-ds run``: DeepSpeed's own launcher, with the plugin loaded in every process it starts.

The launcher starts this module instead of the script, and this module runs the script. That works from an
installed package and from a checkout alike, leaves the ``MOBIUS_DS`` flag alone, and reaches only the ranks. The
alternative, a ``sitecustomize`` on ``PYTHONPATH``, would hide the user's own one and leak into every subprocess.
"""

import contextlib
import os
import runpy
import site
import sys
from pathlib import Path
from typing import Iterator, List, Sequence

from mobius_ds.plugin import import_hook

MODULE_FLAG = "-m"


def run(arguments: Sequence[str]) -> int:
    """Runs ``deepspeed ARGUMENTS``: launcher options, a script, the script's arguments.

    Returns 0 when every rank ended well; else the launcher exits the process with the status of the one that did not.
    """
    from deepspeed.launcher import runner

    _make_importable_in_children()
    runner.main(_with_plugin(list(arguments), runner.parse_args(list(arguments))))
    return 0


def _with_plugin(arguments: List[str], parsed) -> List[str]:
    if parsed.no_python:
        return arguments  # the user's own command, which may be no Python at all
    script_at = len(arguments) - len(parsed.user_args) - 1
    options, script = arguments[:script_at], arguments[script_at:]
    if parsed.module:
        return options + [__name__, MODULE_FLAG] + script
    return options + ["--module", __name__] + script


def _make_importable_in_children() -> None:
    """Puts the folder of a checkout on ``PYTHONPATH``; an installed package is found without."""
    folder = str(Path(__file__).resolve().parents[2])
    if folder in (site.getusersitepackages(), *site.getsitepackages()):
        return
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])


def let_accelerate_run_on_cpu() -> None:
    """Gives Accelerate's processes gloo where there are several of them and no GPU. Calling it again changes nothing.

    DeepSpeed trains on such a machine. But Accelerate, asked for DeepSpeed, looks for the backends of GPUs alone and takes
    each process for the only one; and told to use the CPU, it connects the processes behind DeepSpeed's back, which then
    takes each for the only one. It concerns both values of the flag alike.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        import_hook.after_import("accelerate", _choose_gloo_without_a_gpu)


def _choose_gloo_without_a_gpu() -> None:
    from accelerate.state import DistributedType, PartialState

    choose = PartialState._prepare_backend
    if hasattr(choose, "mobius_ds"):
        return

    def _prepare_backend(self, *args, **kwargs):
        backend, kind = choose(self, *args, **kwargs)
        if kind not in (DistributedType.NO, DistributedType.MULTI_CPU):
            return backend, kind
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        return "gloo", DistributedType.MULTI_CPU

    _prepare_backend.mobius_ds = True
    PartialState._prepare_backend = _prepare_backend


def run_script(arguments: List[str]) -> None:
    """Runs one rank: ``[--local_rank=R] [-m] SCRIPT ARGS...`` as Python itself would, the plugin being loaded."""
    let_accelerate_run_on_cpu()
    local_rank = [arguments.pop(0)] if arguments[0].startswith("--local_rank=") else []
    as_module = arguments[0] == MODULE_FLAG
    script, *rest = arguments[1:] if as_module else arguments
    sys.argv = [script, *local_rank, *rest]
    with _error_recorded():
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
            return
        if not os.path.exists(script):
            sys.exit(f"mobius-ds: there is no script {script}")
        if not sys.flags.safe_path:
            # ``python -m`` has put the working directory first, where a script expects its own folder.
            sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _error_recorded() -> Iterator[None]:
    """Leaves an error in the file that torch's launcher names, if it is this rank's: as torch's ``record``, but torch is
    not imported before the script, which may have something to set up first."""
    try:
        yield
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        raise


if __name__ == "__main__":
    run_script(sys.argv[1:])
