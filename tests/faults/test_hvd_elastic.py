"""Elastic training on real ranks: states that come from rank 0, errors that all ranks live through, and an end that only one of them is asked for."""

import os
import signal

import pytest
import torch

import hora.hvd as hvd
from hora import env

LENGTH, BATCH = 41, 2


def make_state() -> hvd.elastic.TorchState:
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1 * hvd.size()), model.named_parameters())
    samples = hvd.elastic.ElasticSampler(range(LENGTH))
    return hvd.elastic.TorchState(model, optimizer, samples=samples, step=0, words=[f"of rank {hvd.rank()}"])


def train_step(state) -> None:
    state.optimizer.zero_grad()
    state.model(torch.full((1, 3), hvd.rank() + 1.0)).square().sum().backward()
    state.optimizer.step()
    state.step += 1


def facts(state) -> list:
    moments = [moment["exp_avg"].sum().item() for moment in state.optimizer.state_dict()["state"].values()]
    return [[p.tolist() for p in state.model.parameters()], moments, state.step, list(state.words)]


def same_everywhere(state) -> bool:
    return len({repr(told) for told in hvd.allgather_object(facts(state))}) == 1


def body_lives_through_errors_and_is_asked_to_end() -> list:
    hvd.init(process_sets="dynamic")
    first = hvd.add_process_set([0])
    torch.manual_seed(hvd.rank())
    state = make_state()
    callbacks, lives, done = [], [], []
    state.register_reset_callbacks([lambda: callbacks.append(hvd.size())])

    def epoch() -> None:
        loader = torch.utils.data.DataLoader(range(LENGTH), BATCH, sampler=state.samples)
        for batch in loader:
            train_step(state)
            state.samples.record_batch(state.step, BATCH)
            done.append(batch.tolist())
            if len(lives) == 3 and state.step == 6 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            state.commit()

    @hvd.elastic.run
    def train(state) -> None:
        assert same_everywhere(state)
        if first.included():
            assert hvd.allreduce(torch.ones(1), process_set=first).item() == 1.0
        lives.append([state.step, list(state.words), state.samples.processed_num])
        if len(lives) == 1:
            for _ in range(3):
                train_step(state)
            state.words.append("committed")
            state.commit()
            kept = facts(state)
            train_step(state)
            state.words.append("lost")
            state.restore()
            assert facts(state) == kept
            train_step(state)
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="x")  # which all ranks live through
        elif len(lives) == 2:
            train_step(state)  # not lost, though it is not committed
            if hvd.rank() == 1:
                state.on_hosts_updated(1.0)
            state.check_host_updates()
        epoch()

    with pytest.raises(SystemExit) as caught:
        train(state)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # whoever asks twice
    assert hvd.remove_process_set(first)
    found = [lives, callbacks, done, caught.value.code, facts(state)]
    hvd.shutdown()
    return found


def body_goes_on() -> list:
    hvd.init()
    torch.manual_seed(hvd.rank())
    state = make_state()
    rates = []

    def set_rate() -> None:
        rates.append(state.optimizer.param_groups[0]["lr"])
        state.optimizer.param_groups[0]["lr"] = 0.1 * hvd.size()

    state.register_reset_callbacks([set_rate])

    @hvd.elastic.run
    def train(state) -> list:
        begun = facts(state), state.optimizer.param_groups[0]["lr"]
        return [begun, [batch.tolist() for batch in torch.utils.data.DataLoader(range(LENGTH), BATCH, sampler=state.samples)]]

    found = [*train(state), rates]
    hvd.shutdown()
    return found


def results(ranks) -> list:
    outcomes = ranks.wait()
    assert all(outcome.kind == "passed" for outcome in outcomes), "\n".join(outcome.text for outcome in outcomes)
    return [outcome.result for outcome in outcomes]


def test_ranks_go_on_from_what_was_committed_last(spawn_ranks, tmp_path):
    environ = {env.HVD_COMMIT_DIR: str(tmp_path)}
    first, second = results(spawn_ranks(2, body_lives_through_errors_and_is_asked_to_end, environ=environ))
    committed = ["of rank 0", "committed"]
    for lives, callbacks, _, code, _ in (first, second):
        assert lives == [[0, ["of rank 0"], 0], [3, committed, 0], [4, committed, 0]]
        assert callbacks == [2, 2]
        assert code == 75
    ended = first[-1]
    assert ended == second[-1]
    assert ended[2] == 6
    later = results(spawn_ranks(3, body_goes_on, environ=environ))
    for (begun, rate), _, rates in later:
        assert begun == ended
        assert (rates, rate) == ([0.1 * 2], 0.1 * 3)
    processed = [n for done in (first[2], second[2], *(dealt for _, dealt, _ in later)) for batch in done for n in batch]
    assert set(processed) == set(range(LENGTH))
    assert len(processed) < LENGTH + 3
