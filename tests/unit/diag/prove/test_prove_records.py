from pathlib import Path

import numpy as np
from made_up_records import call, facts, step

from hora.diag.prove.records import END, StepRecord, read_run, record_path, write_record


def test_record_survives_its_file(tmp_path: Path) -> None:
    written = step(3, 1, samples=[4, 5], evaluated=[6], losses=[(0.5, 7), (0.25, None)], group={"betas": [0.9, 0.99]}, random_moved=True)
    write_record(tmp_path, written)
    (read,) = read_run(tmp_path, 2).at(3)
    assert (read.rank, read.step, read.micro_steps, read.groups, read.notes) == (1, 3, written.micro_steps, written.groups, written.notes)
    for kind in ("gradient", "parameter"):
        for name, tensor in written.facts(kind).items():
            again = read.facts(kind)[name]
            assert (again.digest, again.shape, again.dtype) == (tensor.digest, tensor.shape, tensor.dtype)
            assert np.array_equal(again.sketch, tensor.sketch)
    assert np.array_equal(read.forwards[0][0].keys[0], call([4, 5])[0].keys[0])
    assert read.forwards[0][0].whole


def test_record_without_arrays_survives_its_file(tmp_path: Path) -> None:
    write_record(tmp_path, StepRecord(0, 1, END, notes={"failed": False}))
    assert read_run(tmp_path, 1).ends[0].notes == {"failed": False}


def test_unfinished_files_are_no_records(tmp_path: Path) -> None:
    write_record(tmp_path, step(1))
    record_path(tmp_path, 0, 2).with_name(".tmp-rank0-step2.safetensors-17").write_bytes(b"half")
    assert read_run(tmp_path, 1).steps_by_rank == {0: 1}
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".tmp")] == [record_path(tmp_path, 0, 1).name]


def test_run_has_the_steps_that_all_ranks_have(tmp_path: Path) -> None:
    for rank, steps in ((0, 3), (1, 2)):
        for number in range(steps + 1):
            write_record(tmp_path, step(number, rank))
    run = read_run(tmp_path, 2)
    assert (run.steps, run.steps_by_rank) == (2, {0: 3, 1: 2})
    assert [record.rank for record in run.at(3)] == [0]


def test_evaluation_belongs_to_the_step_before(tmp_path: Path) -> None:
    write_record(tmp_path, step(1))
    write_record(tmp_path, step(2, evaluated=[1, 2]))
    write_record(tmp_path, StepRecord(0, 1, END, evaluation=(call([3]),)))
    run = read_run(tmp_path, 1)
    assert [[len(calls) for calls in run.evaluations(number)] for number in (1, 2)] == [[1], [1]]
    assert facts([1.0]).numel == 1
