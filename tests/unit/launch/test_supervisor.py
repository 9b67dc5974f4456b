"""The supervisor without processes: events and times in, actions out."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.launch.job_events import (
    HANG_EXIT_CODE,
    Action,
    AskToSave,
    Event,
    FailureSeen,
    Finish,
    HangFound,
    NodeDone,
    NodeLost,
    Publish,
    RankDoomed,
    RankEnded,
    RegroupWanted,
    SaveAsked,
    SaveSeen,
    Shared,
    SignalArrived,
    SignalRanks,
    StartRanks,
    StopAsked,
    TellRanks,
)
from hora.launch.supervisor import Patience, Supervisor

PATIENCE = Patience(grace_s=30.0, suspicion_s=0.2, leaving_s=5.0, terminate_s=0.3, kill_s=10.0)
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


@dataclass
class Node:
    """A supervisor on a clock of the test's. What it publishes comes straight back, unless the test keeps it for later."""

    ranks: Sequence[int] = (0, 1, 2)
    node_rank: int = 0
    num_nodes: int = 1
    now: float = 100.0
    echo: bool = True
    done: list[Action] = field(default_factory=list)
    published: list[Shared] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.ranks, node_rank=self.node_rank, num_nodes=self.num_nodes, patience=PATIENCE)

    def see(self, *events: Event) -> list[Action]:
        """Hands events in; returns the actions other than Publish."""
        begin = len(self.done)
        for event in events:
            self._take(self.supervisor.handle(event, self.now))
        return self.done[begin:]

    def pass_time(self, seconds: float) -> list[Action]:
        """Lets time pass, stopping at each deadline."""
        begin, end = len(self.done), self.now + seconds
        while (deadline := self.supervisor.deadline) is not None and deadline <= end and not self.finished:
            self.now = deadline
            self._take(self.supervisor.tick(self.now))
        self.now = end
        return self.done[begin:]

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, Publish):
                self.done.append(action)
                continue
            self.published.append(action.event)
            if self.echo:
                self._take(self.supervisor.handle(action.event, self.now))

    @property
    def finished(self) -> bool:
        return any(isinstance(action, Finish) for action in self.done)

    @property
    def exit_code(self) -> int:
        return next(action.exit_code for action in self.done if isinstance(action, Finish))

    @property
    def blamed(self) -> int | None:
        cause = next(action.cause for action in self.done if isinstance(action, Finish))
        return cause.rank if isinstance(cause, FailureSeen) else None


def test_it_starts_the_first_generation() -> None:
    assert Node().supervisor.start() == [StartRanks()]


def test_a_job_ends_well_when_all_ranks_did() -> None:
    node = Node()
    assert node.see(RankEnded(1, 0), RankEnded(0, 0)) == [TellRanks(1), TellRanks(0)]
    assert node.supervisor.deadline is None
    assert node.see(RankEnded(2, 0)) == [Finish(0, None)]


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (41, 41), (-9, 137), (-15, 143), (-11, 139)])
def test_the_exit_code_is_that_of_the_failed_rank(code: int, exit_code: int) -> None:
    node = Node(ranks=(0, 1))
    assert node.see(RankEnded(1, code)) == [SignalRanks(TERM)]
    node.see(RankEnded(0, -15))
    assert (node.exit_code, node.blamed) == (exit_code, 1)


def test_a_hang_ends_the_job_like_a_failure_with_a_code_of_its_own() -> None:
    node = Node()
    assert node.supervisor.running
    assert node.see(HangFound(7, "it hangs", "stacks")) == [SignalRanks(TERM)]
    assert not node.supervisor.running
    assert node.pass_time(0.3) == [SignalRanks(KILL)]
    node.see(RankEnded(0, -9), RankEnded(1, -9), RankEnded(2, -9))
    assert node.done[-1] == Finish(HANG_EXIT_CODE, FailureSeen(0, 7, HANG_EXIT_CODE, "it hangs", "stacks"))


