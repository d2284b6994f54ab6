"""Machines that are not as they should be: no compiler, a build that was killed, a cache that does not work, two nodes."""

import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
from torch.utils.file_baton import FileBaton

from mobius_ds.names import CACHE_VARIABLE, FLAG_VARIABLE
from mobius_ds.planner import plan_files
from mobius_ds.runtime.optimizer import extensions
from mobius_ds.runtime.ranks import mailbox
from mobius_ds.runtime.ranks.node import Node
from tests.bad_input.cases import Case, check
from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.jobs import config, failure, initialize, language_model, mine, rank_and_size

CPU_ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
HOUR = 3600


def warnings_of(function: Callable[[], Any]) -> str:
    """What the plugin warns of while ``function`` runs."""
    from deepspeed.utils import logger
    said: List[str] = []
    warning, logger.warning = logger.warning, lambda message, *args, **options: said.append(str(message))
    try:
        function()
    finally:
        logger.warning = warning
    return "\n".join(message for message in said if message.startswith("Mobius"))


def trained(mobius: Dict[str, Any] = {}, **sections: Any) -> None:
    """A step, which must be one of torch's Adam."""
    settings = config(**sections)
    settings["mobius"].update(mobius)
    engine = initialize(language_model(), settings)
    engine.backward(engine(*mine(0)).loss)
    engine.step()
    assert type(engine.optimizer.optimizer).__module__ == "torch.optim.adamw"
    engine.destroy()


# DeepSpeed's extensions.


def left_lock(folder: Path) -> None:
    lock = folder / "cpu_adam" / "lock"
    if rank_and_size()[0] == 0:
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - HOUR,) * 2)
    while not lock.exists() or time.time() - lock.stat().st_mtime < HOUR:
        time.sleep(0.01)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def no_compiler(folder: Path) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ.pop("CXX", None)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    if not (folder / "bin" / "ninja").exists() and rank_and_size()[0] == 0:
        import ninja
        (folder / "bin" / "ninja").symlink_to(Path(ninja.BIN_DIR) / "ninja")
    while not (folder / "bin" / "ninja").exists():
        time.sleep(0.01)
    os.environ["PATH"] = str(folder / "bin")


def no_folder(folder: Path) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = "/proc/nothing"


EXTENSIONS = [
    Case("a lock that a killed build has left", left_lock, "cpu_adam/lock is 60 minutes old and no process of this machine "
         "holds it: a job was killed while it built the extension"),
    Case("no folder to build in", no_folder, "'/proc/nothing'"),
    Case("no compiler", no_compiler, "c++: not found"),
]


def every_extension(folder: str) -> Dict[str, str]:
    said = {}
    for number, case in enumerate(EXTENSIONS):
        case.input(Path(folder) / str(number))
        said[case.what] = warnings_of(lambda: trained(optimizer=CPU_ADAM))
    return said


@survives("Bad input", "DeepSpeed's CPU Adam cannot be built: no compiler, no folder, or a killed build's lock",
          "torch's Adam on all ranks, with one warning that says why and which file to remove; no wait without end")
def test_extensions_that_cannot_be_built(tmp_path):
    results = run_ranks(2, every_extension, str(tmp_path), timeout=100)
    check(EXTENSIONS, results[:1])
    for case in EXTENSIONS:
        assert results[0][case.what].count("using torch's Adam, which is slower") == 1
        assert results[1][case.what] == ""


def test_a_lock_is_waited_for_while_somebody_builds(tmp_path):
    lock = tmp_path / "lock"
    builder, waiter = FileBaton(str(lock)), FileBaton(str(lock))
    assert builder.try_acquire()
    os.utime(lock, (time.time() - HOUR,) * 2)  # a slow build, but its process has the file open
    threading.Timer(0.5, builder.release).start()
    started = time.monotonic()
    extensions._wait(waiter)
    assert time.monotonic() - started > 0.4
    lock.touch()
    threading.Timer(0.5, lock.unlink).start()
    extensions._wait(waiter)  # nobody here has it open, but on another machine somebody may
    lock.touch()
    os.utime(lock, (time.time() - HOUR,) * 2)
    with pytest.raises(RuntimeError, match=f"Unless another machine is building: rm {lock}"):
        extensions._wait(waiter)


