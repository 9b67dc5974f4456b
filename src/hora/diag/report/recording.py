"""What users call: `record_steps` begins and `report` tells; and the same for a whole job, from `hora.init` to `hora.shutdown`."""

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Final

from hora import events, log
from hora.comm.objects import all_gather_object, gather_object
from hora.comm.session import Session, session
from hora.diag.report.advice import advise
from hora.diag.report.compare import Setting, compare
from hora.diag.report.rank_record import RankRecord, make_record
from hora.diag.report.recorder import DeviceRecorder, Recorder
from hora.diag.report.step_report import StepReport
from hora.diag.report.trace import make_trace, trace_json
from hora.diag.wire.figures import Place, bandwidth_at, read_figures
from hora.errors import ConfigError, HoraError
from hora.launch.report_words import ReportWords
from hora.train.files import write_result
from hora.train.rank_zero import on_rank_zero

WARM_UP: Final = 5
"""Steps that are left out by default: caches fill, optimizers make their state, `TrainStep` captures."""


def record_steps(*, warm_up: int = WARM_UP) -> None:
    """Begins to record where the time of this rank's steps goes, until `shutdown`; called again, begins anew.

    To be called on all ranks, between two steps. Costs a few microseconds a step, and memory for the latest 1,000 steps.

    Args:
        warm_up: steps from now on that a report leaves out; never more than half of all.

    Raises:
        ConfigError: `warm_up` is no whole number from 0, or something else listens to the steps of this process.
    """
    if not (isinstance(warm_up, int) and warm_up >= 0):
        raise ConfigError(f"warm_up must be a number of steps from 0, but is {warm_up!r} instead")
    here, listener = session(), events.observer()
    if isinstance(listener, Recorder):
        listener.begin(warm_up)
        return
    if type(listener) is not events.Observer:
        raise ConfigError(
            "steps are recorded for one listener at a time, and something else listens to them; record them in a run without it"
        )
    recorder = DeviceRecorder(warm_up) if here.device.type == "cuda" else Recorder(warm_up)
    here.release.enter_context(events.observe(recorder))


def report() -> StepReport:
    """Where the time of the steps since `record_steps` has gone, the same on every rank; `str()` of it is a table.

    Collective: all ranks call it, between two steps. On GPUs it waits for the device.

    Raises:
        ConfigError: a rank has recorded nothing, or another number of steps; on every rank alike.
    """
    return _report(session(), _own_record(session()))


def _report(here: Session, mine: RankRecord | None) -> StepReport:
    place = Place(here.device.type, here.backend, here.world_size, here.topology.num_nodes)
    own_figures = read_figures().get(place, {}) if here.rank == 0 else {}
    told = all_gather_object((mine, own_figures))
    records = [record for record, _ in told if record is not None]
    silent = [rank for rank, (record, _) in enumerate(told) if record is None]
    if silent:
        raise ConfigError(
            f"hora.report() tells of steps that were recorded on all ranks, but none were on rank {silent[0]}: call hora.record_steps() before the "
            "loop, or start with hora run --report"
        )
    found = compare(records, Setting(here.backend, here.device.type))
    if found.bandwidth is not None and not records[0].gathers:
        measured = bandwidth_at({place: told[0][1]}, place, found.bandwidth.bucket_bytes)
        found = replace(found, bandwidth=replace(found.bandwidth, measured=measured))
    return replace(found, advice=advise(found))


def _own_record(here: Session) -> RankRecord | None:
    recorder = events.observer()
    if not isinstance(recorder, Recorder):
        return None
    recorder.settle()
    return make_record(here.records[here.rank].host, recorder)


# A whole job ----------------------------------------------------------------------------------------------------------------------------------


def follow_job() -> None:
    """Does what the variables of `hora run --report` ask for. Called by `hora.init`."""
    follow(ReportWords.from_env())


def follow(words: ReportWords) -> None:
    """Records the steps from now on, and tells of them when this session is shut down.

    Collective: all ranks call it with the same words.

    Raises:
        ConfigError: a file cannot be written; on every rank alike.
    """
    if not words.wanted or isinstance(events.observer(), Recorder):
        return
    if words.report_json is not None or words.trace is not None:
        on_rank_zero(words.require_files)
    record_steps()
    session().before_leaving.append(partial(_tell, words))


def _tell(words: ReportWords) -> None:
    """Prints and writes what was asked for. Collective, and never the reason why a job fails: rank 0 says why there is no report."""
    here = session()
    try:
        if not here.progress.all_leave(here.timeout_s):
            raise HoraError(f"rank {here.rank} leaves, and other ranks do not")
        _write(words, here)
    except (HoraError, RuntimeError, OSError) as error:
        if here.rank == 0:
            log.get_logger().warning("there is no report: %s", error)


def _write(words: ReportWords, here: Session) -> None:
    mine, recorder = _own_record(here), events.observer()
    found = _report(here, mine)
    if here.rank == 0 and words.report:
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
    if here.rank == 0 and words.report_json is not None:
        write_result(words.report_json, (json.dumps(found.as_json(), indent=1) + "\n").encode())
    if words.trace is not None and mine is not None and isinstance(recorder, Recorder):
        traces = gather_object(make_trace(recorder, mine.buckets))
        if traces is not None:
            write_result(words.trace, trace_json(traces).encode())