@pytest.mark.parametrize("event", [SignalArrived(TERM), RankEnded(1, 3), SaveSeen(0, 1)])
def test_ranks_that_are_ending_do_not_hang(event: Event) -> None:
    node = Node()
    node.see(event)
    assert node.see(HangFound(0, "it hangs")) == []


def test_ranks_that_do_not_heed_sigterm_are_killed_well_within_a_second() -> None:
    node = Node()
    node.see(RankEnded(0, 3))
    assert node.pass_time(0.29) == []
    assert node.pass_time(0.02) == [SignalRanks(KILL)]
    node.see(RankEnded(1, -9), RankEnded(2, -9))
    assert (node.exit_code, node.blamed) == (3, 0)


def test_the_longest_way_to_sigkill_after_a_failure_is_well_under_a_second() -> None:
    patience = Patience()
    assert patience.suspicion_s + patience.terminate_s <= 0.6


def test_ranks_that_survive_sigkill_are_named() -> None:
    node = Node()
    node.see(RankEnded(0, 3))
    node.pass_time(0.3)
    node.pass_time(10.0)
    assert node.done[-1] == Finish(3, FailureSeen(0, 0, 3), frozenset({1, 2}))


def test_the_first_of_two_failures_counts() -> None:
    node = Node()
    node.see(RankEnded(2, 5), RankEnded(1, 6), RankEnded(0, 0))
    assert (node.exit_code, node.blamed) == (5, 2)


def test_a_rank_that_lost_a_peer_is_not_blamed_when_another_fails_in_time() -> None:
    node = Node()
    assert node.see(RankEnded(0, 1, blames_peer=True)) == []
    node.pass_time(0.1)
    assert node.see(RankEnded(1, 7)) == [SignalRanks(TERM)]
    node.see(RankEnded(2, -15))
    assert (node.exit_code, node.blamed) == (7, 1)


def lost(rank: int, *peers: int) -> RankEnded:
    """The end of a rank whose last words are that it has lost `peers`."""
    return RankEnded(rank, 1, True, frozenset(peers))


def test_a_rank_that_a_suspect_has_lost_may_take_its_time_to_end() -> None:
    """As one that calls sys.exit and has PyTorch to tear down."""
    node = Node()
    node.see(lost(0, 1))
    assert node.pass_time(4.9) == []
    assert node.see(RankEnded(1, 3)) == [SignalRanks(TERM)]
    node.see(RankEnded(2, -15))
    assert (node.exit_code, node.blamed) == (3, 1)


def test_a_suspect_is_blamed_when_the_rank_that_it_has_lost_trains_on() -> None:
    node = Node()
    node.see(lost(0, 1))
    assert node.pass_time(4.9) == []
    assert node.pass_time(0.2) == [SignalRanks(TERM)]
    node.see(RankEnded(1, -15), RankEnded(2, -15))
    assert (node.exit_code, node.blamed) == (1, 0)


def test_a_suspect_is_blamed_soon_when_the_rank_that_it_has_lost_has_ended_well() -> None:
    node = Node()
    node.see(lost(0, 1))
    node.pass_time(1.0)
    node.see(RankEnded(1, 0))
    assert node.pass_time(0.2) == [SignalRanks(TERM)]
    node.see(RankEnded(2, -15))
    assert (node.exit_code, node.blamed) == (1, 0)


def test_a_doomed_rank_is_looked_for_again_and_again_while_a_lost_one_may_be_ending() -> None:
    node = Node()
    node.see(lost(0, 1))
    node.pass_time(1.0)
    assert node.supervisor.deadline is not None
    assert node.supervisor.deadline - node.now <= PATIENCE.suspicion_s


def test_of_suspects_that_have_lost_each_other_the_end_of_the_chain_is_blamed() -> None:
    node = Node(ranks=(0, 1, 2, 3))
    node.see(lost(0, 3), lost(3, 1), RankEnded(1, 4, True))
    assert node.pass_time(0.2) == [SignalRanks(TERM)]
    node.see(RankEnded(2, -15))
    assert (node.exit_code, node.blamed) == (4, 1)


