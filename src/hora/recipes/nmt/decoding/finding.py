"""Where a trained model lies: its weights, and the run directory that says what they are. Imports no torch, so that mistakes are told at once."""

from dataclasses import dataclass
from pathlib import Path

from hora.errors import CheckpointError, ConfigError
from hora.recipes.nmt.config import NmtConfig
from hora.recipes.nmt.vocabulary import Vocabularies
from hora.recipes.vocabularies import FILE_NAME
from hora.train.checkpoint import inspection
from hora.train.config import load_config

_CONFIG = "config.yaml"


@dataclass(frozen=True)
class Trained:
    """A trained model on the disk.

    Attributes:
        weights: a checkpoint, or a safetensors file.
        config: that of the run.
        vocabularies: of the run.
    """

    weights: Path
    config: NmtConfig
    vocabularies: Vocabularies


def find_trained(path: Path, config_path: Path | None = None) -> Trained:
    """Finds out what `path` is.

    Args:
        path: a run directory (its best checkpoint by what the run was judged by, else its newest), a checkpoint, or a safetensors file of weights.
        config_path: the configuration of the run, with its vocabularies beside it; by default looked for in `path` and above it.

    Raises:
        ConfigError: there is no such thing, or no configuration.
        CheckpointError: the vocabularies of the run are missing or damaged.
    """
    if not path.exists():
        raise ConfigError(f"--model-path must be a run directory, a checkpoint or a safetensors file, but there is no {path}")
    config_path = config_path or _config_above(path.absolute())
    if not config_path.is_file():
        raise ConfigError(f"--config-path must be a configuration, but there is no {config_path}")
    config = load_config(NmtConfig, config_path)
    weights = path if path.is_file() else _chosen(path, largest=config.training_configs.bleu_valid_freq > 0)
    return Trained(weights, config, Vocabularies.read(config_path.parent))


def find_all(paths: list[Path], config_path: Path | None = None) -> list[Trained]:
    """Finds several models that are to translate together.

    Raises:
        ConfigError: as `find_trained`, or they have other vocabularies.
    """
    found = [find_trained(path, config_path) for path in paths]
    for path, other in zip(paths, found, strict=True):
        if other.vocabularies.digest != found[0].vocabularies.digest:
            raise ConfigError(f"models that translate together must have the same vocabularies, but {path} has others than {paths[0]}")
    return found


def _config_above(path: Path) -> Path:
    for place in (path, *path.parents):
        if (place / _CONFIG).is_file() and (place / FILE_NAME).is_file():
            return place / _CONFIG
    raise ConfigError(f"no run directory with {_CONFIG} and {FILE_NAME} is at {path} or above; name its configuration with --config-path")


def _chosen(path: Path, *, largest: bool) -> Path:
    """The checkpoint at `path` with the best metric; without any, the newest."""
    findings = [inspection.inspect(found, every_byte=False) for found in inspection.find(path)]
    whole = [finding for finding in findings if not finding.damage]
    if not whole:
        raise CheckpointError(f"every checkpoint at {path} is damaged; see hora checkpoint verify {path}")
    judged = [(finding.manifest.metric, finding.path) for finding in whole if finding.manifest and finding.manifest.metric is not None]
    if not judged:
        return whole[-1].path
    return max(judged, key=lambda pair: pair[0] if largest else -pair[0])[1]
