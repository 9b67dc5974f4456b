import sys

import pytest
import torch
from torch import nn

from hora.errors import ConfigError
from hora.recipes.image.architectures import canonical_arch, has_batch_norm
from hora.recipes.image.config import ModelConfig
from hora.recipes.image.models import build_model


def built(channels: int = 3, size: int = 32, num_classes: int = 10, seed: int = 0, **model: object) -> nn.Module:
    return build_model(ModelConfig(**model), channels=channels, size=size, num_classes=num_classes, seed=seed)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def vgg_count(convolutions: list[int]) -> int:
    widths = [width for width, times in zip((64, 128, 256, 512, 512), convolutions, strict=True) for _ in range(times)]
    return sum(9 * before * after + 3 * after for before, after in zip([3, *widths], widths, strict=False)) + 5130


# Published: rounded in the papers, exact in well-known implementations. Computed by hand: the three small ones and VGG.
COUNTS = [
    ({"arch": "convnet", "channels": 1, "size": 28}, 416 + 32 + 12832 + 64 + 15690),
    ({"arch": "lenet", "channels": 1, "size": 28}, 61_706),
    ({"arch": "lenet"}, 62_006),
    ({"arch": "alexnet"}, 23_296 + 307_392 + 663_936 + 884_992 + 590_080 + 2_570),
    ({"arch": "vgg11_bn"}, vgg_count([1, 1, 2, 2, 2])),
    ({"arch": "vgg13-bn"}, 9_416_010),
    ({"arch": "vgg16-bn"}, 14_728_266),
    ({"arch": "vgg19-bn"}, 20_040_522),
    ({"arch": "vgg19"}, 20_040_522 - 2 * (2 * 64 + 2 * 128 + 4 * 256 + 8 * 512)),
    ({"arch": "resnet"}, 269_722),
    ({"arch": "resnet32"}, 464_154),
    ({"arch": "resnet44"}, 658_586),
    ({"arch": "resnet", "depth": 56}, 853_018),
    ({"arch": "resnet110"}, 1_727_962),
    ({"arch": "resnet18", "size": 224, "num_classes": 1000}, 11_689_512),
    ({"arch": "resnet34", "size": 224, "num_classes": 1000}, 21_797_672),
    ({"arch": "resnet50", "size": 224, "num_classes": 1000}, 25_557_032),
    ({"arch": "resnet18"}, 11_173_962),
    ({"arch": "wrn"}, 36_479_194),
    ({"arch": "wrn", "num_classes": 100}, 36_536_884),
    ({"arch": "densenet"}, 769_162),
    ({"arch": "densenet", "depth": 40, "bottleneck": False, "compression": 1}, 1_019_722),
]


@pytest.mark.parametrize(
    ("settings", "expected"), COUNTS, ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else ""
)
def test_network_has_the_published_number_of_parameters(settings: dict[str, object], expected: int) -> None:
    with torch.device("meta"):
        assert count(built(**settings)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "millions"),
    [
        ({"arch": "densenet", "depth": 100, "bottleneck": False, "compression": 1}, 7.0),
        ({"arch": "densenet", "depth": 250, "growth_rate": 24}, 15.3),
        ({"arch": "densenet", "depth": 190, "growth_rate": 40}, 25.6),
        ({"arch": "wrn", "depth": 40, "widen_factor": 4}, 8.9),
        ({"arch": "wrn", "depth": 16, "widen_factor": 8}, 11.0),
        ({"arch": "preresnet", "depth": 110}, 1.7),
        ({"arch": "resnext"}, 34.4),
        ({"arch": "resnext", "cardinality": 16}, 68.1),
    ],
)
def test_network_is_as_large_as_published(settings: dict[str, object], millions: float) -> None:
    with torch.device("meta"):
        assert count(built(**settings)) / 1e6 == pytest.approx(millions, abs=0.06)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arch", ["convnet", "lenet", "alexnet", "vgg11", "vgg11-bn", "resnet", "resnet18", "resnext", "wide-resnet", "densenet"]
)
def test_network_gives_logits_and_depends_on_all_its_weights(arch: str) -> None:
    with torch.device("meta"):  # shapes alone
        model = built(arch=arch, num_classes=7)
        logits = model(torch.randn(3, 3, 32, 32))
        assert logits.shape == (3, 7)
        logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert has_batch_norm(arch) == any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize(("arch", "least"), [("convnet", 4), ("lenet", 16), ("alexnet", 21)])
def test_an_image_that_leaves_nothing_for_the_last_layer_is_refused(arch: str, least: int) -> None:
    with torch.device("meta"):
        assert built(arch=arch, size=least)(torch.randn(1, 3, least, least)).shape == (1, 10)
        with pytest.raises(ConfigError, match=f"{arch} needs images of at least {least} x {least}, but they are {least - 1}"):
            built(arch=arch, size=least - 1)


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (built(arch="resnet", seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["stem.0.weight"], other["stem.0.weight"])


def test_names_may_be_spelled_as_in_other_scripts() -> None:
    assert [canonical_arch(name) for name in ("vgg19_bn", "ResNet110", "wrn", "resnet18")] == [
        ("vgg19-bn", None), ("resnet", 110), ("wide-resnet", None), ("resnet18", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "vgg91"}, "did you mean vgg11|did you mean vgg19"),
        ({"arch": "resnet21"}, r"model.depth must be 6n \+ 2 \(8, 14, 20, ...\) without bottlenecks, but is 21"),
        ({"arch": "resnet", "depth": 20, "bottleneck": True}, r"9n \+ 2 \(11, 20"),
        ({"arch": "resnet20", "depth": 32}, "must agree with model.arch"),
        ({"arch": "vgg19", "depth": 20}, "model.depth and model.bottleneck are of"),
        ({"arch": "wrn", "depth": 27}, r"6n \+ 4"),
        ({"arch": "wrn", "bottleneck": True}, "no bottlenecks"),
        ({"arch": "resnext", "bottleneck": False}, "always bottlenecks"),
    ],
)
def test_network_that_does_not_exist_is_refused(settings: dict[str, object], message: str) -> None:
    if settings == {"arch": "resnet", "depth": 20, "bottleneck": True}:
        ModelConfig(**settings)  # type: ignore[arg-type]  # 9 * 2 + 2
        settings = {**settings, "depth": 32}
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)  # type: ignore[arg-type]


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32 x 32, but are 8 x 8"):
        built(arch="vgg11", size=8)


def test_timm_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match="pip install timm"):
        built(arch="timm:vit_tiny_patch16_224")


class Timm:
    __version__ = "9"

    @staticmethod
    def is_model(name: str) -> bool:
        return name == "tiny"

    @staticmethod
    def create_model(name: str, *, pretrained: bool, in_chans: int, num_classes: int) -> nn.Module:
        assert not pretrained
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * 64, num_classes))


def test_network_of_timm_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", Timm)
    assert built(arch="timm:tiny", channels=1, size=8)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ConfigError, match="has no network 'none'"):
        built(arch="timm:none")
