"""What is committed and restored: the state of a script, without and with plain objects in it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from typing_extensions import override

from hora.errors import CheckpointMismatch
from hora.hvd import asynchronous, state
from hora.hvd.exceptions import HostsUpdatedInterrupt
from hora.hvd.handles import synchronize

_REMOVED, _ADDED = 1, 2


class EndAsked(HostsUpdatedInterrupt):
    """Somebody wants the ranks to save and end: their launcher, which may start others then, or a scheduler."""


class Shelf(Protocol):
    """Where commits are kept for the processes that come after this one.

    Attributes:
        prospect: who will find them, for people.
    """

    prospect: str

    def keep(self, tree: Callable[[], Any]) -> None:
        """Keeps what `tree` gives, in the place of what was kept before."""

    def end(self) -> None:
        """The ranks end with exit code 75."""


class Notice(Protocol):
    """Whether this rank has been asked to save and end."""

    @property
    def requested(self) -> bool:
        """It has."""


class NoShelf:
    """Commits are in memory only."""

    prospect = "nobody finds what was committed"

    def keep(self, tree: Callable[[], Any]) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""


class NoNotice:
    """A signal ends this rank, as ever."""

    requested = False


class State:
    """What a function of `elastic.run` goes on from; subclasses say what it is.

    Args:
        bcast_object: gives every rank an object of rank 0.
        get_rank: the number of this rank.
    """

    _shelf: Shelf = NoShelf()
    _notice: Notice = NoNotice()
    _commits = 0

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._updates, self._last_update = 0, 0.0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Has functions called after each reset, when the number of ranks may be another one: to set the learning rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Ranks have met anew."""
        self._updates = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = _ADDED) -> None:
        """Hosts have come (2), gone (1) or both (3), which `check_host_updates` of all ranks is to raise."""
        if timestamp > self._last_update:
            self._last_update = timestamp
            self._updates |= update_res

    def commit(self) -> None:
        """Saves the state, where processes that come after these find it too, and calls `check_host_updates`.

        Collective: all ranks call it, in the same step.

        Raises:
            HostsUpdatedInterrupt: as `check_host_updates`.
        """
        self.save()
        self._shelf.keep(self._to_tree)
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Returns, unless ranks are to come or go.

        Collective: all ranks call it, in the same step.

        Raises:
            HostsUpdatedInterrupt: on all ranks: they are, as one of them has been told.
        """
        told = torch.tensor([bool(self._updates & _REMOVED), bool(self._updates & _ADDED), self._notice.requested], device="cpu")
        if state.is_running():
            told = synchronize(asynchronous.allreduce_async(told, name="elastic.host_updates", op=asynchronous.Sum))  # of bool: any
        removed, added, end = told.tolist()
        if end:
            raise EndAsked
        if removed or added:
            self._updates = 0
            raise HostsUpdatedInterrupt(skip_sync=not added)

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Ranks have met anew; what depends on their number is made anew."""

    def _is_kept(self) -> bool:
        """Whether `_to_tree` and `_from_tree` are there."""
        return False

    def _to_tree(self) -> Any:
        """What was saved last, as a tree (`hora.comm.codec`)."""
        raise NotImplementedError

    def _from_tree(self, tree: Any) -> None:
        """Restores what `_to_tree` gave, maybe in another process."""
        raise NotImplementedError


class ObjectState(State):
    """A state of plain objects, which are its attributes.

    Args:
        bcast_object: as in `State`.
        get_rank: as in `State`.
        **kwargs: the objects, by the names of the attributes.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object, get_rank)

    @override
    def save(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    @override
    def restore(self) -> None:
        # Copies: what the script does to its objects must not change what was saved.
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    @override
    def sync(self) -> None:
        if self._saved_state:
            ObjectState.save(self)  # what the script has set since it made the state counts
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    @override
    def _is_kept(self) -> bool:
        return True

    @override
    def _to_tree(self) -> Any:
        return {"objects": self._saved_state}

    @override
    def _from_tree(self, tree: Any) -> None:
        kept, mine = ({kind: sorted(values) for kind, values in each.items()} for each in (tree, self._to_tree()))
        if kept != mine:
            raise CheckpointMismatch(
                f"a commit must hold what the state of the script has, {mine}, but holds {kept}; begin anew with an empty directory"
            )
        self._load(tree)
        self.restore()

    def _load(self, tree: Any) -> None:
        self._saved_state = tree["objects"]