@pytest.mark.parametrize("ends", [(lost(0, 1), lost(1, 0)), (lost(0, 0), lost(1, 1))])
def test_suspects_that_blame_each_other_or_themselves_end_the_job_too(ends: Sequence[RankEnded]) -> None:
    node = Node()
    node.see(*ends)
    assert node.pass_time(0.2) == [SignalRanks(TERM)]


def test_a_doomed_rank_is_blamed_instead_of_a_suspect() -> None:
    node = Node()
    node.see(RankEnded(0, 1, blames_peer=True))
    assert node.supervisor.suspicious
    assert node.see(RankDoomed(2)) == [SignalRanks(TERM)]
    assert not node.supervisor.suspicious
    node.see(RankEnded(1, -15), RankEnded(2, -6))
    assert (node.exit_code, node.blamed) == (1, 2)


def test_a_doomed_rank_is_left_alone_while_nobody_is_under_suspicion() -> None:
    node = Node()
    assert node.see(RankDoomed(2)) == []
    assert node.supervisor.deadline is None


def test_the_first_of_several_suspects_is_blamed_when_nobody_else_fails() -> None:
    node = Node()
    node.see(RankEnded(2, 1, blames_peer=True), RankEnded(0, 4, blames_peer=True))
    assert node.pass_time(0.2) == [SignalRanks(TERM)]
    node.see(RankEnded(1, -15))
    assert (node.exit_code, node.blamed) == (1, 2)


def test_a_suspect_is_blamed_at_once_when_nobody_is_left() -> None:
    node = Node(ranks=(0, 1))
    node.see(RankEnded(0, 0), RankEnded(1, 1, blames_peer=True))
    assert (node.exit_code, node.blamed) == (1, 1)


def test_ctrl_c_is_passed_on_and_ends_with_130() -> None:
    node = Node(ranks=(0, 1))
    assert node.see(SignalArrived(INT)) == [SignalRanks(INT)]
    assert node.pass_time(29.9) == []
    node.see(RankEnded(0, -2), RankEnded(1, 0))
    assert node.exit_code == 130


def test_a_second_ctrl_c_kills_and_ends_with_130() -> None:
    node = Node(ranks=(0,))
    node.see(SignalArrived(INT))
    assert node.see(SignalArrived(INT)) == [SignalRanks(KILL)]
    node.see(RankEnded(0, -9))
    assert node.exit_code == 130


def test_the_grace_ends_in_sigkill() -> None:
    node = Node(ranks=(0,))
    node.see(SignalArrived(TERM))
    assert node.pass_time(30.0) == [SignalRanks(KILL)]
    node.see(RankEnded(0, -9))
    assert node.exit_code == 143


@pytest.mark.parametrize("codes", [(75, 75), (75, 0), (0, 75), (75, -15), (1, 75)])
def test_sigterm_ends_with_75_when_a_rank_saved(codes: tuple[int, int]) -> None:
    node = Node(ranks=(0, 1))
    node.see(SignalArrived(TERM), *(RankEnded(rank, code) for rank, code in enumerate(codes)))
    assert node.exit_code == 75


@pytest.mark.parametrize("codes", [(0, 0), (-15, -15), (143, 0), (1, -15)])
def test_sigterm_ends_with_143_when_no_rank_saved(codes: tuple[int, int]) -> None:
    node = Node(ranks=(0, 1))
    node.see(SignalArrived(TERM), *(RankEnded(rank, code) for rank, code in enumerate(codes)))
    assert node.exit_code == 143


def test_a_rank_that_fails_after_sigterm_does_not_spoil_the_save_of_others() -> None:
    node = Node(ranks=(0, 1))
    node.see(SignalArrived(TERM))
    assert node.see(RankEnded(0, 1)) == []
    assert node.pass_time(29.0) == []
    node.see(RankEnded(1, 75))
    assert node.exit_code == 75


