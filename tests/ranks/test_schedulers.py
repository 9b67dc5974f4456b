"""Ranks that find their place in the variables of a scheduler, and meet there."""

import socket

import pytest
import torch

import hora


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def by_hand(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def by_slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node1",
    }


def by_open_mpi(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-node1-4711@1",
    }


def by_mpich(rank: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2"}


def body_joins_where_it_is() -> list:
    session = hora.init(device="cpu", timeout_s=30.0)
    total = hora.all_reduce(torch.ones(1)).item()
    hora.shutdown()
    return [session.topology.source, session.topology.local_rank, total]


@pytest.mark.parametrize(("source", "variables"), [("env", by_hand), ("slurm", by_slurm), ("openmpi", by_open_mpi), ("mpich", by_mpich)])
def test_ranks_meet_by_the_variables_of_their_scheduler(spawn_ranks, tmp_path, source, variables):
    (tmp_path / "state").mkdir(mode=0o755)  # as others may look into it
    more = {"HORA_STATE_DIR": str(tmp_path / "state")} | ({"MASTER_PORT": free_port()} if variables is by_hand else {})
    ranks = [spawn_ranks(1, body_joins_where_it_is, join=False, environ=variables(rank) | more) for rank in (1, 0)]
    assert [rank.wait()[0].result for rank in ranks] == [[source, 1, 2.0], [source, 0, 2.0]]
