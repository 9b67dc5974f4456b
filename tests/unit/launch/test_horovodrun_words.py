"""The words of horovodrun: what they come to, and lines of `horarun` as a whole, up to where the ranks would be started."""

import re
from pathlib import Path

import pytest
import yaml

import hora.launch.job
from hora.cli.horarun import command as horarun
from hora.errors import ConfigError
from hora.launch.command import command as hora_run
from hora.launch.console import run_command
from hora.launch.horovodrun_config import read_config
from hora.launch.horovodrun_words import WORDS, read_command, understand
from hora.launch.hosts import Host
from hora.launch.options import LaunchOptions

TUNING = {
    "fusion_threshold_mb": 64.0,
    "cycle_time_ms": 3.5,
    "cache_capacity": 0,
    "timeline_filename": "t.json",
    "timeline_mark_cycles": True,
    "stall_check": False,
    "stall_check_warning_time_seconds": 5.0,
    "stall_check_shutdown_time_seconds": 0.0,
    "log_level": "DEBUG",
    "gloo_timeout_seconds": 77,
    "tcp": True,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    options: list[LaunchOptions] = []

    def launch(given: LaunchOptions) -> int:
        options.append(given)
        return 7

    monkeypatch.setattr(hora.launch.job, "launch", launch)
    monkeypatch.delenv("HOROVOD_START_TIMEOUT", raising=False)
    return options


def test_settings_become_variables() -> None:
    assert understand(TUNING, {}, others=False).variables == {
        "HOROVOD_FUSION_THRESHOLD": str(64 * 2**20),
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HORA_TIMEOUT_S": "77",
        "NCCL_IB_DISABLE": "1",
    }


def test_nothing_is_asked_for_by_nothing() -> None:
    understood = understand({}, {}, others=True)
    assert (understood.variables, understood.options, understood.remarks) == ({}, {}, ())


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"ssh_port": 2222}, {"rsh": "ssh -p 2222"}),
        ({"ssh_port": 2222, "ssh_identity_file": "my key"}, {"rsh": "ssh -p 2222 -i 'my key'"}),
        ({"network_interfaces": ("eth0,eth1", "eth2")}, {"interface": "eth0"}),
        ({"start_timeout": 40, "elastic_timeout": 90}, {"join_timeout_s": 90.0}),
        ({"slots_per_host": 2}, {"nproc_per_node": "2"}),
        ({"reset_limit": 3}, {"max_restarts": 3}),
        ({"min_np": 2, "max_np": 4, "reset_limit": 0}, {"min_ranks": 2, "max_ranks": 4, "max_restarts": 0}),
        ({"min_np": 2, "host_discovery_script": "./hosts.sh"}, {"min_ranks": 2, "host_discovery": "./hosts.sh", "max_restarts": 1000}),
    ],
)
def test_what_hora_run_can_do_is_said_in_its_words(given: dict[str, object], options: dict[str, object]) -> None:
    assert understand(given, {}, others=True).options == options


def test_the_variable_for_the_start_is_heard_where_the_option_is_not_given() -> None:
    assert understand({}, {"HOROVOD_START_TIMEOUT": "55"}, others=False).options == {"join_timeout_s": 55.0}
    assert understand({}, {"HOROVOD_START_TIMEOUT": ""}, others=False).options == {}
    assert understand({"start_timeout": 5}, {"HOROVOD_START_TIMEOUT": "soon"}, others=False).options == {"join_timeout_s": 5.0}
    with pytest.raises(ConfigError, match="HOROVOD_START_TIMEOUT must be a number of seconds, but is 'soon'"):
        understand({}, {"HOROVOD_START_TIMEOUT": "soon"}, others=False)


