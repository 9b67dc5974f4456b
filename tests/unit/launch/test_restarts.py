"""When a job is started anew, and on what; the launcher around it is in tests/faults."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hora.errors import ConfigError, LaunchError
from hora.launch.host_scout import HostScout
from hora.launch.hosts import Host
from hora.launch.job_events import FailureSeen, Finish, NodeLost, SaveSeen, Shared, StopAsked
from hora.launch.options import LaunchOptions
from hora.launch.restarts import run_with_restarts
from hora.launch.scout import Scout
from hora.launch.unusable import HostsRefused, HostsUnusable

HOSTS = (Host("alpha", 2), Host("beta", 3), Host("gamma", 3))


def start(options: LaunchOptions, run: Callable[[LaunchOptions], Finish]) -> int:
    return run_with_restarts(options, run, HostScout(options) if options.min_ranks or options.elastic else Scout())


def failed(code: int = 1) -> Finish:
    return Finish(code, FailureSeen(0, 1, code))


def runs(*ends: Finish) -> tuple[Callable[[LaunchOptions], Finish], list[LaunchOptions]]:
    """Jobs that end like this, one after the other, and what they were asked for."""
    left, asked = list(ends), []

    def run(options: LaunchOptions) -> Finish:
        asked.append(options)
        return left.pop(0)

    return run, asked


def test_a_job_that_fails_is_started_anew_until_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    run, asked = runs(failed(), Finish(137, FailureSeen(0, 0, -9)), Finish(0, None))
    assert start(LaunchOptions("t.py", max_restarts=5, log_dir=Path("logs")), run) == 0
    assert [options.generation for options in asked] == [0, 1, 2]
    assert [options.log_dir for options in asked] == [Path("logs"), Path("logs/restart-1"), Path("logs/restart-2")]
    assert "restart 1 of at most 5" in capsys.readouterr().err


def test_the_budget_is_one_for_the_whole_job() -> None:
    run, asked = runs(failed(1), failed(2), failed(3), failed(4))
    assert start(LaunchOptions("t.py", max_restarts=1), runs(failed(5), failed(7))[0]) == 7
    assert start(LaunchOptions("t.py"), run) == 1
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, None),
        (75, SaveSeen(0, 1)),
        (75, StopAsked(0, signal.SIGTERM)),
        (130, StopAsked(0, signal.SIGINT)),
        (130, None),
    ],
)
def test_an_end_that_was_asked_for_is_the_end(code: int, cause: Shared | None) -> None:
    run, asked = runs(Finish(code, cause))
    assert start(LaunchOptions("t.py", max_restarts=5), run) == code
    assert len(asked) == 1


@pytest.mark.parametrize("cause", [SaveSeen(0, 1), StopAsked(0, signal.SIGTERM)])
def test_a_save_that_is_gone_with_the_job_is_none(cause: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = runs(Finish(75, cause, fleeting=True))
    assert start(LaunchOptions("t.py", max_restarts=5), run) == 143
    assert "the exit code is 143, and not 75. Let HORA_HVD_COMMIT_DIR name a directory" in capsys.readouterr().err


def test_a_save_that_the_next_start_finds_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    saved = Finish(75, SaveSeen(0, 1), regroup=True, fleeting=True)
    run, asked = runs(saved, Finish(0, None))
    assert start(LaunchOptions("t.py", max_restarts=5), run) == 0
    assert len(asked) == 2
    assert "HORA_HVD_COMMIT_DIR" not in capsys.readouterr().err


def test_an_end_that_would_come_again_is_the_end_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run, asked = runs(failed(2))
    assert start(LaunchOptions("t.py", max_restarts=5), run) == 2
    assert len(asked) == 1
    assert "not started anew: exit code 2 says that it would end in the same way" in capsys.readouterr().err


def test_an_end_that_is_asked_for_while_a_failure_is_dealt_with_counts() -> None:
    run, asked = runs(Finish(3, FailureSeen(0, 1, 3), asked=True))
    assert start(LaunchOptions("t.py", max_restarts=5), run) == 3
    assert len(asked) == 1


def test_all_generations_have_one_name() -> None:
    run, asked = runs(failed(), failed(), Finish(0, None))
    start(LaunchOptions("t.py", max_restarts=5), run)
    assert len({options.job_id for options in asked}) == 1
    assert asked[0].job_id


@pytest.mark.parametrize("restarts", [0, 1])
def test_notices_between_generations_do_not_end_the_launcher(restarts: int) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def run(options: LaunchOptions) -> Finish:
        assert (signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL) is (restarts == 0)
        return Finish(0, None)

    start(LaunchOptions("t.py", max_restarts=restarts), run)
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_who_asks_for_the_end_between_generations_leaves_nothing(signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    starts = []

    def run(options: LaunchOptions) -> Finish:
        starts.append(options)
        signal.raise_signal(signum)
        return Finish(1, FailureSeen(0, 0, 1))

    before = signal.signal(signum, signal.SIG_DFL)
    try:
        assert run_with_restarts(LaunchOptions("train.py", max_restarts=3), run, Scout()) == 143
        assert signal.getsignal(signum) is signal.SIG_DFL
    finally:
        signal.signal(signum, before)
    assert len(starts) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_killed_would_be_in_the_way() -> None:
    run, _ = runs(Finish(1, FailureSeen(0, 1, 1), frozenset({1})))
    assert start(LaunchOptions("t.py", max_restarts=5), run) == 1


def test_a_lost_host_is_left_out_if_enough_ranks_remain(capsys: pytest.CaptureFixture[str]) -> None:
    run, asked = runs(Finish(1, NodeLost(1)), failed(), Finish(1, NodeLost(0)), failed(9))
    assert start(LaunchOptions("t.py", hosts=HOSTS, nproc=7, max_restarts=5, min_ranks=4), run) == 1
    assert [(tuple(host.name for host in options.hosts), options.nproc) for options in asked] == [
        (("alpha", "beta", "gamma"), 7),
        (("alpha", "gamma"), 5),
        (("alpha", "gamma"), 5),
    ]
    said = capsys.readouterr().err
    assert "with 5 ranks on 2 hosts: restart 1 of at most 5" in said
    assert "not started anew: fewer than --min-ranks 4 are left" in said


def test_without_min_ranks_a_lost_host_is_tried_again() -> None:
    run, asked = runs(Finish(1, NodeLost(1)), Finish(0, None))
    assert start(LaunchOptions("t.py", hosts=HOSTS, max_restarts=1), run) == 0
    assert asked[1].hosts == HOSTS


def unusable_at(
    generation: int, kind: type[HostsUnusable | HostsRefused], *nodes: int
) -> tuple[Callable[..., Finish], list[LaunchOptions]]:
    """A job whose ranks fail until `generation`, when these hosts do not answer, and which ends well without them."""
    asked = []

    def run(options: LaunchOptions) -> Finish:
        asked.append(options)
        if options.generation < generation:
            return failed()
        if len(options.hosts) == len(HOSTS):
            raise kind("beta did not answer", nodes)
        return Finish(0, None)

    return run, asked


@pytest.mark.parametrize("kind", [HostsUnusable, HostsRefused])
def test_hosts_that_do_not_answer_at_a_restart_are_left_out(kind: type[HostsUnusable], capsys: pytest.CaptureFixture[str]) -> None:
    run, asked = unusable_at(1, kind, 1)
    assert start(LaunchOptions("t.py", hosts=HOSTS, max_restarts=1, min_ranks=5), run) == 0
    assert [(options.generation, [host.name for host in options.hosts], options.nproc) for options in asked] == [
        (0, ["alpha", "beta", "gamma"], None),
        (1, ["alpha", "beta", "gamma"], None),
        (1, ["alpha", "gamma"], 5),
    ]
    assert "beta did not answer\n      left out: the job goes on with 5 ranks on 2 hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("generation", "fewest", "nodes"),
    [
        pytest.param(0, 1, (1,), id="at the first start"),
        pytest.param(1, None, (1,), id="all needed"),
        pytest.param(1, 5, (0, 1), id="too few"),
    ],
)
def test_hosts_that_are_needed_end_the_job(generation: int, fewest: int | None, nodes: tuple[int, ...]) -> None:
    run, _ = unusable_at(generation, HostsUnusable, *nodes)
    with pytest.raises(HostsUnusable, match="beta did not answer"):
        start(LaunchOptions("t.py", hosts=HOSTS, max_restarts=1, min_ranks=fewest), run)


@pytest.mark.parametrize(("nproc", "per_node", "left"), [(None, "2", 4), (7, None, 6), (None, None, 2)])
def test_hosts_without_slots_have_their_share(nproc: int | None, per_node: str | None, left: int) -> None:
    hosts = tuple(Host(host.name) for host in HOSTS)
    run, asked = runs(Finish(1, NodeLost(2)), Finish(0, None))
    start(LaunchOptions("t.py", hosts=hosts, nproc=nproc, nproc_per_node=per_node, max_restarts=1, min_ranks=1), run)
    assert (asked[1].nproc, asked[1].nproc_per_node) == (left, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "--max-restarts must be 0 or more, but is -1"),
        ({"max_restarts": 1, "num_nodes": 2}, "--max-restarts is for jobs that one command starts"),
        ({"min_ranks": 0, "hosts": HOSTS, "max_restarts": 1}, "--min-ranks must be at least 1"),
        ({"min_ranks": 1, "max_restarts": 1}, "needs -H and --max-restarts"),
        ({"min_ranks": 1, "hosts": HOSTS, "max_restarts": 1, "nproc_per_node": "auto"}, "need to know the slots of a host"),
        ({"max_ranks": 2, "hosts": HOSTS, "min_ranks": 1, "nproc_per_node": "gpu"}, "need to know the slots of a host"),
        ({"max_ranks": 2, "min_ranks": 1}, "--max-ranks says how many hosts are taken in, so it needs -H or --host-discovery"),
        ({"max_ranks": 2, "hosts": HOSTS}, "need to know how few ranks will do"),
        ({"max_ranks": 2, "min_ranks": 3, "hosts": HOSTS}, "no more of --min-ranks .or -np. than of --max-ranks, but it is 3 and 2"),
        ({"max_ranks": 0, "min_ranks": 1, "hosts": HOSTS}, "--max-ranks must be at least 1"),
        ({"nproc": 3, "min_ranks": 1, "max_ranks": 2, "hosts": HOSTS}, "-np must lie between"),
        ({"host_discovery": ("ask",), "min_ranks": 1, "mpi": True}, "--mpi is for one node"),
        ({"host_discovery": ("ask",), "min_ranks": 1, "max_ranks": 16, "logical_ranks": 8}, "no more ranks than logical ones"),
        ({"host_discovery": ("ask",), "min_ranks": 1, "max_restarts": 1, "warm_spares": True}, "--warm-spares"),
        ({"hosts": HOSTS, "max_restarts": 1, "warm_spares": True}, "--warm-spares"),
        ({"discovery_interval_s": 0.0}, "--discovery-interval must be more than 0"),
        ({"min_ranks": 1, "hosts": HOSTS}, "needs -H and --max-restarts"),
    ],
)
def test_words_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions("t.py", **options)  # type: ignore[arg-type]


# Where hosts come and go.


def elastic(**others: Any) -> LaunchOptions:
    return LaunchOptions("t.py", **{"hosts": HOSTS, "min_ranks": 4, "max_ranks": 7, "join_timeout_s": 0.01} | others)


def saved(*, regroup: bool = True, asked: bool = False) -> Finish:
    return Finish(75, SaveSeen(0, 1), regroup=regroup, asked=asked, logs="there")


def test_a_save_that_the_launcher_asked_for_is_followed_by_a_start_that_costs_none(capsys: pytest.CaptureFixture[str]) -> None:
    run, asked = runs(saved(), saved(), Finish(0, None))
    assert start(elastic(log_dir=Path("logs")), run) == 0
    assert [(options.generation, options.nproc, options.log_dir) for options in asked] == [
        (0, 7, Path("logs")),
        (1, 7, Path("logs/restart-1")),
        (2, 7, Path("logs/restart-2")),
    ]
    assert "with 7 ranks on 3 hosts: after a save, which uses up no restart; the logs so far are in there" in capsys.readouterr().err


def test_saves_use_up_none_of_the_budget() -> None:
    run, asked = runs(saved(), failed(), saved(), failed(9))
    assert start(elastic(max_restarts=1), run) == 9
    assert [options.generation for options in asked] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "end", [saved(regroup=False), saved(asked=True), Finish(75, StopAsked(0, signal.SIGTERM), regroup=True, asked=True)]
)
def test_a_save_that_somebody_else_asked_for_is_the_end(end: Finish) -> None:
    run, asked = runs(end)
    assert start(elastic(), run) == 75
    assert len(asked) == 1


def test_a_lost_host_is_left_out_for_the_time_being() -> None:
    run, asked = runs(Finish(1, NodeLost(1)), Finish(0, None))
    assert start(elastic(max_restarts=1), run) == 0
    assert [[(host.name, host.slots) for host in options.hosts] for options in asked] == [
        [("alpha", 2), ("beta", 3), ("gamma", 2)],
        [("alpha", 2), ("gamma", 3)],
    ]


@pytest.mark.parametrize(("code", "restarts", "starts"), [(75, 0, 2), (143, 1, 2), (143, 0, 1)])
def test_a_host_whose_agent_is_told_to_end_is_left_out(code: int, restarts: int, starts: int) -> None:
    """Where all have saved, that costs no restart either."""
    run, asked = runs(Finish(code, StopAsked(2, signal.SIGTERM)), Finish(0, None))
    assert start(elastic(max_restarts=restarts), run) == (0 if starts == 2 else code)
    assert len(asked) == starts
    assert [host.name for host in asked[-1].hosts] == ["alpha", "beta", "gamma"][: 4 - starts]


def test_without_max_ranks_an_agent_that_is_told_to_end_ends_the_job() -> None:
    run, asked = runs(Finish(75, StopAsked(2, signal.SIGTERM)))
    assert start(LaunchOptions("t.py", hosts=HOSTS, min_ranks=1, max_restarts=3), run) == 75
    assert len(asked) == 1


def test_hosts_that_cannot_be_reached_at_the_first_start_are_left_out() -> None:
    run, asked = unusable_at(0, HostsUnusable, 1)
    assert start(elastic(), run) == 0
    assert [(options.generation, [host.name for host in options.hosts], options.nproc) for options in asked] == [
        (0, ["alpha", "beta", "gamma"], 7),
        (0, ["alpha", "gamma"], 5),
    ]


def test_what_hosts_refuse_at_the_first_start_is_an_error() -> None:
    run, _ = unusable_at(0, HostsRefused, 1)
    with pytest.raises(HostsRefused, match="beta did not answer"):
        start(elastic(), run)


def test_too_few_hosts_end_the_job_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = runs(Finish(1, NodeLost(1)))
    assert start(elastic(max_restarts=1, min_ranks=6), run) == 1
    assert "there are hosts for fewer than --min-ranks 6: waits up to 0.01 s for others" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="there must be slots for --min-ranks 9 on hosts that can be used"):
        start(elastic(min_ranks=9, max_ranks=9), run)