def test_a_hangup_counts_as_sigterm() -> None:
    node = Node(ranks=(0,))
    assert node.see(SignalArrived(signal.SIGHUP)) == [SignalRanks(TERM)]
    node.see(RankEnded(0, -15))
    assert node.exit_code == 143


def test_a_second_sigterm_is_passed_on_and_kills_nobody() -> None:
    node = Node(ranks=(0,))
    node.see(SignalArrived(TERM))
    node.pass_time(20.0)
    assert node.see(SignalArrived(TERM)) == [SignalRanks(TERM)]
    assert node.pass_time(9.9) == []
    assert node.pass_time(0.2) == [SignalRanks(KILL)]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_passed_on_and_change_nothing(signum: signal.Signals) -> None:
    node = Node(ranks=(0,))
    assert node.see(SignalArrived(signum)) == [SignalRanks(signum)]
    assert node.supervisor.deadline is None
    assert node.see(RankEnded(0, 0)) == [Finish(0, None)]


def test_a_rank_that_saved_gives_the_others_the_grace() -> None:
    node = Node(ranks=(0, 1))
    assert node.see(RankEnded(0, 75)) == []
    assert node.pass_time(29.9) == []
    assert node.pass_time(0.2) == [SignalRanks(TERM)]
    assert node.pass_time(0.3) == [SignalRanks(KILL)]
    node.see(RankEnded(1, -9))
    assert node.exit_code == 75


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_lost_the_one_that_saved_did_not_fail(order: tuple[int, int]) -> None:
    ends = [RankEnded(0, 75), RankEnded(1, 1, blames_peer=True)]
    node = Node()
    node.see(*(ends[index] for index in order))
    node.pass_time(1.0)
    node.see(RankEnded(2, 75))
    assert node.exit_code == 75


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nor_did_it_where_the_one_that_saved_is_the_last_to_end(order: tuple[int, int]) -> None:
    ends = [RankEnded(0, 75), RankEnded(1, 1, blames_peer=True, lost=frozenset({0}))]
    node = Node(ranks=(0, 1), echo=False)
    node.see(*(ends[index] for index in order))
    while node.published:  # they come back one after the other, as through the launcher's inbox
        node.see(node.published.pop(0))
    assert node.exit_code == 75


def test_a_failure_outweighs_a_save() -> None:
    node = Node(ranks=(0, 1))
    node.see(RankEnded(0, 75), RankEnded(1, -9))
    assert (node.exit_code, node.blamed) == (137, 1)


def test_ranks_that_are_to_go_on_with_others_are_asked_to_save_and_that_is_known() -> None:
    node = Node(ranks=(0, 1))
    assert node.see(RegroupWanted()) == [AskToSave()]
    assert node.supervisor.deadline is None
    assert node.see(RankEnded(0, 75), RankEnded(1, 75)) == [Finish(75, SaveSeen(0, 0), regroup=True)]


def test_ranks_that_do_not_save_go_on_and_may_be_asked_again() -> None:
    node = Node(ranks=(0,))
    assert node.see(RegroupWanted(), RegroupWanted()) == [AskToSave(), AskToSave()]
    assert node.pass_time(1e6) == []
    assert node.see(RankEnded(0, 0)) == [Finish(0, None, regroup=True)]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_save_that_somebody_else_asked_for_too_is_the_end(signum: signal.Signals) -> None:
    node = Node(ranks=(0,))
    node.see(RegroupWanted(), SignalArrived(signum), RankEnded(0, 75))
    assert node.done[-1] == Finish(75, SaveSeen(0, 0), regroup=signum == signal.SIGUSR2)


def test_ranks_that_are_being_ended_are_not_asked_to_save() -> None:
    node = Node(ranks=(0, 1))
    node.see(RankEnded(0, 9))
    assert node.see(RegroupWanted()) == []
    assert node.see(SaveAsked(0)) == []


def test_ctrl_c_during_a_failure_leaves_the_failure_the_cause() -> None:
    node = Node(ranks=(0, 1))
    node.see(RankEnded(0, 9), SignalArrived(INT), RankEnded(1, -15))
    assert (node.exit_code, node.blamed) == (9, 0)


