"""Worker processes of torch's loader: how they are started, what they ignore, how their failure is told, and that none outlives this process.

What torch's own loader leaves open: without a timeout a stuck worker stops the job for good; a SIGTERM or Ctrl-C to the whole group takes the
workers and with them the last step and its checkpoint; at exit a stopped worker is waited for without end; forked workers of a process that
uses CUDA can hang. Relies on public parts of torch and multiprocessing alone.
"""

import atexit
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader as TorchLoader

from hora.data.patience import Patience
from hora.errors import ConfigError, DataError

TIMEOUT_S = 120.0
"""How long a micro-batch may take a worker unless `timeout` says otherwise."""


class TorchOptions(TypedDict, total=False):
    """The arguments of torch's DataLoader that are passed on; they mean what they mean there."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    prefetch_factor: int | None
    persistent_workers: bool


_LOOK_S = 0.5
_PAST_THE_END = object()
_ELSEWHERE = {
    "batch_size": "use global_batch_size, the samples of one update over all ranks, and micro_batch_size",
    "generator": "use seed",
    "in_order": "micro-batches always come in order",
}


def check_options(options: TorchOptions) -> None:
    """Refuses what is no argument of a loader.

    Raises:
        ConfigError: an argument is unknown or belongs to another one here; all are named.
    """
    known = TorchOptions.__annotations__
    problems = [f"{name} ({_ELSEWHERE.get(name, 'there is no such argument')})" for name in options if name not in known]
    if problems:
        raise ConfigError(f"hora.DataLoader does not take {'; '.join(problems)}; of torch's own arguments it takes {', '.join(known)}")


class WorkerPool:
    """Torch's loader over `dataset`, with its worker processes looked after.

    Args:
        dataset: yields what is handed out, collated already.
        sampler: the requests for `dataset`; None for one that is iterated.
        options: the user's.
        seed: of what workers draw before the data set seeds their generators.

    Raises:
        ConfigError: torch refuses the options.
    """

    def __init__(self, dataset: Any, sampler: Any, options: TorchOptions, seed: int):
        settings: dict[str, Any] = {name: value for name, value in options.items() if name != "collate_fn"}
        self._processes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._timeout_s = settings.pop("timeout", TIMEOUT_S)
        self._context = settings.pop("multiprocessing_context", None)
        _choose_context(self._context)
        if settings.get("num_workers", 0) > 0:
            # Torch looks whether its workers live when its timeout has passed; so it gets a short one, as often as needed.
            settings["timeout"] = min(self._timeout_s, _LOOK_S) or _LOOK_S
            settings["worker_init_fn"] = _WorkerStart(settings.get("worker_init_fn"))
            # After multiprocessing's own handler, which waits for its children, so that it runs before that one.
            atexit.register(kill_processes, self._processes)
        elif options.get("timeout"):
            raise ConfigError(f"timeout={self._timeout_s} is for worker processes; use it with num_workers of at least 1")
        settings |= {"batch_size": None} if sampler is None else {"batch_sampler": sampler}
        self._make = partial(TorchLoader, dataset, collate_fn=_as_it_is, **settings)
        self._seed = seed  # of torch's base seed, which it would draw from the global generator
        try:
            self._loader: TorchLoader[Any] = self._renew()
        except ValueError as error:
            raise ConfigError(f"torch's DataLoader refuses its arguments: {error}") from error

    def batches(self, waiting_for: Callable[[], str]) -> Iterator[Any]:
        """Iterates the data set once; `waiting_for` says what is being loaded, for errors.

        Raises:
            DataError: a worker died, or did not answer in time.
            ConfigError: the data set cannot be sent to workers.
        """
        iterator: Iterator[Any] | None = None
        try:
            with self._failures_told(waiting_for), _sending():
                iterator = self._start()
            with self._patience() as patience:
                while True:
                    with self._failures_told(waiting_for, patience), patience.waiting():
                        batch = self._next(iterator)
                    if batch is _PAST_THE_END:
                        return
                    yield batch
        finally:
            iterator = None  # with it torch ends the workers; it gives up on those that ignore SIGTERM
            if not self._loader.persistent_workers:
                kill_processes(self._processes)

    def _start(self) -> Iterator[Any]:
        if self._loader.num_workers > 0:  # chosen now: the loader may be older than the use of CUDA
            self._loader.multiprocessing_context = _recording(_choose_context(self._context), self._processes)
            # Workers that are killed leave their temporary directories to nobody: theirs is this process's, which removes it when it ends.
            multiprocessing.util.get_temp_dir()
        # Torch's handler of SIGCHLD would raise its error about a dead worker wherever this process stands: in the model, in a save. And where
        # `torch.set_default_device` names a GPU, torch draws its seed there, which its generator refuses, and forked workers could not use it.
        with _children_unwatched(), torch.device("cpu"):
            return iter(self._loader)

    def _next(self, iterator: Iterator[Any]) -> Any:
        deadline = time.monotonic() + (self._timeout_s or math.inf)
        while True:
            try:
                return next(iterator, _PAST_THE_END)
            except RuntimeError as error:
                if not _is_timeout(error) or time.monotonic() >= deadline:
                    raise

    def _patience(self) -> Patience:
        """Ends workers for which torch's own timeout does not."""
        bounded = self._loader.num_workers > 0 and 0 < self._timeout_s < math.inf
        return Patience(self._timeout_s + 2 * _LOOK_S if bounded else 0.0, self._end_stuck)

    def _end_stuck(self) -> None:
        """In a thread: the main one learns of it from what it waits for, and leaves the rest to `_abandon`."""
        for process in list(self._processes):
            process.kill()

    @contextmanager
    def _failures_told(self, waiting_for: Callable[[], str], patience: Patience | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            broken = isinstance(error, ConnectionError | EOFError)
            if broken:  # by a worker that is being killed while it hands over a tensor, or by the data set itself
                self._await_an_end()
            ends = self._ends()
            self._abandon(error)
            if _is_timeout(error) or (patience is not None and patience.lost):
                raise DataError(
                    f"{waiting_for()} did not come within timeout={self._timeout_s:g} s: a worker is stuck, or loading is slow; look at the "
                    "data set, or give a larger timeout"
                ) from error
            if (broken and ends) or (isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")):
                raise DataError(
                    f"{waiting_for()} did not come: {ends or error}; see what the worker printed; a SIGKILL that nobody sent is often the "
                    "system running out of memory"
                ) from error
            error.add_note(f"while loading {waiting_for()}")
            raise

    def _await_an_end(self) -> None:
        """Waits a moment for a worker that is about to end."""
        sentinels = {process.sentinel: process for process in list(self._processes)}
        for sentinel in multiprocessing.connection.wait(list(sentinels), _LOOK_S):
            sentinels[sentinel].join(_LOOK_S)  # its files are closed before it has an exit code

    def _ends(self) -> str:
        ended = [process for process in self._processes if process.exitcode]
        return ", ".join(f"worker process {process.pid} ended with {_say_exit(process.exitcode)}" for process in ended)

    def _renew(self) -> TorchLoader[Any]:
        return self._make(generator=torch.Generator().manual_seed(self._seed))

    def _abandon(self, error: Exception) -> None:
        """Ends the workers; the next pass starts new ones."""
        if len(self._processes) > 0:
            kill_processes(self._processes)
            traceback.clear_frames(error.__traceback__)  # torch's frames, which keep its iterator alive in a cycle
            self._loader = self._renew()


def kill_processes(processes: "weakref.WeakSet[Any]") -> None:
    """Ends those of `processes` that are alive, stopped ones too. In the main thread only: elsewhere torch would raise an error about it."""
    alive = [process for process in processes if process.is_alive()]
    if not alive or threading.current_thread() is not threading.main_thread():
        return
    with _children_unwatched():
        for process in alive:
            process.kill()
        for process in alive:
            process.join()


@contextmanager
def _children_unwatched() -> Iterator[None]:
    """Leaves the handler of SIGCHLD as it was, and out of force meanwhile: children that end are no surprise."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def _say_exit(code: int) -> str:
    try:
        return f"exit code {code}" if code > 0 else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class _WorkerStart:
    """What a worker does first: it leaves SIGTERM and Ctrl-C, which reach the whole group, to its rank, which needs it for one more step."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def _choose_context(asked: str | BaseContext | None) -> BaseContext:
    if isinstance(asked, BaseContext):
        return asked
    try:
        context = multiprocessing.get_context(asked)
    except ValueError as error:
        raise ConfigError(
            f"multiprocessing_context must be one of {', '.join(multiprocessing.get_all_start_methods())}: {error}"
        ) from error
    # The locks of CUDA's threads are copied by a fork, their holders are not (pytorch#40403, #2971).
    if asked is None and torch.cuda.is_initialized() and context.get_start_method() == "fork":
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(["__main__", "hora.data.loader"])  # or each worker imports torch anew: seconds against 0.1 s
        return forkserver
    return context


def _recording(context: BaseContext, processes: "weakref.WeakSet[Any]") -> BaseContext:
    """A context of the same kind that adds the processes it makes to `processes`."""
    recording = type(context)()

    def process(*args: Any, **kwargs: Any) -> Any:
        made = context.Process(*args, **kwargs)  # type: ignore[attr-defined]
        processes.add(made)
        return made

    recording.Process = process  # type: ignore[attr-defined]
    return recording


@contextmanager
def _sending() -> Iterator[None]:
    """Says what to do when the data set cannot be sent to workers that are not forked."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
            # From Python 3.12 on; whether to fork has been decided by then.
            warnings.filterwarnings("ignore", ".*use of fork\\(\\) may lead to deadlocks", DeprecationWarning)
            yield
    except Exception as error:
        if not isinstance(error, TypeError | AttributeError) and type(error).__name__ != "PicklingError":
            raise
        raise ConfigError(
            f"the data set, collate_fn and worker_init_fn must be such that they can be sent to worker processes, but: {error}. Define them at "
            'the top of a module, or pass multiprocessing_context="fork" if nothing in them touches the GPU'
        ) from error
