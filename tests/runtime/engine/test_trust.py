"""What a job reads runs no code, and what its ranks share is seen by no other user."""

import ast
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy
import pytest
import torch

import mobius_ds
from mobius_ds.inputs.profile import profile_from_json
from mobius_ds.inputs.topology import preset, topology_from_json
from mobius_ds.planner.plan_files import from_json, to_json
from mobius_ds.planner.planner import Request, make_best_plan
from mobius_ds.runtime.checkpoint.export_script import saved_tensors
from mobius_ds.runtime.dram.shared_memory import Region
from mobius_ds.runtime.ranks.errors import PipelineError
from mobius_ds.runtime.ranks.mailbox import Mailbox
from tests.features import survives
from tests.planner.models import even_model
from tests.ranks import run_ranks
from tests.runtime.checkpoint.checkpoint_jobs import model_of, start, train
from tests.runtime.jobs import failure, rank_and_size

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self._folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self._folder,)


# Checkpoints.

def set_trap(folder: Path, name: str, sprung: Path) -> None:
    """Puts a trap beside what a file of a checkpoint holds. Whoever can do that can make its checksum right."""
    path = folder / name
    content = torch.load(path, weights_only=False)
    torch.save({**content, "trap": Trap(sprung)} if isinstance(content, dict) else [content, Trap(sprung)], path)
    mark = folder / "mobius.json"
    if mark.exists():
        described = json.loads(mark.read_text())
        described["checksums"][name] = zlib.crc32(path.read_bytes())
        mark.write_text(json.dumps(described))


def kinds(folder: Path) -> List[str]:
    """One file of each kind in a checkpoint, of the last rank's where all ranks have one."""
    found = {}
    for path in sorted(folder.rglob("*.pt")):
        name = path.relative_to(folder).as_posix()
        found[path.name if "/" in name else name.replace("rank_0_", "rank_1_")] = name
    return list(found.values())


def trapped_checkpoints(directory: Path, saved_under: bool, loaded_under: bool) -> Dict[str, str]:
    """Saves under one flag and loads under another, once for each kind of file with a trap in it."""
    rank, _ = rank_and_size()
    engine = start(saved_under, model_of(frozen=1))
    train(engine, 0, 1)
    engine.save_checkpoint(str(directory / "good"), tag="step", client_state=harmless())
    engine.destroy()
    torch.distributed.barrier()
    said: Dict[str, str] = {}
    for number, kind in enumerate(kinds(directory / "good" / "step")):
        if rank == 0:
            shutil.copytree(directory / "good", directory / f"bad{number}")
            set_trap(directory / f"bad{number}" / "step", kind, directory / f"sprung{number}")
        torch.distributed.barrier()
        engine = start(loaded_under, model_of(frozen=1))
        said[kind] = failure(lambda: engine.load_checkpoint(str(directory / f"bad{number}"), tag="step"))
        engine.destroy()
        if saved_under and kind.startswith("mp_rank"):  # each rank loads its own; this one is for the export
            said[kind] = failure(lambda: saved_tensors(directory / f"bad{number}" / "step", False))
        torch.distributed.barrier()
        said[kind] = "TRAP" if (directory / f"sprung{number}").exists() else said[kind]
    engine = start(loaded_under, model_of(frozen=1))
    _, client = engine.load_checkpoint(str(directory / "good"), tag="step")
    assert client["best"] == harmless()["best"] and client["table"].tolist() == [0, 1, 2] and client["args"].depth == 7
    engine.destroy()
    return said


def harmless() -> Dict[str, Any]:
    """What scripts often save."""
    return {"best": numpy.float64(1.5), "table": numpy.arange(3), "args": Namespace(depth=7)}


@survives("Trust", "a checkpoint of Mobius or of ZeRO-3 with an object in it that runs code when it is loaded",
          "refused by name, in every kind of file; no code runs. NumPy's scalars and arrays and `argparse.Namespace` load")
@pytest.mark.parametrize("saved_under", [True, False])
def test_no_file_of_a_checkpoint_runs_code(saved_under, tmp_path):
    first, second = run_ranks(2, trapped_checkpoints, tmp_path, saved_under, True)
    expected = {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt", "frozen.pt", "optimizer_state.pt"} if saved_under else \
        {"zero_pp_rank_1_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
         "zero_pp_rank_1_mp_rank_00_optim_states.pt"}
    assert len(expected & {Path(kind).name for kind in first}) >= (6 if saved_under else 2), list(first)
    for kind, said in first.items():
        if kind.startswith("mp_rank"):
            assert "UnpicklingError" in said and "posix.mkdir" in said
        else:
            assert "CheckpointError: " in said and kind in said and "neither a tensor nor plain data: posix.mkdir" in said
        assert second[kind].split(":")[0] == said.split(":")[0]


