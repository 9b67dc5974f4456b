"""What must hold against strangers, other users and hostile files: one line for each promise, and the tests that hold it.

1. Nothing of a job of one node listens outside loopback: `test_launcher_network.py::test_nothing_of_a_job_listens_outside_loopback`.
2. A stranger on the network without the key reads nothing, writes nothing and slows nothing down: `test_a_stranger_on_the_wire_gets_nothing` here;
   every opening alone in `test_rendezvous_attacks.py::test_nothing_is_read_or_written_without_the_key`.
3. A recorded frame or connection is refused: `test_rendezvous_attacks.py::test_recorded_connection_says_nothing_when_it_is_replayed`,
   `test_rendezvous_attacks.py::test_frame_that_somebody_tampers_with_ends_its_connection`.
4. Another user of the machine is refused: `test_rendezvous_attacks.py::test_other_users_cannot_reach_the_unix_socket`,
   `test_rendezvous_attacks.py::test_other_users_hear_nothing_even_where_the_directory_is_open`.
5. A secret stands in no command line, log or file: `test_secrets_of_a_job_stand_nowhere` here; the key in errors and debug output too in
   `test_rendezvous_attacks.py::test_key_stands_in_no_command_line_no_environment_and_no_output`.
6. A planted link is never written through: `test_planted_links_are_not_written_through` here.
7. A pickle in the place of any file that is read is never executed: `test_pickles_are_refused_wherever_a_file_is_read` here; files of torch.save in
   `ranks/test_checkpoint.py::test_a_pickle_is_read_only_when_asked_for_and_never_executed`; that no source could, in
   `unit/test_forbidden_calls.py::test_the_sources_have_none`.
8. Hostile names of hosts are refused before anything is started: `unit/launch/test_hosts.py::test_hostile_names_are_refused`,
   `test_launcher_hosts_asked.py::test_hostile_names_start_nothing`.
9. Names that lead out of their directory are refused: `unit/train/checkpoint/test_manifest.py::test_a_file_name_that_leads_elsewhere_is_refused`,
   `unit/comm/test_shared_directory.py::test_files_elsewhere_are_not_read`, `test_fetch.py::test_members_at_other_places_are_refused_and_not_written`.
"""

import pickle
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
from hosts_kit import Hosts, StartOn
from launcher_kit import Start
from networks_kit import Network, needs_networks
from rendezvous_kit import HELLO, OPENINGS
from safetensors import SafetensorError

from hora.calls.files import read_object
from hora.comm.owner import Owner
from hora.errors import ConfigError, HoraError
from hora.launch import wire
from hora.launch.agent import from_wire
from hora.launch.display import Display
from hora.launch.hosts import read_hostfile
from hora.launch.logs import log_directory, open_streams
from hora.launch.plan import Layout
from hora.launch.sinks import RankLog
from hora.plan.algorithm_table import parse as parse_table
from hora.recipes.lm.resolve import resolve_config
from hora.rendezvous.key import read_key, write_key
from hora.rendezvous.protocol import MAGIC
from hora.train.checkpoint.content import Content
from hora.train.checkpoint.manifest import CheckpointName, Manifest
from hora.train.checkpoint.storage import Storage
from hora.train.checkpoint.tensors import read_tensors
from hora.train.files import create_file, replace_file
from hora.train.lock import DirectoryLock
from hora.train.metrics import JsonLines, cut_metrics, read_metrics

TESTS = Path(__file__).parents[1]


def test_every_line_above_names_tests_that_there_are() -> None:
    named = re.findall(r"`(?:(\S+\.py)::)?(test_\w+)`", str(__doc__))
    assert len(named) >= 9
    for file, test in named:
        path = TESTS / file if "/" in file else Path(__file__).with_name(file or Path(__file__).name)
        assert f"def {test}(" in path.read_text(encoding="utf-8"), f"there is no {test} in {path.name}"


STEPS = """\
from hora.rendezvous.client import Client
from hora.rendezvous.key import read_key

client = Client(os.environ['HORA_RENDEZVOUS'], read_key(os.environ['HORA_KEY_FILE']), name='rank', timeout_s=30)
client.set('weights', b'precious')
place, step, over = os.environ['STEPS'], 0, b''
if RANK == 0:
    with open(place + '.address', 'w') as file:
        file.write(os.environ['HORA_RENDEZVOUS'].removeprefix('tcp://'))
tell('ready')
with open(f'{place}.{RANK}', 'w') as steps:
    while not over:
        begin = time.monotonic()
        time.sleep(0.05)
        client.set(f'step/{step}/{RANK}', b'over' if os.path.exists(place + '.over') else b'')
        over = b''.join(client.multi_get([f'step/{step}/{rank}' for rank in (0, 1)]))
        steps.write(f'{begin} {time.monotonic() - begin}\\n')
        step += 1
        if step == 40:
            tell('measured')
assert client.get('weights') == b'precious'
client.close()
"""