# The cache of plans.


def file_for_a_folder(cache: Path) -> None:
    if rank_and_size()[0] == 0:
        cache.write_text("")


def damaged_plan(cache: Path) -> None:
    trained(PLANNED)
    for path in cache.glob("*.json") if rank_and_size()[0] == 0 else ():
        path.write_bytes(path.read_bytes()[:-20])


def full_disk(cache: Path) -> None:
    write = plan_files.write

    def write_on_it(*args: Any) -> None:
        with file_size_limit(1000):
            write(*args)

    plan_files.write = write_on_it


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


PLANNED = {"topology": "4090-2"}
CACHES = [
    Case("a file in place of the folder", file_for_a_folder,
         "this job's plan is not kept for the next one: cannot write the plan"),
    Case("a damaged plan in it", damaged_plan, "a plan made before cannot be used, so this job is planned again:"),
    Case("a full disk", full_disk, "this job's plan is not kept for the next one: cannot write the plan"),
]


def every_cache(folder: str) -> Dict[str, Any]:
    said, left = {}, {}
    for number, case in enumerate(CACHES):
        cache = Path(folder) / str(number)
        os.environ[CACHE_VARIABLE] = str(cache)
        case.input(cache)
        said[case.what] = warnings_of(lambda: trained(PLANNED))
        left[case.what] = [path.suffix for path in cache.iterdir()] if cache.is_dir() else []
    return {"said": said, "left": left}


@survives("Bad input", "a cache of plans that cannot be written, is full or has a damaged plan in it",
          "the job plans anew and trains, with one warning; no half plan is left")
def test_a_cache_that_does_not_work_stops_no_job(tmp_path):
    results = run_ranks(2, every_cache, str(tmp_path))
    check(CACHES, [result["said"] for result in results[:1]])
    assert results[0]["left"] == {"a file in place of the folder": [], "a damaged plan in it": [".json"], "a full disk": []}


# Where the ranks run.


def elsewhere(**changes: str) -> Callable[[], None]:
    def move() -> None:
        here = Node.here()._replace(**changes)
        mailbox.Node = type("There", (), {"here": staticmethod(lambda: here)})
    return move


RANKS = [
    Case("two machines", elsewhere(host="other", boot="another"), "the ranks run on 2 machines (rank 0 on "),
    Case("two containers", elsewhere(host="other", network="net:[1]"),
         "the ranks run on 2 containers with networks of their own"),
    Case("a flag that is none", lambda: os.environ.update({FLAG_VARIABLE: "yes"}),
         "MOBIUS_DS must be 0 or 1, got 'yes'"),
    Case("no LOCAL_RANK", lambda: os.environ.pop("LOCAL_RANK"), "DeepSpeed requires the LOCAL_RANK environment variable"),
]


def every_rank() -> Dict[str, str]:
    with file_size_limit(10**6):
        said = {A_LIMIT.what: failure(lambda: initialize(language_model(), config()))}
    for case in RANKS:
        before = dict(os.environ)
        if rank_and_size()[0] == 1 or case.what in ("a flag that is none", "no LOCAL_RANK"):
            case.input()
        said[case.what] = failure(lambda: initialize(language_model(), config()))
        mailbox.Node = Node
        os.environ.clear()
        os.environ.update(before)
    return said


A_LIMIT = Case("a limit on file sizes", None, "it counts for this as well: raise it (ulimit -f unlimited)")


@survives("Bad input", "ranks on two machines, or in containers that do not see each other",
          "one error at once, on every rank, that says which rank runs where")
def test_ranks_where_they_cannot_run():
    results = run_ranks(2, every_rank)
    check(RANKS, results)
    assert all(A_LIMIT.words in result[A_LIMIT.what] for result in results), results