class Unheard:
    """A type of the script's own."""

    def __init__(self):
        self.word = "kept"


def saves_its_own_type(directory: Path) -> Tuple[str, str]:
    engine = start(True, model_of())
    train(engine, 0, 1)
    engine.save_checkpoint(str(directory), client_state={"mine": Unheard()})
    refused = failure(lambda: engine.load_checkpoint(str(directory)))
    with torch.serialization.safe_globals([Unheard]):
        _, client = engine.load_checkpoint(str(directory))
    engine.destroy()
    return refused, client["mine"].word


def test_a_scripts_own_type_is_refused_by_name_until_the_script_allows_it(tmp_path):
    [(refused, word)] = run_ranks(1, saves_its_own_type, tmp_path)
    assert "CheckpointError" in refused and f"{Unheard.__module__}.Unheard" in refused
    assert "torch.serialization.add_safe_globals([Unheard])" in refused and word == "kept"


# Plans, topologies, profiles.

HOSTILE = ["__import__('os').mkdir({!r})", "!!python/object/apply:os.mkdir [{!r}]", "cos\nmkdir\n(V{}\ntR."]


def with_everywhere(data: Any, text: str) -> List[Any]:
    """Copies of plain data, each with the text in the place of another one of its values."""
    if isinstance(data, dict):
        return [text] + [{**data, key: changed} for key in data for changed in with_everywhere(data[key], text)]
    if isinstance(data, list):
        return [text] + [[*data[:at], changed, *data[at + 1:]] for at in range(len(data))
                         for changed in with_everywhere(data[at], text)]
    return [text]


def plan() -> Dict[str, Any]:
    return json.loads(json.dumps(to_json(make_best_plan(Request(even_model(4), preset("3090-2"), 2, "even")))))


@survives("Trust", "plan, topology and profile files that hold code, or bytes of a pickle",
          "read as data; at most an error about a value")
def test_plans_topologies_and_profiles_are_data(tmp_path):
    sprung, path = tmp_path / "sprung", tmp_path / "file.json"
    planned = plan()
    readers: List[Tuple[Callable, Any]] = [(from_json, planned), (topology_from_json, planned["request"]["topology"]),
                                           (profile_from_json, planned["request"]["profile"])]
    tried = 0
    for read, data in readers:
        for hostile in HOSTILE:
            for changed in with_everywhere(data, hostile.format(str(sprung))):
                tried += 1
                try:
                    read(changed)
                except (ValueError, KeyError, TypeError):
                    pass
    assert tried > 300
    for content in (pickle.dumps(Trap(sprung)), pickle.dumps(Trap(sprung), protocol=0), b"[" * 10**6, b"\xff\xfe",
                    b"9" * 10**6):
        path.write_bytes(content)
        for read in (from_json, topology_from_json):
            with pytest.raises(ValueError, match=str(path)):
                read(path)
    assert not sprung.exists()


