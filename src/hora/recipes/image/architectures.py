"""The names of networks and what their depth may be. Imports no torch, so that a wrong name or depth is told before a rank is started."""

import difflib
import re
from dataclasses import dataclass
from typing import Final

from hora.errors import ConfigError

TIMM: Final = "timm:"
"""What the name of a network of the package timm begins with."""


@dataclass(frozen=True)
class Depth:
    """What the depth of a family of networks may be: `extra` layers, and a multiple of `per_block`."""

    default: int
    extra: int
    per_block: int
    per_bottleneck: int

    def blocks(self, depth: int, *, bottleneck: bool) -> int:
        """Blocks of each of the three stages.

        Raises:
            ConfigError: there is no network of this depth.
        """
        unit = self.per_bottleneck if bottleneck else self.per_block
        count, rest = divmod(depth - self.extra, unit)
        if count < 1 or rest:
            raise ConfigError(
                f"model.depth must be {unit}n + {self.extra} ({self.extra + unit}, {self.extra + 2 * unit}, {self.extra + 3 * unit}, ...) "
                f"{'with' if bottleneck else 'without'} bottlenecks, but is {depth} instead"
            )
        return count


VGG: Final = tuple(f"vgg{depth}{suffix}" for depth in (11, 13, 16, 19) for suffix in ("", "-bn"))
IMAGENET_RESNETS: Final = ("resnet18", "resnet34", "resnet50")
FAMILIES: Final = {
    "resnet": Depth(default=20, extra=2, per_block=6, per_bottleneck=9),
    "preresnet": Depth(default=20, extra=2, per_block=6, per_bottleneck=6),
    "resnext": Depth(default=29, extra=2, per_block=9, per_bottleneck=9),
    "wide-resnet": Depth(default=28, extra=4, per_block=6, per_bottleneck=6),
    "densenet": Depth(default=100, extra=4, per_block=3, per_bottleneck=6),
}
"""Networks that come in any depth."""
WITHOUT_CHOICE: Final = {"preresnet": False, "resnext": True, "wide-resnet": False}
"""Those of them that always have bottlenecks, or never."""
NAMES: Final = ("convnet", "lenet", "alexnet", *VGG, *FAMILIES, *IMAGENET_RESNETS)
_ALIASES: Final = {"wrn": "wide-resnet", "wideresnet": "wide-resnet", "lenet5": "lenet"}


def has_batch_norm(name: str) -> bool:
    """Whether a network has BatchNorm, as far as that is known here: of timm's most do."""
    arch, _ = canonical_arch(name)
    return arch not in ("lenet", "alexnet") and (arch not in VGG or arch.endswith("-bn"))


def canonical_arch(name: str) -> tuple[str, int | None]:
    """The name as it is known here, and the depth that it gives: `vgg19_bn` is `vgg19-bn`, `wrn` is `wide-resnet`, `resnet110` is `resnet` of 110.

    Raises:
        ConfigError: there is no such network.
    """
    if name.startswith(TIMM):
        return name, None
    plain = name.lower().replace("_", "-")
    plain = _ALIASES.get(plain, plain)
    if plain in NAMES:
        return plain, None
    if found := re.fullmatch(r"resnet-?(\d+)", plain):
        return "resnet", int(found[1])
    nearest = difflib.get_close_matches(plain, NAMES, n=1)
    raise ConfigError(
        f"model.arch must be one of {', '.join(NAMES)}, resnet and its depth (resnet110), or {TIMM}NAME, but is {name!r} instead"
        + (f"; did you mean {nearest[0]}?" if nearest else "")
    )
