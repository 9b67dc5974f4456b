"""A process group written in Python that carries out one collective after the other: what `shm` and `mpi` have in common.

A call that its caller waits for is carried out where it is made; others go to a thread of the group, in the order in which they come. What
PyTorch wants of such groups, and where it fails without a word (each has a test):

- A `Work` made of a future loses the exception of that: ours raises from `wait`.
- `Future.set_exception` of a Python exception crashes DistributedDataParallel's reducer: futures fail by a callback that raises.
- Callbacks run where a future is completed, and may make a collective and wait for it: that is never the thread that carries collectives out.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from hora.comm.backends.python_group import PythonGroup
from hora.comm.torch_private import PythonWork

THREAD_NAME = "hora-group"
"""Of all threads of a group; they end with it."""

_CALLBACK_THREADS = 16


class Failed(RuntimeError):
    """A call did not come to its end: ranks are gone or late. The group is of no use any more."""


class Mismatched(Failed):
    """The ranks are about to do different things; none has done anything, all know of it, and the group goes on."""


class QueuedWork(PythonWork):  # type: ignore[misc]
    """The handle of one collective.

    Args:
        result: what its future is to hold.
        timeout_s: how long `wait` waits at most.
        callbacks: where callbacks of the future run.
    """

    def __init__(self, result: Any, timeout_s: float, callbacks: ThreadPoolExecutor):
        super().__init__()
        self._result = result
        self._timeout_s = timeout_s
        self._callbacks = callbacks
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._trigger: Future[None] | None = None
        self._future: Future[Any] | None = None

    def finish(self, error: BaseException | None) -> None:
        """The collective has ended, well or with `error`."""
        with self._lock:
            self._error = error
            self._done.set()
            trigger = self._trigger
        if trigger is not None:
            self._callbacks.submit(trigger.set_result, None)

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done.wait(timeout.total_seconds() if timeout else self._timeout_s):
            raise RuntimeError("timed out: the collective is not done")
        if self._error is not None:
            raise self._error
        return True

    @override
    def is_completed(self) -> bool:
        return self._done.is_set()

    @override
    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    @override
    def exception(self) -> BaseException | None:
        return self._error

    @override
    def result(self) -> Any:
        return self._result

    @override
    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is None:
                trigger: Future[None] = Future()
                self._trigger, self._future = trigger, trigger.then(self._outcome)
                if self._done.is_set():
                    self._callbacks.submit(trigger.set_result, None)
            return self._future

    def _outcome(self, _: Future[None]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class FinishedWork(PythonWork):  # type: ignore[misc]
    """The handle of a collective that was carried out before its call returned."""

    def __init__(self, result: Any):
        super().__init__()
        self._result = result

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    @override
    def exception(self) -> None:
        return None

    @override
    def result(self) -> Any:
        return self._result

    @override
    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class PostedCall:
    """A call of which this rank has said what it has to say; whoever first wants the answers, or comes after it, waits for them.

    Args:
        finish: waits for the answers.
        end: lets others have their turn.
    """

    def __init__(self, finish: Callable[[], None], end: Callable[[], None]):
        self._finish: Callable[[], None] | None = finish
        self._end = end
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Waits for the answers, if nobody has done so; whether they came well `wait` says.

        Raises:
            KeyboardInterrupt, SystemExit: a signal ends the waiting, whatever it is for; the answers are still to be waited for.
        """
        with self._lock:
            if self._finish is not None:
                try:
                    self._finish()
                except Exception as error:
                    self._error = error
                self._finish = None
                self._end()

    def wait(self) -> bool:
        """Returns when the answers are there.

        Raises:
            Failed: they have not come.
        """
        self.finish()
        if self._error is not None:
            raise self._error
        return True