def test_no_word_is_passed_over_in_silence() -> None:
    """Each word becomes a variable or an option, is remarked on, or is refused; what is done anyway is named here."""
    done_anyway = {"gloo", "log_without_timestamp", "config_file"}  # the file is read before
    refused = {"jsrun", "mpi_args", "binding_args"}  # see below
    values = {"switch": True, "count": 3, "number": 3.0, "text": "x", "pair": (1, 2)}
    for word in WORDS:
        if word.name in refused:
            continue
        value = False if word.name == "stall_check" else "INFO" if word.name == "log_level" else values[word.kind]
        understood = understand({word.name: (value,) if word.multiple else value}, {}, others=False)
        heard = bool(understood.variables or understood.options or understood.remarks)
        assert heard == (word.name not in done_anyway), word.name


def test_what_is_switched_off_and_not_there_needs_no_word() -> None:
    assert understand({"hierarchical_allreduce": False, "autotune": False}, {}, others=False).remarks == ()


def test_what_has_one_reason_is_one_remark() -> None:
    remarks = understand({"autotune": True, "autotune_log_file": "a", "torus_allreduce": True}, {}, others=False).remarks
    assert len(remarks) == 1
    assert remarks[0].startswith("--autotune, --autotune-log-file, --torus-allreduce: accepted, and without effect")


def test_all_that_is_refused_is_answered_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"--jsrun: .*; --mpi-args: .*; --binding-args: .*--bind core`; --log-level must be one of TRACE, "
    ):
        understand({"jsrun": True, "mpi_args": "-x A", "binding_args": "y", "log_level": "debug"}, {}, others=False)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("python train.py --lr 1", ("script", "train.py", ("--lr", "1"))),
        ("python3 -u train.py", ("script", "train.py", ())),
        ("python -m package.train -u", ("module", "package.train", ("-u",))),
        ("train.py a", ("script", "train.py", ("a",))),
        ("python -c pass", ("program", "python", ("-c", "pass"))),
        ("python -W ignore train.py", ("program", "python", ("-W", "ignore", "train.py"))),
        ("python", ("program", "python", ())),
        ("bash -c ls", ("program", "bash", ("-c", "ls"))),
    ],
)
def test_commands_are_read(line: str, read: tuple[str, str, tuple[str, ...]]) -> None:
    assert read_command(line.split()) == read


