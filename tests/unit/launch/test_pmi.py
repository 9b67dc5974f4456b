"""Hora's side of the protocol by which MPICH's ranks find each other."""

import os
import socket

import pytest

from hora.launch.pmi import ProcessManager


class Rank:
    """The side of MPICH, in a few words."""

    def __init__(self, manager: ProcessManager, rank: int) -> None:
        self.socket = socket.socket(fileno=os.dup(manager.descriptor(rank)))
        self.socket.settimeout(5.0)

    def say(self, words: str) -> None:
        self.socket.sendall(words.encode() + b"\n")

    def hear(self) -> str:
        heard = b""
        while not heard.endswith(b"\n"):
            heard += self.socket.recv(1)
        return heard.decode().strip()

    def ask(self, words: str) -> str:
        self.say(words)
        return self.hear()


@pytest.fixture
def ranks():
    with ProcessManager(2) as manager:
        found = [Rank(manager, rank) for rank in range(2)]
        yield found
        for rank in found:
            rank.socket.close()


def test_environment_names_the_socket_and_the_place():
    with ProcessManager(2) as manager:
        assert manager.environ(1) == {"PMI_FD": str(manager.descriptor(1)), "PMI_RANK": "1", "PMI_SIZE": "2"}


def test_rank_is_told_who_else_there_is(ranks):
    assert ranks[0].ask("cmd=init pmi_version=1 pmi_subversion=1") == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
    name = ranks[0].ask("cmd=get_my_kvsname")
    assert name == ranks[1].ask("cmd=get_my_kvsname")
    mapping = ranks[0].ask("cmd=get kvsname=any key=PMI_process_mapping")
    assert mapping == "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"
    assert ranks[0].ask("cmd=get_universe_size") == "cmd=universe_size size=2"


def test_jobs_have_different_names():
    """MPICH names its shared memory after the job: two of one name would write into each other's."""
    names = set()
    for _ in range(2):
        with ProcessManager(1) as manager:
            rank = Rank(manager, 0)
            names.add(rank.ask("cmd=get_my_kvsname"))
            rank.socket.close()
    assert len(names) == 2


def test_value_of_one_rank_is_found_by_another(ranks):
    assert ranks[0].ask("cmd=put kvsname=any key=a value=tcp://[::1]:5 x=y") == "cmd=put_result rc=0 msg=success"
    assert ranks[1].ask("cmd=get kvsname=any key=a") == "cmd=get_result rc=0 msg=success value=tcp://[::1]:5 x=y"
    assert ranks[1].ask("cmd=get kvsname=any key=b") == "cmd=get_result rc=-1 msg=key_not_found value=unknown"


def test_barrier_waits_for_all_again_and_again(ranks):
    for _ in range(2):
        ranks[1].say("cmd=barrier_in")
        assert ranks[1].ask("cmd=get_appnum") == "cmd=appnum appnum=0"  # not let through yet
        ranks[0].say("cmd=barrier_in")
        assert [rank.hear() for rank in ranks] == ["cmd=barrier_out rc=0"] * 2


def test_words_in_pieces_and_several_at_once_are_understood(ranks):
    ranks[0].socket.sendall(b"cmd=get_")
    ranks[0].socket.sendall(b"appnum\ncmd=get_appnum\ncmd=nonsense\n")
    assert [ranks[0].hear() for _ in range(2)] == ["cmd=appnum appnum=0"] * 2


def test_rank_that_asks_for_more_ranks_or_is_gone_disturbs_nobody(ranks):
    assert "rc=-1" in ranks[1].ask("cmd=spawn nprocs=1")
    ranks[1].socket.close()
    assert ranks[0].ask("cmd=finalize") == "cmd=finalize_ack rc=0"
