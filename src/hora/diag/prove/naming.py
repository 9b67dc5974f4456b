"""Names of a script's parameters and buffers, from the modules that it calls; the same however they are wrapped."""

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("module", "_orig_mod")


class Naming:
    """The modules that were called from outside any other, in the order of their first call."""

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self._known: set[int] = set()
        self._tensors: set[int] = set()

    def add(self, root: nn.Module) -> bool:
        """Takes note of a call; whether the module brings tensors that were not known."""
        if id(root) in self._known:
            return False
        self._known.add(id(root))
        tensors = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        new = not tensors <= self._tensors
        self._tensors |= tensors
        if new:
            self.roots.append(root)
        return new

    def prefer(self, roots: Iterable[nn.Module]) -> None:
        """Has tensors that are in `roots` named by these."""
        self.roots = [*roots, *self.roots]

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by name."""
        return _distinct((root, root.named_parameters()) for root in self.roots)

    def buffers(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return _distinct((root, root.named_buffers()) for root in self.roots)

    def names(self) -> dict[int, str]:
        """Names of parameters by identity."""
        return {id(parameter): name for name, parameter in self.parameters().items()}

    def batch_norms(self) -> list[str]:
        """Names of the layers that normalise by the batch of their own rank, now."""
        return [
            unwrapped(name)
            for root in self.roots
            for name, module in root.named_modules()
            if isinstance(module, _BatchNorm) and module.training and "Sync" not in type(module).__name__
        ]


def _distinct(sources: Iterable[tuple[nn.Module, Iterator[tuple[str, Tensor]]]]) -> dict[str, Tensor]:
    """By unwrapped name; of two tensors with one name the later is called after its module too."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, (root, tensors) in enumerate(sources):
        for wrapped, tensor in tensors:
            name = unwrapped(wrapped)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name if name not in found else f"{name} of model {number + 1} ({type(root).__name__})"] = tensor
    return found


def unwrapped(name: str) -> str:
    """A name without what DistributedDataParallel, DataParallel and torch.compile put before it."""
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def bypassed_wrappers(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Each DistributedDataParallel that was not called itself, while one of `roots` lies inside."""
    called = {id(root) for root in roots}
    wrappers = [found for found in gc.get_objects() if type(found) is DistributedDataParallel and id(found) not in called]
    return [wrapper for wrapper in wrappers if any(id(module) in called for module in wrapper.modules())]


def is_plain(tensor: Tensor) -> bool:
    """Whether the whole tensor lies on this rank: not a DTensor or another subclass with parts elsewhere."""
    return type(tensor) in (Tensor, nn.Parameter) or type(tensor) is torch.nn.parameter.Buffer