STRANGER = """\
import os, socket, sys, time

os.nice(10)  # a stranger's computing is done on another machine
host, _, port = sys.argv[1].rpartition(":")
hello, *openings = [bytes.fromhex(word) for word in sys.argv[2:]]
heard = b""
print(time.monotonic(), flush=True)
for number in range(10_000):
    with socket.create_connection((host, int(port)), 10) as sock:
        try:
            if number % 50 == 0:
                sock.sendall(hello)
                heard += sock.recv(65536)
            sock.sendall(openings[number % len(openings)])
            if number % 500 == 0:
                sock.sendall(bytes(range(256)) * 4096)
            if number % 50 == 0:
                while data := sock.recv(65536):
                    heard += data
        except ConnectionError:
            pass
    if number % 100 == 0:
        time.sleep(0.02)  # so that it lasts for some steps
print(time.monotonic(), flush=True)
print(heard.hex())
"""


@needs_networks
def test_a_stranger_on_the_wire_gets_nothing(start: Start, network: Network, tmp_path: Path) -> None:
    """What else the machine has to do passes; what a stranger does to the steps would be there in each of three attacks."""
    for left in (2, 1, 0):
        place = tmp_path / str(left)
        place.mkdir()
        during, quiet = attacked(start, network, place)
        if statistics.median(during) < 1.05 * statistics.median(quiet):
            return
        assert left, (during, quiet)


def attacked(start: Start, network: Network, tmp_path: Path) -> tuple[list[float], list[float]]:
    """How long steps take during, and before and after, ten thousand connections from another host, megabytes of nonsense among them, while a job
    on two hosts makes steps that meet at the rendezvous.
    """
    job = start(STEPS, "-H", ",".join(network.v4), "--rsh", "ip netns exec", "-x", "STEPS", ranks=0, STEPS=str(tmp_path / "steps"))
    job.expect("ready", 2)
    address = (tmp_path / "steps.address").read_text()
    words = [opening.hex() for opening in (HELLO, *OPENINGS.values())]
    job.expect("measured", 2)
    with network.another_host() as stranger:
        command = ["ip", "netns", "exec", stranger, sys.executable, "-I", "-S", "-c", STRANGER, address, *words]
        attack = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    begin, end, heard = attack.stdout.split("\n")[:3]
    (tmp_path / "steps.over").touch()
    assert job.wait() == 0, job.err
    steps = [tuple(map(float, line.split())) for line in (tmp_path / "steps.0").read_text().splitlines()]
    quiet = [took for at, took in steps if not float(begin) <= at <= float(end)]
    during = [took for at, took in steps if float(begin) <= at <= float(end)]
    assert MAGIC in bytes.fromhex(heard), "nothing was said to it, so that it proves nothing"
    assert b"precious" not in bytes.fromhex(heard)
    assert len(during) >= 20
    return during, quiet


SECRETIVE = """\
from hora.rendezvous.key import read_key

assert os.environ['API_TOKEN'] == 'canary-of-the-user'
with open(os.environ['FOUND'] + str(RANK), 'wb') as found:
    found.write(read_key(os.environ['HORA_KEY_FILE']).hex().encode() + b'\\n')
    for number in filter(str.isdigit, os.listdir('/proc')):
        try:
            found.write(open(f'/proc/{number}/cmdline', 'rb').read())
        except OSError:
            pass  # gone
tell('ready')
while not os.path.exists(os.environ['FOUND']):
    time.sleep(0.01)
raise ValueError('so that there is a report')
"""


def test_secrets_of_a_job_stand_nowhere(start_on: StartOn, hosts: Hosts, tmp_path: Path) -> None:
    """Neither the job's key nor a variable that the user sends along; the key's own files aside, which are private."""
    logs, found = tmp_path / "logs", tmp_path / "found"
    environ = {"API_TOKEN": "canary-of-the-user", "FOUND": str(found)}
    names = [word for name in environ for word in ("-x", name)]
    job = start_on("localhost,beta", SECRETIVE, *names, "--verbose", "--log-dir", str(logs), **environ)
    job.expect("ready", 2)
    job_files = [path for place in (job.temporary, hosts.temporary) for path in place.rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_mode & 0o077 for path in job_files} == {"key": 0}
    assert {path.parent.stat().st_mode & 0o077 for path in job_files} == {0}
    found.touch()
    assert job.wait() == 1
    keys, lines = zip(*(Path(f"{found}{rank}").read_bytes().split(b"\n", 1) for rank in (0, 1)), strict=True)
    assert keys[0] == keys[1]
    assert b"hora.launch" in lines[0]
    written = [path.read_bytes() for place in (logs, job.state, hosts.home) for path in place.rglob("*") if path.is_file()]
    assert any(b"so that there is a report" in text for text in written)
    for secret in (keys[0], bytes.fromhex(keys[0].decode()), b"canary-of-the-user"):
        for text in (*lines, *written, job.out.encode(), job.err.encode()):
            assert secret not in text


def save_checkpoint(directory: Path, files: dict[str, bytes]) -> Path:
    """A whole checkpoint with what is given for its files."""
    storage, name = Storage(directory), CheckpointName(0, 7)
    with storage.write(name) as draft:
        for file, content in files.items():
            draft.add(file, [content])
        return storage.commit(draft, Manifest(1, "0", "0", name.step, 0, name.generation, 1, 1, None, "a machine", None, "", draft.files))