class TestNodes:
    """One of two nodes; the other is played by the test."""

    def test_a_node_that_is_done_waits_for_the_other(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        node.see(RankEnded(0, 0))
        assert node.published == [NodeDone(0, saved=False)]
        assert node.supervisor.deadline is None
        assert node.see(NodeDone(1, saved=False)) == [Finish(0, None)]

    def test_a_failure_elsewhere_ends_the_ranks_here(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        assert node.see(FailureSeen(1, 1, -9, "report")) == [SignalRanks(TERM)]
        node.see(RankEnded(0, -15))
        assert node.done[-1] == Finish(137, FailureSeen(1, 1, -9, "report"))

    def test_ranks_are_ended_before_the_others_have_heard(self) -> None:
        node = Node(ranks=(0, 1), num_nodes=2, echo=False)
        assert node.see(RankEnded(0, 9)) == [SignalRanks(TERM)]
        node.see(RankEnded(1, -15))
        assert not node.finished
        assert node.see(FailureSeen(0, 0, 9)) == [Finish(9, FailureSeen(0, 0, 9))]

    def test_of_two_nodes_failures_the_first_in_the_common_order_counts(self) -> None:
        node = Node(ranks=(0,), num_nodes=2, echo=False)
        node.see(RankEnded(0, 9), FailureSeen(1, 1, 8), FailureSeen(0, 0, 9))
        assert (node.exit_code, node.blamed) == (8, 1)

    def test_a_suspect_waits_for_the_cause_from_the_other_node(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        node.see(RankEnded(0, 1, blames_peer=True))
        assert node.published == []
        node.see(FailureSeen(1, 1, 8))
        assert (node.exit_code, node.blamed) == (8, 1)

    def test_a_suspect_is_blamed_when_the_other_node_is_silent(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        node.see(RankEnded(0, 1, blames_peer=True))
        node.pass_time(0.2)
        assert (node.exit_code, node.blamed) == (1, 0)

    def test_a_rank_of_another_node_that_a_suspect_has_lost_may_take_its_time_to_end(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        node.see(lost(0, 1))
        assert node.pass_time(4.9) == []
        node.see(FailureSeen(1, 1, 8))
        assert (node.exit_code, node.blamed) == (8, 1)

    def test_a_lost_node_ends_the_ranks_here(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        assert node.see(NodeLost(1)) == [SignalRanks(TERM)]
        node.see(RankEnded(0, -15))
        assert node.done[-1] == Finish(1, NodeLost(1))

    def test_a_node_that_was_done_is_not_missed(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        assert node.see(NodeDone(1, saved=False), NodeLost(1)) == []
        assert node.see(RankEnded(0, 0)) == [Finish(0, None)]

    @pytest.mark.parametrize("signum", [INT, TERM])
    def test_a_stop_asked_elsewhere_is_passed_on_here(self, signum: signal.Signals) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        assert node.see(StopAsked(1, signum)) == [SignalRanks(signum)]
        assert node.see(StopAsked(1, signum)) == []
        assert node.see(StopAsked(1, KILL)) == [SignalRanks(KILL)]

    def test_ranks_here_are_asked_to_save_for_another_launcher(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        assert node.see(SaveAsked(1)) == [AskToSave()]
        assert node.see(RegroupWanted()) == [AskToSave()]
        assert node.published == [SaveAsked(0)]

    def test_a_save_elsewhere_counts(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        node.see(SignalArrived(TERM), RankEnded(0, -15))
        assert not node.finished
        node.see(NodeDone(1, saved=True))
        assert node.exit_code == 75

    def test_it_does_not_wait_for_ever_for_a_silent_node_after_a_stop(self) -> None:
        node = Node(ranks=(0,), num_nodes=2)
        node.see(SignalArrived(TERM), RankEnded(0, -15))
        assert node.pass_time(29.0) == []
        node.pass_time(12.0)
        assert node.exit_code == 143

    def test_it_does_not_wait_for_ever_for_the_echo_of_its_failure(self) -> None:
        node = Node(ranks=(0,), num_nodes=2, echo=False)
        node.see(RankEnded(0, 9))
        node.pass_time(11.0)
        assert node.exit_code == 9


@dataclass
class Cluster:
    """Nodes that hear each other's messages in one order; ranks end when they are killed."""

    nodes: list[Node]
    log: list[Shared] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    alive: list[set[int]] = field(default_factory=list)

    @classmethod
    def of(cls, num_nodes: int, ranks_per_node: int) -> "Cluster":
        groups = [range(node * ranks_per_node, (node + 1) * ranks_per_node) for node in range(num_nodes)]
        nodes = [Node(ranks=group, node_rank=index, num_nodes=num_nodes, echo=False) for index, group in enumerate(groups)]
        return cls(nodes, heard=[0] * num_nodes, alive=[set(group) for group in groups])

    def see(self, index: int, event: Event) -> None:
        node = self.nodes[index]
        if isinstance(event, RankEnded):
            if event.rank not in self.alive[index]:
                return
            self.alive[index].discard(event.rank)
        if not node.finished:
            self._carry_out(index, node.see(event))

    def _carry_out(self, index: int, actions: list[Action]) -> None:
        node = self.nodes[index]
        self.log += node.published
        node.published.clear()
        if SignalRanks(KILL) in actions:
            for rank in sorted(self.alive[index]):
                self.see(index, RankEnded(rank, -KILL))

    def deliver(self, index: int) -> None:
        if self.heard[index] < len(self.log):
            self.heard[index] += 1
            self.see(index, self.log[self.heard[index] - 1])

    def settle(self) -> None:
        """Delivers everything, then lets time pass, until nothing more happens."""
        for _ in range(40):
            while any(count < len(self.log) for count in self.heard):
                for index in range(len(self.nodes)):
                    self.deliver(index)
            for index, node in enumerate(self.nodes):
                if not node.finished and (deadline := node.supervisor.deadline) is not None:
                    self._carry_out(index, node.pass_time(deadline - node.now))


EVENTS = st.one_of(
    st.builds(
        RankEnded,
        rank=st.integers(0, 5),
        code=st.sampled_from([0, 1, 75, 41, -9, -15]),
        blames_peer=st.booleans(),
        lost=st.frozensets(st.integers(0, 5), max_size=2),
    ),
    st.builds(SignalArrived, st.sampled_from([INT, TERM, signal.SIGHUP, signal.SIGUSR1])),
    st.just(RegroupWanted()),
    st.just(None),
)


@given(num_nodes=st.integers(1, 3), story=st.lists(st.tuples(st.integers(0, 2), EVENTS), max_size=20))
def test_all_nodes_end_with_one_exit_code_whatever_happens_in_which_order(num_nodes: int, story: list[tuple[int, Event | None]]) -> None:
    """None in the story hands one node its next message."""
    cluster = Cluster.of(num_nodes, ranks_per_node=6 // num_nodes)
    for index, event in story:
        if event is None:
            cluster.deliver(index % num_nodes)
        elif isinstance(event, RankEnded):
            cluster.see(event.rank // (6 // num_nodes), event)
        else:
            cluster.see(index % num_nodes, event)
    # Whoever is alive still ends well, unless it is killed for what went before.
    cluster.settle()
    for index, ranks in enumerate(cluster.alive):
        for rank in sorted(ranks):
            cluster.see(index, RankEnded(rank, 0))
    cluster.settle()
    assert all(node.finished for node in cluster.nodes)
    assert len({node.exit_code for node in cluster.nodes}) == 1


def test_a_save_is_told_once() -> None:
    node = Node(num_nodes=2, echo=False)
    node.see(RankEnded(0, 75), RankEnded(1, 75), RankEnded(2, 75))
    assert node.published == [SaveSeen(0, 0), NodeDone(0, saved=True)]
