"""`hvd.elastic` in one process: how samples are dealt out through resets, what is run again after what, and files of commits."""

import errno
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hora.hvd as hvd
from hora import env
from hora.errors import CheckpointError, CheckpointMismatch, ConfigError
from hora.hvd.elastic import handlers, running, sampler
from hora.hvd.elastic.commits import Commits, Kept
from hora.hvd.elastic.object_state import EndAsked
from hora.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from hora.train.preemption import SIGNALS


class Ranks:
    """Samplers of so many ranks, in one process."""

    def __init__(self, monkeypatch, length, size, state=None):
        self.samplers = []
        for rank in range(size):
            monkeypatch.setattr(sampler, "size", lambda: size)
            monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
            one = sampler.ElasticSampler(range(length), seed=3)
            if state is not None:
                one.load_state_dict(state)
            self.samplers.append(one)

    def process(self, batch_size, steps):
        """What all ranks process in so many steps, fewer if the epoch ends; and where they stand then."""
        dealt = [list(one) for one in self.samplers]
        assert {len(each) for each in dealt} == {len(self.samplers[0])}
        done = min(steps, -(-len(dealt[0]) // batch_size))
        for step in range(done):
            for one in self.samplers:
                one.record_batch(step, batch_size)
        states = [one.state_dict() for one in self.samplers]
        assert all(state == states[0] for state in states)
        return [n for each in dealt for n in each[: done * batch_size]], states[0]


@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 3)), max_size=4),
    st.integers(1, 6),
)
def test_each_sample_comes_once_through_resets(length, batch_size, lives, last):
    """Each life has a number of ranks, steps that are committed, and some that are lost with it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        state, counted, size = {"epoch": 2, "processed_num": 0}, [], 1
        for size, committed, lost in [*lives, (last, length, 0)]:
            ranks = Ranks(monkeypatch, length, size, state)
            processed, state = ranks.process(batch_size, committed)
            counted += processed
            if state["processed_num"] >= length:
                break
            ranks.process(batch_size, lost)
    assert set(counted) == set(range(length))
    assert len(counted) - length < size  # the last step is filled up


def test_the_order_is_that_of_the_epoch_and_no_reset_changes_it(monkeypatch):
    one, two = Ranks(monkeypatch, 10, 2).samplers
    assert [n for pair in zip(one, two, strict=True) for n in pair] == sampler.order_of(10, 3)
    first = list(one)
    one.set_epoch(1)
    assert sorted(one) != sorted(first)
    plain = sampler.ElasticSampler(range(4), shuffle=False)
    assert list(plain) == [1, 3]  # of rank 1
    assert len(plain) == 2


def test_one_sample_is_dealt_to_many_ranks():
    assert [sampler.deal([7], [7], rank, 4) for rank in range(4)] == [[7]] * 4
    assert [sampler.deal([7, 8, 9], [5, 6], rank, 2) for rank in range(2)] == [[7, 9], [8, 5]]
    assert sampler.deal([], [5], 0, 4) == []


@pytest.fixture
def alone():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hvd.init()
    yield
    hvd.shutdown()
    for number, handler in before.items():  # an end that was asked for ignores them
        signal.signal(number, handler)


class Noted(hvd.elastic.State):
    """A state that notes what is done with it."""

    def __init__(self):
        super().__init__(lambda value: value, hvd.rank)
        self.noted = []
        self.register_reset_callbacks([lambda: self.noted.append("callback")])

    def save(self):
        self.noted.append("save")

    def restore(self):
        self.noted.append("restore")

    def sync(self):
        self.noted.append("sync")

    def reset(self):
        self.noted.append("reset")


def run(state, *ends):
    """Runs a function that ends in these ways, one after the other."""
    left = list(ends)

    def act(given, word):
        assert (given, word) == (state, "word")
        end = left.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    return running.run_fn(act, lambda: state.noted.append("meet"))(state, "word")


def test_what_follows_an_error_and_new_hosts(alone):
    state = Noted()
    assert run(state, HorovodInternalError("gone"), HostsUpdatedInterrupt(), HostsUpdatedInterrupt(skip_sync=True), 5) == 5
    again = ["reset", "callback"]
    assert state.noted == ["sync", "restore", "meet", *again, "sync", "save", "meet", *again, "sync", "save", "meet", *again]


def test_an_error_that_comes_again_without_a_commit_is_raised(alone):
    state = Noted()
    with pytest.raises(HorovodInternalError, match="always") as caught:
        run(state, *[HorovodInternalError("always")] * 9)
    assert "nothing was committed since the error before, 3 times in a row" in caught.value.__notes__[0]
    assert state.noted.count("meet") == 3


def test_other_errors_go_through(alone):
    state = Noted()
    with pytest.raises(KeyError):
        run(state, KeyError("of the script"))
    assert state.noted == ["sync"]


def test_hosts_that_come_or_go_are_raised_once(alone):
    state = Noted()
    state.commit()
    state.on_hosts_updated(1.0, 1)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync
    state.commit()
    state.on_hosts_updated(0.5)  # older than what is known
    state.check_host_updates()
    state.on_hosts_updated(2.0)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert not caught.value.skip_sync


def test_the_end_that_is_asked_for_is_after_a_commit(alone, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hora.log._logger.propagate", True)
    monkeypatch.setenv(env.HVD_COMMIT_DIR, str(tmp_path / "new"))
    state = hvd.elastic.ObjectState(lambda value: value, hvd.rank, step=0)
    state.step = 4
    with pytest.raises(SystemExit) as caught:
        running.run(lambda state: (_ for _ in ()).throw(EndAsked()))(state)
    assert caught.value.code == 75
    assert f"the next start of the job goes on from {tmp_path / 'new'}" in caplog.text
    (name,) = os.listdir(tmp_path / "new")
    number = int(name.split("-")[1].split(".")[0])
    assert name == f"commit-{number}.g0.safetensors"
    monkeypatch.setattr(running, "_calls", iter([number]))
    later = hvd.elastic.ObjectState(lambda value: value, hvd.rank, step=0)
    assert running.run(lambda state: state.step)(later) == 4


def test_a_state_that_cannot_be_kept_is_warned_of(alone, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(env.HVD_COMMIT_DIR, str(tmp_path))
    monkeypatch.setattr("hora.log._logger.propagate", True)
    assert run(Noted(), "done") == "done"
    assert "commits of a Noted are in memory only" in caplog.text
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("generation", ["0", "1"])
def test_a_start_anew_that_finds_nothing_is_warned_of(monkeypatch, caplog, request, generation):
    monkeypatch.setenv(env.GENERATION, generation)
    request.getfixturevalue("alone")
    monkeypatch.setattr("hora.log._logger.propagate", True)
    assert run(Noted(), "done") == "done"
    assert ("was started anew, but begins anew too" in caplog.text) == (generation == "1")


def test_a_job_without_a_directory_of_its_own_says_who_goes_on(alone, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hora.log._logger.propagate", True)
    monkeypatch.setenv(env.KEPT_DIR, str(tmp_path))
    with pytest.raises(SystemExit):
        running.run(lambda state: os.kill(os.getpid(), signal.SIGTERM) or state.commit())(small_state(history=[], epoch=0))
    assert "HORA_HVD_COMMIT_DIR would keep it for the next job" in caplog.text
    assert len(os.listdir(tmp_path)) == 2
    assert env.fleeting_mark(tmp_path, 0).exists()


def small_state(**kwargs):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return hvd.elastic.TorchState(model, optimizer, schedule=schedule, scaler=torch.amp.GradScaler("cpu"), **kwargs)


def train(state):
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.schedule.step()


def facts(state):
    return [
        [parameter.tolist() for parameter in state.model.parameters()],
        {n: {k: v.tolist() for k, v in s.items()} for n, s in state.optimizer.state_dict()["state"].items()},
        state.schedule.state_dict(),
        state.history,
        state.epoch,
    ]


def test_what_was_saved_comes_back_and_is_no_more_changed(alone):
    state = small_state(history=[1], epoch=3)
    train(state)
    state.history.append(2)
    state.save()
    kept = facts(state)
    kept = [*kept[:3], [1, 2], 3]
    for _ in range(2):  # what is restored is not what was saved: training on must not change it
        train(state)
        state.history.append(9)
        state.epoch = 7
        assert facts(state) != kept
        state.restore()
        assert facts(state) == kept


def test_an_attribute_that_is_another_module_is_taken_care_of(alone):
    state = small_state(history=[], epoch=0)
    state.model = torch.nn.Linear(3, 1)
    weight = state.model.weight.tolist()
    torch.nn.init.zeros_(state.model.weight)
    state.restore()
    assert state.model.weight.tolist() == weight


def test_handlers_of_the_script_are_asked_first(alone):
    class Counting(handlers.StateHandler):
        def save(self):
            self.value.append("save")

    before = handlers.get_handler_registry()
    try:
        handlers.set_handler_registry([(list, Counting), *before])
        state = small_state(history=[], epoch=0)
    finally:
        handlers.set_handler_registry(before)
    state.save()
    assert state.history == ["save"]
    assert not state._is_kept()


def test_a_commit_is_another_processs_state(alone, tmp_path):
    state = small_state(history=[1, (2.5, None)], epoch=3)
    train(state)
    state.save()
    commits = Commits(tmp_path, 1, durable=True)
    assert commits.newest() == -1
    commits.write(state._to_tree(), 2)
    (tmp_path / ".tmp-commit-1.g3.safetensors-host-1-2").write_text("half")
    commits.sweep()
    other = small_state(history=[], epoch=0)
    other._from_tree(commits.read(commits.newest()))
    assert facts(other) == facts(state)
    commits.write(other._to_tree(), 5)
    assert os.listdir(tmp_path) == ["commit-1.g5.safetensors"]
    assert Commits(tmp_path, 0, durable=False).newest() == -1
    with pytest.raises(CheckpointMismatch, match=r"must hold what the state of the script has.*'epoch', 'extra', 'history'"):
        small_state(history=[], epoch=0, extra=1)._from_tree(commits.read(5))
    with pytest.raises(CheckpointMismatch, match="must hold what the state of the script has"):
        hvd.elastic.ObjectState(lambda value: value, hvd.rank, history=[], epoch=0)._from_tree(commits.read(5))


def test_a_commit_that_is_damaged_or_cannot_be_kept(alone, tmp_path, monkeypatch):
    commits = Commits(tmp_path, 0, durable=False)
    (tmp_path / "commit-0.g0.safetensors").write_bytes(b"no such file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        commits.read(0)
    with pytest.raises(ConfigError, match="must be None, bool, int"):
        commits.write({"handle": object()}, 1)
    monkeypatch.setenv(env.HVD_ALLOW_PICKLE, "1")
    with pytest.warns(RuntimeWarning, match="sent by pickle"):
        commits.write({"handle": complex}, 1)
    assert commits.read(1) == {"handle": complex}
    monkeypatch.delenv(env.HVD_ALLOW_PICKLE)
    with pytest.raises(ConfigError, match="has not allowed it"):
        commits.read(1)


def test_a_full_disk_is_warned_of_and_the_commit_before_stays(alone, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hora.log._logger.propagate", True)
    commits = Commits(tmp_path, 0, durable=False)
    kept = Kept(commits, 0)
    kept.keep(lambda: {"step": 1})
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        kept.keep(lambda: {"step": 2})
    assert "a commit is not kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert commits.read(0) == {"step": 1}
    assert len(os.listdir(tmp_path)) == 1
    Kept(None, 0).keep(lambda: pytest.fail("another rank writes"))


def test_where_commits_are_kept(tmp_path):
    assert Commits.find(0, {}) is None
    assert Commits.find(0, {env.KEPT_DIR: ""}) is None
    assert Commits.find(3, {env.KEPT_DIR: str(tmp_path)}) == Commits(tmp_path, 3, durable=False)
    named = tmp_path / "of" / "the user"
    assert Commits.find(0, {env.KEPT_DIR: str(tmp_path), env.HVD_COMMIT_DIR: str(named)}) == Commits(named, 0, durable=True)
    assert named.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="must be a directory"):
        Commits.find(0, {env.HVD_COMMIT_DIR: str(tmp_path / "file")})