def take_lock(path: Path) -> None:
    with DirectoryLock(path.parent):
        pass


def write_metrics(path: Path) -> None:
    cut_metrics(path, 0)
    JsonLines(path).close()


def hang_report(path: Path) -> None:
    shown = Event()
    display = Display(Layout.even(1, 0, 1), path.parent, quiet=True, on_end=shown.set)
    display.keep("ours")
    display.finish()
    assert shown.wait(20)
    display.close()


def log_in(path: Path) -> None:
    with log_directory(path, "4f", within=True) as directory:
        RankLog(directory / "rank0.log")


WRITERS: dict[str, Callable[[Path], object]] = {
    "rank0.log": RankLog,
    "hang-report.txt": hang_report,
    "rank.0": lambda path: open_streams(path.parent, [0], 1),
    "restart-1": log_in,
    "metrics.jsonl": write_metrics,
    "metrics.jsonl of a new run": lambda path: JsonLines(path).close(),
    "config.yaml, rows and pictures": lambda path: replace_file(path, b"ours"),
    "fetched texts": lambda path: create_file(path, [b"ours"]),
    "lock": take_lock,
    "key": lambda path: write_key(path, bytes(32)),
    "step-00000007.g0": lambda path: save_checkpoint(path.parent, {"model.json": b"{}"}),
    ".tmp-step-00000007.g0-OWNER": lambda path: save_checkpoint(path.parent, {"model.json": b"{}"}),
}


@pytest.mark.parametrize("kind", ["file", "directory", "nothing"])
@pytest.mark.parametrize("name", WRITERS)
def test_planted_links_are_not_written_through(name: str, kind: str, tmp_path: Path) -> None:
    """Each name that can be foreseen: what the link leads to stays as it was, whether the writer refuses or puts its file in the link's place."""
    here, target = tmp_path / "here", tmp_path / "target"
    here.mkdir()
    if kind == "directory":
        target.mkdir()
    elif kind == "file":
        target.write_bytes(b'{"step": 0, "theirs": true}\n')
    before = target.read_bytes() if kind == "file" else None
    path = here / name.split(" ")[0].rstrip(",").replace("OWNER", Owner.current().token)
    path.symlink_to(target)
    with suppress(HoraError, OSError):
        WRITERS[name](path)
        assert not path.is_symlink(), "written without an error, but not into a file of its own"
    assert (target.is_dir(), target.is_file()) == (kind == "directory", kind == "file")
    assert list(target.iterdir()) == [] if kind == "directory" else True
    assert target.read_bytes() == before if kind == "file" else True


def read_all_metrics(path: Path) -> None:
    if rows := list(read_metrics(path)):
        raise AssertionError(rows)
    raise ConfigError("lines that are no JSON objects are left out")


READERS: dict[str, Callable[[Path], object]] = {
    "config.yaml": lambda path: resolve_config(str(path)),
    "hostfile": read_hostfile,
    "key": read_key,
    "metrics.jsonl": read_all_metrics,
    "algorithms.json": lambda path: parse_table(path.read_text(encoding="latin-1"), ["native"]),
    "weights.safetensors": read_tensors,
    "an object between processes": read_object,
    "a manifest": lambda path: Content.read(Path(shutil.copy(path, path.with_name("manifest.json"))).parent),
    "model.json of a checkpoint": lambda path: Content.read(
        save_checkpoint(path.parent, {"model.json": path.read_bytes(), "model.safetensors": EMPTY})
    ),
    "model.safetensors of a checkpoint": lambda path: Content.read(
        save_checkpoint(path.parent, {"model.json": b"{}", "model.safetensors": path.read_bytes()})
    ),
    "what an agent says": lambda path: list(wire.Decoder().feed(path.read_bytes())),
    "a message of an agent": lambda path: list(wire.Decoder().feed(b"M" + path.stat().st_size.to_bytes(4, "big") + path.read_bytes())),
    "a message between launchers": lambda path: from_wire(path.read_bytes()),
}
EMPTY = (2).to_bytes(8, "little") + b"{}"


class Bomb:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.proof,)


def test_pickles_are_refused_wherever_a_file_is_read(tmp_path: Path) -> None:
    """Also where digests are right: whoever writes a checkpoint can write those."""
    proof = tmp_path / "executed"
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        content = pickle.dumps(Bomb(proof), protocol)
        for number, (name, read) in enumerate(READERS.items()):
            path = tmp_path / f"{protocol}-{number}" / "file"
            path.parent.mkdir()
            path.write_bytes(content)
            path.chmod(0o600)
            with pytest.raises((HoraError, ValueError, SafetensorError)):
                read(path)
                raise AssertionError(f"{name} took a pickle")
            assert not proof.exists(), name
    pickle.loads(content)
    assert proof.exists(), "the bomb is a dud"


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system ['touch executed']\n", "a: !!python/name:os.system\n"])
def test_objects_in_yaml_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml:1:"):
        resolve_config("config.yaml")
    assert not (tmp_path / "executed").exists()