class QueuedGroup(PythonGroup):
    """The part of a group that does not depend on how bytes move.

    Args:
        rank: of this process in the group.
        size: of the group.
        timeout: of each call that does not give its own.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._timeout_s = timeout.total_seconds()
        self._broken: Failed | None = None
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._queued = 0
        self._count = threading.Lock()
        self._posted: PostedCall | None = None
        self._carrier: int | None = None
        self._queue: SimpleQueue[tuple[QueuedWork, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._callbacks = ThreadPoolExecutor(_CALLBACK_THREADS, thread_name_prefix=THREAD_NAME)

    @override
    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def require_member(self) -> None:
        """Refuses a process that was forked from the one that is in the group: it has what that one knows of it, and no part in it.

        Raises:
            RuntimeError: this is one.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"a process that is forked from a rank must make no collectives, but process {os.getpid()} was forked from {self._pid}, which "
                f"is rank {self._rank} of its group"
            )

    def require_not_inside(self) -> None:
        """Refuses a call that is made inside another one, by a handler of a signal, and would wait for that to end.

        Raises:
            RuntimeError: it is one.
        """
        if self._carrier == threading.get_ident():
            raise RuntimeError(
                "a handler of a signal must make no collectives, but this one has interrupted another one, which goes on when it returns: set a "
                "flag, as hora.Preemption does, and look at it between two steps"
            )

    def require_whole(self) -> None:
        """Refuses a group of which a call has failed.

        Raises:
            Failed: says which.
        """
        if self._broken is not None:
            raise Failed(f"the group is of no use any more since a call has failed: {self._broken}")

    def begin_call(self, timeout_s: float) -> None:
        """A call is about to be carried out, with this deadline."""

    def run(self, act: Callable[[], None], result: Any, options: Any) -> dist.Work:
        """Carries out a collective with its deadline; when it fails, it was the last one, but for calls that did not agree."""
        given_s = options.timeout.total_seconds() if options is not None else 0.0
        return self.carry_out(lambda: self._guard(act, given_s), result, options)

    def _guard(self, act: Callable[[], None], given_s: float = 0.0) -> None:
        self.require_whole()
        self.begin_call(given_s if given_s > 0 else self._timeout_s)
        self._carrier = threading.get_ident()
        try:
            act()
        except Mismatched:
            raise
        except BaseException as error:
            if isinstance(error, Failed) or self.is_half_way():
                self._broken = (
                    error if isinstance(error, Failed) else Failed(f"{type(error).__name__} has broken off a call that others wait in")
                )
                self.give_up()
            raise
        finally:
            self._carrier = None

    def post(self, begin: Callable[[], None], finish: Callable[[], None]) -> PostedCall | None:
        """Carries out a call in two halves, of which `begin` waits for nobody: it needs no thread, and costs next to nothing where the others are as
        far. None where other calls are under way, whose turn it is.
        """
        self.require_member()
        self.require_not_inside()
        with self._count:  # no call is queued meanwhile
            if self._queued or not self._turn.acquire(blocking=False):
                return None
            try:
                self._guard(begin)
            except BaseException:
                self._turn.release()
                raise
            self._posted = PostedCall(lambda: self._guard(finish), self._end_posted)
            return self._posted

    def _end_posted(self) -> None:
        self._posted = None
        self._turn.release()

    def _finish_posted(self) -> None:
        """What has been posted comes before the call that is about to be carried out."""
        if (posted := self._posted) is not None:
            posted.finish()

    def is_half_way(self) -> bool:
        """Whether a call has begun, and has not ended, from which an exception comes that is none of its own: of a handler of a signal."""
        return False

    def give_up(self) -> None:
        """A call has failed: tells the others, where they can be told."""

    @override
    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        work: dist.Work = self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)
        return work

    @override
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout or timedelta(seconds=self._timeout_s))

    def carry_out(self, action: Callable[[], None], result: Any, options: Any = None) -> dist.Work:
        """Has `action` carried out after all before it, now if the caller waits for it; `result` is what a future gives."""
        self.require_member()
        self.require_not_inside()
        waits = not getattr(options, "asyncOp", True)
        if waits:
            self._finish_posted()
        if waits and self._queued == 0 and self._turn.acquire(blocking=False):
            try:
                action()
            finally:
                self._turn.release()
            return FinishedWork(result)
        work = QueuedWork(result, self._timeout_s + _GRACE_S, self._callbacks)
        with self._count:
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
                self._thread.start()
            self._queue.put((work, action))
        return work

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, action = entry
            error: BaseException | None = None
            self._finish_posted()
            with self._turn:
                try:
                    action()
                except BaseException as raised:
                    error = raised
            with self._count:
                self._queued -= 1
            work.finish(error)
            del entry, work, action

    def close(self) -> None:
        """Lets go of whatever moves the bytes; a call under way ends with an error."""

    @override
    def shutdown(self) -> None:
        if os.getpid() != self._pid:
            return  # it has neither the threads nor a place to leave
        self.close()
        self._posted = None  # which knows the group
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(_GRACE_S)
            self._thread = None
        self._callbacks.shutdown(wait=False)

    abort = shutdown


_GRACE_S = 10.0
"""What a collective may take beyond its deadline, which it keeps itself."""