def test_line_of_the_manual_is_understood(asked: list[LaunchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("# ours\n10.0.0.1 slots=2\n\n10.0.0.2 slots=3  # new\n")
    line = (
        f"-np 4 --hostfile {tmp_path}/hosts -p 2222 --start-timeout 60 --network-interfaces lo,eth7 --output-filename out --verbose "
        "--disable-cache --timeline-filename t.json --cycle-time-ms 5 --gloo python train.py --np 3"
    )
    assert run_command(horarun, line.split(), name="horarun") == 7
    [options] = asked
    assert (options.nproc, options.hosts) == (4, (Host("10.0.0.1", 2), Host("10.0.0.2", 3)))
    assert (options.rsh, options.join_timeout_s, options.interface) == ("ssh -p 2222", 60.0, "lo")
    assert (options.kind, options.target, options.args) == ("script", "train.py", ("--np", "3"))
    assert (options.output_dir, options.verbose, options.max_restarts) == (Path("out"), True, 0)
    told = {name: options.exports[name] for name in ("HORA_HOROVOD", "HOROVOD_TIMELINE", "HOROVOD_CYCLE_TIME", "GLOO_SOCKET_IFNAME")}
    assert list(told.values()) == ["1", "t.json", "5", "lo"]
    said = capsys.readouterr().err
    assert said.count("hora: ") == 2
    assert "--disable-cache: accepted, and without effect" in said
    assert "use lo, the first of --network-interfaces" in said


def test_hora_run_understands_the_same_words(asked: list[LaunchOptions]) -> None:
    line = "--horovod --num-proc 2 --hosts localhost:2 --fusion-threshold-mb 1 -x HOROVOD_FUSION_THRESHOLD=5 --max-restarts 2 train.py"
    assert run_command(hora_run, line.split(), name="hora run") == 7
    assert (asked[0].nproc, asked[0].hosts, asked[0].max_restarts) == (2, (Host("localhost", 2),), 2)
    assert asked[0].exports == {"HORA_HOROVOD": "1", "HOROVOD_FUSION_THRESHOLD": "5"}


@pytest.mark.parametrize(
    ("program", "line", "answer"),
    [
        (horarun, "python train.py", "Missing option '-np'"),
        (horarun, "-np 2", "Missing argument 'COMMAND...'"),
        (horarun, "-np 0 python train.py", "0 is not in the range"),
        (horarun, "-np 2 --gloo --mpi python train.py", "--gloo and --mpi contradict each other"),
        (horarun, "-np 2 --cycle-time-ms -1 python train.py", "is not in the range x>=0"),
        (horarun, "-np 2 --no-such-word python train.py", "No such option"),
        (horarun, "-np 2 --jsrun python train.py", "ranks are not started through LSF's jsrun"),
        (hora_run, "--cycle-time-ms 5 train.py", "--cycle-time-ms: this is horovodrun's, and goes with --horovod"),
        (hora_run, "--horovod --reset-limit 2 --max-restarts 2 train.py", "--max-restarts and --reset-limit say the same; give one"),
        (hora_run, "--horovod -H a:1 --rsh ssh -p 3 train.py", "--rsh and --ssh-port say the same"),
        (horarun, "-np 2 --fusion-threshold-mb inf python train.py", "--fusion-threshold-mb must be a finite number, but is inf"),
        (horarun, "-np 2 --cycle-time-ms nan python train.py", "--cycle-time-ms must be a finite number, but is nan"),
        (horarun, "-np 2 --gloo-timeout-seconds 0 python train.py", "--gloo-timeout-seconds must be at least 1"),
        (horarun, "-np 2 -p 99999 python train.py", "--ssh-port must be at most 65535, but is 99999"),
        (horarun, "-np 2 --min-np 3 --max-np 1 python train.py", "--min-np must be at most --max-np, but they are 3 and 1"),
        (horarun, "-np 2 --timeline-filename /proc/none/x.json python train.py", "--timeline-filename cannot write /proc/none/x.json"),
        (horarun, "-np 2 --config-file /dev/zero python train.py", "--config-file /dev/zero cannot be read: it must be a file"),
        (horarun, "-np 2 --config-file nonesuch.yaml python train.py", "--config-file nonesuch.yaml cannot be read: No such file"),
    ],
)
def test_mistakes_are_refused(asked: list[LaunchOptions], capsys: pytest.CaptureFixture[str], program, line: str, answer: str) -> None:
    assert run_command(program, line.split(), name="horarun") == 2
    assert answer in capsys.readouterr().err
    assert not asked


def test_on_one_machine_elastic_jobs_are_started_anew_whole() -> None:
    understood = understand({"min_np": 1, "max_np": 4}, {}, others=False)
    assert understood.options == {"max_restarts": 1000}
    assert understood.remarks[0].startswith("--min-np, --max-np: accepted, and without effect; all ranks are on this machine, and when one")


def test_elastic_words_are_those_of_hosts_that_come_and_go(asked: list[LaunchOptions]) -> None:
    line = "-np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh --slots-per-host 2 --elastic-timeout 99 python train.py"
    assert run_command(horarun, line.split(), name="horarun") == 7
    options = asked[0]
    assert (options.nproc, options.min_ranks, options.max_ranks, options.nproc_per_node) == (2, 1, 4, "2")
    assert [Path(word).name for word in options.host_discovery] == ["hosts.sh"]
    assert (options.max_restarts, options.join_timeout_s) == (1000, 99.0)
    assert options.exports["HOROVOD_ELASTIC"] == "1"


def test_ssh_without_hosts_is_remarked_on(asked: list[LaunchOptions], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(horarun, ["-np", "2", "-p", "12345", "./train.sh"], name="horarun") == 7
    assert (asked[0].rsh, asked[0].kind) == (None, "program")
    assert "--ssh-port: accepted, and without effect; all ranks are on this machine" in capsys.readouterr().err


CONFIG = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 5, cache_capacity: 2048, hierarchical_allreduce: true}
autotune: {enabled: true, log_file: log.csv}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
library_options: {gloo_timeout_seconds: 9}
logging: {level: INFO}
"""


def test_the_configuration_file_gives_words(asked: list[LaunchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    line = f"-np 2 --cycle-time-ms 7 --config-file {tmp_path}/c.yaml --no-timeline-mark-cycles python train.py"
    assert run_command(horarun, line.split(), name="horarun") == 7
    told = {name.removeprefix("HOROVOD_"): value for name, value in asked[0].exports.items()}
    assert told == {
        "HORA_HOROVOD": "1",
        "FUSION_THRESHOLD": str(32 * 2**20),
        "CYCLE_TIME": "7",
        "CACHE_CAPACITY": "2048",
        "TIMELINE": "t.json",
        "TIMELINE_MARK_CYCLES": "0",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "120",
        "LOG_LEVEL": "INFO",
        "HORA_TIMEOUT_S": "9",
    }
    assert "--autotune, --autotune-log-file, --hierarchical-allreduce: accepted" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "mpi"), [([], True), (["--gloo"], False), (["--mpi"], True)])
def test_a_file_may_ask_for_mpi(asked: list[LaunchOptions], tmp_path: Path, words: list[str], mpi: bool) -> None:
    (tmp_path / "c.yaml").write_text("controller: MPI\nparams:\n")
    assert run_command(horarun, ["-np", "2", *words, "--config-file", f"{tmp_path}/c.yaml", "python", "train.py"], name="horarun") == 7
    assert asked[0].mpi is mpi


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ({"parms": {"cycle_time_ms": 5}}, "parms is not known; did you mean params?"),
        ({"params": {"cycle_time": 5}}, "params.cycle_time is not known; did you mean params.cycle_time_ms?"),
        ({"params": 5}, "params, with 5 in the place of keys, is not known"),
        ({"params": {"cycle_time_ms": float("inf")}}, "params.cycle_time_ms must be a number from 0, but is inf"),
        (
            {"params": {"cycle_time_ms": "5"}, "stall_check": {"enabled": 1}},
            "number from 0, but is '5' instead; stall_check.enabled must be true",
        ),
        ({"params": {"cache_capacity": 1.5}}, "must be a whole number from 0, but is 1.5"),
        ({"controller": "jsrun"}, "controller must be gloo or mpi, but is 'jsrun'"),
        (["params"], "must hold sections such as `params:`, but holds list"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, content: object, answer: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=re.escape(answer)):
        read_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a: &a [1, 1]\nparams: {cycle_time_ms: *a}", "aliases are not allowed"),
        ("params: {cycle_time_ms: " + 5000 * "[", "nest deeper than"),
        ("#" * 2**21, "must not exceed 1048576 bytes"),
    ],
)
def test_a_file_that_is_made_to_do_harm_is_refused(tmp_path: Path, text: str, answer: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(answer)):
        read_config(tmp_path / "c.yaml")


def test_what_there_is_has_horovods_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(horarun, ["--check-build"], name="horarun") == 0
    shown = capsys.readouterr().out
    assert re.match(r"Horovod v0\.28\.1 \(hora .*\):\n\nAvailable Frameworks:\n    \[ \] TensorFlow\n    \[X\] PyTorch\n", shown)
    assert re.search(
        r"Available Controllers:\n    \[[X ]\] MPI\n    \[X\] Gloo\n\nAvailable Tensor Operations:\n    \[[X ]\] NCCL\n", shown
    )
    assert run_command(horarun, ["-v"], name="horarun") == 0
    assert capsys.readouterr().out.startswith("0.28.1 (hora ")
