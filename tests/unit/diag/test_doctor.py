"""`hora doctor`: what is planted is found, with a remedy; what is well is not talked about."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hora.cli.main import main
from hora.diag.doctor import gpus, machine, network, report, shared, software
from hora.diag.doctor.finding import Finding, examine


def grades(findings: Iterator[Finding]) -> dict[str, str]:
    found = list(findings)
    assert all(bool(finding.remedy) == (finding.grade != "ok") for finding in found)
    return {finding.name: finding.grade for finding in found}


def test_this_machine_can_be_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--shared-dir", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())
    assert {"hora", "torch", "cores", "memory", "interfaces", "ports", "shared directory"} <= {row["name"] for row in rows}
    assert all(row["name"] in shown and row["found"] in shown and row["remedy"] in shown for row in rows)
    assert not any("could not be looked at" in row["found"] for row in rows)


def test_what_is_wrong_gives_exit_code_1_and_json_on_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--shared-dir", str(tmp_path / "none"), "--json", "-"]) == 1
    *_, last = json.loads(capsys.readouterr().out)
    assert (last["name"], last["grade"]) == ("shared directory", "wrong")
    assert "none: No such file or directory" in last["found"]
    assert main(["doctor", "--json", str(tmp_path / "none" / "x.json")]) == 2


def test_a_look_that_fails_is_a_warning() -> None:
    def fail() -> Iterator[Finding]:
        yield from ()
        raise OSError("planted")

    assert [(finding.grade, finding.found) for finding in examine({"disk": fail})] == [
        ("warning", "could not be looked at: OSError: planted")
    ]


def test_little_memory_and_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**29, total=2**33))
    monkeypatch.setattr(machine, "count_memory_kills", lambda: 3)
    assert grades(machine.memory()) == {"memory": "warning", "killed for memory": "warning"}
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    assert grades(machine.open_files()) == {"open files": "warning"}


def test_small_or_missing_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grades(machine.shared_memory(tmp_path / "none")) == {"/dev/shm": "warning"}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**20, total=2**26))
    assert grades(machine.shared_memory(tmp_path)) == {"/dev/shm": "warning"}
    assert grades(machine.directories()) == {"state directory": "warning", "temporary directory": "warning"}


def test_directories_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HORA_STATE_DIR", str(tmp_path / "file"))
    assert grades(machine.directories())["state directory"] == "wrong"


def test_too_many_threads_and_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert grades(machine.cores())["threads"] == "warning"
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert grades(software.environment()) == {"variables of a launcher": "warning"}


def test_an_old_torch_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.9.1+cu128")
    assert grades(software.versions())["torch"] == "wrong"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hora.comm.backends.shm.build.load_kernel", lambda: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    (found,) = software.kernel()
    assert (found.grade, "no C compiler" in found.found) == ("warning", True)


@pytest.mark.parametrize(("address", "grade"), [("127.0.1.1", "warning"), ("192.0.2.7", "ok")])
def test_what_the_host_is_called(address: str, grade: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (address, 0))])
    assert grades(network.names()) == {"host name": grade}


def test_a_host_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert grades(network.names()) == {"host name": "warning"}


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth77")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert grades(network.interfaces()) == {"interfaces": "ok", "NCCL_SOCKET_IFNAME": "wrong"}


@pytest.mark.parametrize(("handed_out", "grade"), [("32768\t60999", "ok"), ("40000\t40100", "warning"), (None, "ok")])
def test_ports(handed_out: str | None, grade: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if handed_out is not None:
        (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
        (tmp_path / "proc/sys/net/ipv4/ip_local_port_range").write_text(handed_out)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(network, "DEFAULT_PORT", taken.getsockname()[1])
        (found,) = network.ports(tmp_path)
        assert (found.grade, "Address already in use" in found.found, "--master-port" in found.remedy) == ("warning", True, True)
    assert grades(network.ports(tmp_path)) == {"ports": grade}


@pytest.mark.parametrize(("address", "found"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_program_that_strangers_can_reach(address: str, found: bool) -> None:
    body = (
        f"import socket\nprint((s := socket.create_server(({address!r}, 0))).getsockname()[1], flush=True)\nimport signal; signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().strip()
        try:
            said = " ".join(finding.found for finding in network.listeners())
        finally:
            listening.kill()
    assert (f"({listening.pid}) on 0.0.0.0:{port}" in said) is found


def test_gpus_that_this_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert grades(gpus.gpus()) == {"GPUs": "wrong"}


def test_different_gpus_in_use_and_without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda index: f"GPU {index}",
        "mem_get_info": lambda _: (2**30, 2**36), "can_device_access_peer": lambda *_: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.setattr("hora.comm.torch_private.nvlinks_of", lambda _: [0, 0])
    assert grades(gpus.gpus()) == {"GPUs": "warning", "memory of GPUs": "warning", "links between GPUs": "warning"}


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(stdout="580.1, Prohibited, 0\n580.1, Default, 7\n")
    monkeypatch.setattr("shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: answer)
    assert grades(gpus.driver()) == {"driver": "ok", "compute mode": "wrong", "memory errors": "wrong"}


def test_a_directory_that_loses_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grades(shared.shared_directory(tmp_path)) == {"shared directory": "ok"}
    monkeypatch.setattr("os.listdir", lambda _: [])
    assert grades(shared.shared_directory(tmp_path)) == {"shared directory": "wrong"}
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (finding,) = shared.shared_directory(tmp_path / "file")
    assert (finding.grade, finding.found) == ("wrong", f"{tmp_path / 'file'}: Not a directory")
    assert (tmp_path / "file").read_text() == "kept"


def test_lines_have_their_remedies_below() -> None:
    findings = [Finding("cores", "ok", "2"), Finding("memory", "wrong", "none", "buy some")]
    assert report.as_lines(findings) == ["ok       cores   2", "WRONG    memory  none", "                 -> buy some"]
    assert (report.conclusion(findings), report.conclusion(findings[:1])) == ("1 wrong, 0 to be looked at", "nothing is in the way")