def test_nothing_but_messages_between_ranks_is_unpickled_or_evaluated():
    package = Path(mobius_ds.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                plain = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                if called in ("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler") or \
                        called == "torch.load" and not plain:
                    found.add((path.relative_to(package).as_posix(), called))
    assert found == {("runtime/ranks/mailbox.py", "pickle.loads")}


# What ranks share.

def as_nobody(code: str, *arguments: Any) -> str:
    """What Python prints when another user runs it."""
    def leave_root() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    # The environment's own interpreter may lie where nobody may look.
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    done = subprocess.run([python, "-c", code, *map(str, arguments)], preexec_fn=leave_root, capture_output=True, text=True,
                          timeout=60, cwd="/")
    if done.returncode != 0 and "Permission denied" in done.stderr and not done.stdout:
        pytest.skip(f"nobody cannot run Python here: {done.stderr}")
    return done.stdout.strip()


def mailboxes(disturb: Callable[[str], Any]) -> List[Mailbox]:
    """Two, as of two ranks; ``disturb`` is called with the first one's address before the second connects."""
    known, both = {}, threading.Barrier(2)

    def exchange(rank: int) -> Callable[[Any], List[Any]]:
        def gather(offer: Any) -> List[Any]:
            known[rank] = offer
            both.wait(30)
            if rank == 1:
                disturb(known[0][0])
            return [known[0], known[1]]
        return gather

    made: List[Any] = [None, None]

    def make(rank: int) -> None:
        made[rank] = Mailbox(rank, 2, exchange(rank), 30.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return made


INTRUDE = """
import socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect("\\0" + sys.argv[1])
link.settimeout(30)
try:
    link.sendall(bytes.fromhex(sys.argv[2]))
    print("heard", link.recv(1))
except ConnectionError:
    print("heard b''")
"""


def framed(message: bytes) -> str:
    """As ``multiprocessing`` sends it."""
    return (len(message).to_bytes(4, "big") + message).hex()


@survives("Trust", "another user of the machine connects to a rank's socket, or opens its memory", "turned away unread")
@as_root
def test_another_user_cannot_speak_to_a_rank(tmp_path):
    sprung, said = tmp_path / "sprung", []
    trap = framed(pickle.dumps(Trap(sprung)))
    first, second = mailboxes(lambda address: said.append(as_nobody(INTRUDE, address[1:], trap)))
    assert said == ["heard b''"] and not sprung.exists()
    second.post(0, "key", "words")
    assert first.take(1, "key", "words") == "words"
    for mailbox in (first, second):
        mailbox.close()


SERVE = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("\\0" + sys.argv[1])
server.listen(1)
print("ready", flush=True)
link, _ = server.accept()
link.sendall(bytes.fromhex(sys.argv[2]))
link.recv(1)
"""


@as_root
def test_another_user_cannot_take_a_ranks_address(tmp_path):
    sprung, name = tmp_path / "sprung", f"mobius-test-{os.getpid()}"
    served = []
    server = threading.Thread(target=lambda: served.append(as_nobody(SERVE, name, framed(pickle.dumps(Trap(sprung))))))
    server.start()
    while f"@{name}" not in Path("/proc/net/unix").read_text():
        assert server.is_alive()
    with pytest.raises(PipelineError, match="what answers for rank 0 is another user's"):
        Mailbox(1, 2, lambda offer: [(f"\0{name}", offer[1]), offer], 30.0)
    server.join(60)
    assert served == ["ready"] and not sprung.exists()


OPEN = """
import os, sys
for path in (f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", f"/proc/{sys.argv[1]}/mem", f"/proc/{sys.argv[1]}/map_files"):
    try:
        os.listdir(path) if path.endswith("files") else os.open(path, os.O_RDWR)
        print("opened", path)
    except PermissionError:
        print("refused")
"""


@as_root
def test_another_user_cannot_open_shared_memory():
    region = Region.create("test", 4096)
    assert as_nobody(OPEN, os.getpid(), region.handle.fd).split() == ["refused"] * 3
    Region.open(region.handle).close()  # this user can
    region.close()


# Listeners.

def listeners() -> Tuple[int, int]:
    """Sockets of this process that wait for connections: of the network, and of the node."""
    mine = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(path))
        except OSError:  # the listing's own
            pass
    network = [line.split() for table in ("tcp", "tcp6", "udp", "udp6") if Path("/proc/net", table).exists()
               for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    # State 0A: listening; 07: a UDP socket that is bound. Inodes are the tenth column.
    waiting = sum(row[3] in ("0A", "07") and f"socket:[{row[9]}]" in mine for row in network)
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return waiting, sum(int(row[3], 16) & 0x10000 != 0 and f"socket:[{row[6]}]" in mine for row in local)


def listening(mobius: bool) -> Tuple[Tuple[int, int], Tuple[int, int]]:
    before = listeners()
    engine = start(mobius, model_of())
    train(engine, 0, 1)
    during = listeners()
    engine.destroy()
    return before, during


def with_a_listener_of_its_own() -> Tuple[Tuple[int, int], Tuple[int, int]]:
    before = listeners()
    with socket.socket() as network, socket.socket(socket.AF_UNIX) as local:
        network.bind(("127.0.0.1", 0))
        network.listen()
        local.bind(f"\0{os.getpid()}")
        local.listen()
        return before, listeners()


@survives("Trust", "a listener on the network beyond torch.distributed's own",
          "there is none, nor one on the node after the start")
def test_no_socket_waits_for_connections_but_torchs_own():
    [(before, during)] = run_ranks(1, with_a_listener_of_its_own)
    assert during == (before[0] + 1, before[1] + 1)  # they would be seen
    under_mobius, under_zero3 = run_ranks(2, listening, True), run_ranks(2, listening, False)
    for (before, during), (_, zero3) in zip(under_mobius, under_zero3):
        assert during == zero3 and during[1] == before[1]
