"""What a translation run is made of: one tree of dataclasses in the four sections of NJUNMT-pytorch, with its keys.

Imports no torch, so that a wrong value is told before a rank is started.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from hora.errors import ConfigError
from hora.recipes.nmt.symbols import SYMBOLS

NUM_SYMBOLS = len(SYMBOLS)

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Policy = Literal["error", "skip", "replace"]


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    `label_smoothing` is that of the training loss. `d_word_vec` is the width of embeddings; the Transformer's must be `d_model`.
    `dim_per_head` None means `d_model // n_head`. `tie_input_output_embedding`: the decoder's embedding is its output matrix too;
    `tie_source_target_embedding`: and the encoder's embedding, for which the vocabularies must be one. `layer_norm_first` normalises what
    goes into a layer, not what comes out. `bridge_type` is the DL4MT's alone: how its decoder begins, `mlp` from the encoder's states,
    `zero` from nothing. `dropout` is that of embeddings and of what each layer adds; in a Transformer's attention and inside its perceptron
    it is `attention_dropout` and `activation_dropout`, None: the same.
    """

    model: Literal["Transformer", "DL4MT"] = "Transformer"
    label_smoothing: Share = 0.0
    n_layers: Count = 6
    n_head: Count = 8
    d_word_vec: Count = 512
    d_model: Count = 512
    d_inner_hid: Count = 1024
    dim_per_head: Count | None = None
    dropout: Share = 0.1
    attention_dropout: Share | None = None
    activation_dropout: Share | None = None
    tie_input_output_embedding: bool = True
    tie_source_target_embedding: bool = False
    layer_norm_first: bool = True
    positional_embedding: Literal["sin", "learned", "none"] = "sin"
    ffn_activation: Literal["relu", "gelu"] = "relu"
    generator_bias: bool = False
    bridge_type: Literal["mlp", "zero"] = "mlp"

    def __post_init__(self) -> None:
        if self.model != "Transformer":
            for name in ("attention_dropout", "activation_dropout"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is a Transformer's, but the model is {self.model}; leave it out")
            return
        if self.d_model != self.d_word_vec:
            raise ConfigError(f"a Transformer's d_word_vec must be its d_model, but they are {self.d_word_vec} and {self.d_model}")
        if self.dim_per_head is None and self.d_model % self.n_head:
            raise ConfigError(f"d_model = {self.d_model} must be a multiple of n_head = {self.n_head}, or dim_per_head be given")


@dataclass(frozen=True)
class VocabularyConfig:
    """One vocabulary.

    `type` word: what stands between white space; bpe: parts of words, of sentencepiece, or with `codes` of subword-nmt (`@@`). `dict_path`
    holds words or parts (`hora vocab`, or one a line); empty: they come from the training text. `max_n_words` cuts the list, the four
    symbols counted; -1 keeps all. `codes`: merges of subword-nmt. `sentencepiece`: a model of sentencepiece; empty, and without `codes`:
    one is trained, with `max_n_words` parts (-1: 8000).
    """

    type: Literal["word", "bpe"] = "word"
    dict_path: str = ""
    max_n_words: Annotated[int, Field(ge=-1)] = -1
    codes: str | None = None
    sentencepiece: str | None = None

    def __post_init__(self) -> None:
        if self.type == "word" and (self.codes or self.sentencepiece):
            raise ConfigError("a vocabulary with codes or sentencepiece must be of type bpe, but is of type word")
        if self.codes and self.sentencepiece:
            raise ConfigError("a vocabulary has codes or sentencepiece, but has both; leave one out")
        if self.dict_path and self.sentencepiece:
            raise ConfigError("the parts of sentencepiece are those of its model, so dict_path cannot be given with it; leave one out")
        if -1 < self.max_n_words <= NUM_SYMBOLS:
            raise ConfigError(f"max_n_words must be more than the {NUM_SYMBOLS} symbols, or -1, but is {self.max_n_words}")


@dataclass(frozen=True)
class DataConfig:
    """The texts: two files each, source and target, a sentence a line, plain or `.gz`; `excerpt:NAME` is a file that comes with Hora.

    `lang_pair`: the names of the two languages, such as `en-de`. `test_data` is optional. `vocabularies`: one for each side, or a single
    one for both. `max_len`: most words or parts of a training sentence on each side; -1 for any number. `undecodable`, `empty` and
    `overlong` say what happens to lines that are not UTF-8, have nothing on a side, or are longer than that: `replace` puts U+FFFD for the
    wrong bytes, keeps the empty side, cuts the long one; of `valid_data` and `test_data` no line is skipped for being empty or long.
    `cache`: where numbered texts are kept. `bleu_valid_reference`: the reference, or with `num_refs` > 1 what their names begin with;
    empty: the target of `valid_data`.
    """

    train_data: tuple[str, str]
    valid_data: tuple[str, str]
    test_data: tuple[str, str] | None = None
    lang_pair: str = "source-target"
    vocabularies: tuple[VocabularyConfig, ...] = (VocabularyConfig(), VocabularyConfig())
    max_len: tuple[int, int] = (-1, -1)
    undecodable: Policy = "error"
    empty: Policy = "skip"
    overlong: Policy = "skip"
    cache: str = ""
    bleu_valid_reference: str = ""
    num_refs: Count = 1
    eval_at_char_level: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.vocabularies) <= 2:
            raise ConfigError(f"vocabularies must be one for each side, or one for both, but are {len(self.vocabularies)}")
        if any(length == 0 or length < -1 for length in self.max_len):
            raise ConfigError(f"max_len must be at least 1 on each side, or -1, but is {list(self.max_len)}")
        if len(self.languages) != 2:
            raise ConfigError(f"lang_pair must be two names with a hyphen between, such as en-de, but is {self.lang_pair!r}")

    @property
    def languages(self) -> list[str]:
        """The names of source and target."""
        return [name for name in self.lang_pair.split("-") if name]


@dataclass(frozen=True)
class ScheduleConfig:
    """Numbers of the schedules; each reads those that it knows (see `hora.train.schedules`).

    `decay_steps` None: never (isqrt), or as many as the run has (linear, cosine). `d_model` None: that of the model. The rate falls no
    lower than `min_lr`. `patience`, `scale` and `mode` are those of loss: after more validations in a row that are no better the rate is
    multiplied by `scale`; `mode` min looks at the loss, max at BLEU.
    """

    warmup_steps: Annotated[int, Field(ge=0)] = 4000
    decay_steps: Count | None = None
    init_lr: Annotated[float, Field(ge=0)] = 1e-7
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    d_model: Count | None = None
    patience: Annotated[int, Field(ge=0)] = 0
    scale: Annotated[float, Field(gt=0, lt=1)] = 0.5
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True)
class OptimizerConfig:
    """The update.

    `optimizer_params` are arguments of the optimizer of PyTorch. `grad_clip` cuts the norm of the gradient over all parameters; -1 leaves
    it.
    """

    optimizer: Literal["adam", "adamw", "adafactor", "sgd", "adadelta", "adagrad", "rmsprop", "asgd", "rprop"] = "adam"
    learning_rate: Amount = 1e-3
    grad_clip: float = -1.0
    optimizer_params: dict[str, Any] | None = None
    schedule_method: Literal["noam", "linear", "isqrt", "cosine", "loss"] | None = None
    scheduler_configs: ScheduleConfig | None = None


@dataclass(frozen=True)
class BleuConfig:
    """How validation translates and scores."""

    max_steps: Count = 150
    beam_size: Count = 5
    alpha: float = 0.0
    postprocess: bool = False
    sacrebleu_args: str = ""


@dataclass(frozen=True)
class TrainingConfig:
    """The course of the run.

    The global batch has `batch_size * update_cycle` sentences (`batching_key` samples) or tokens (the longest side times the sentences,
    padding counted), on any number of ranks; no rank takes more than `batch_size` at once. `use_bucket` puts sentences of like length
    together, `shuffle` draws a new order each epoch. `valid_batch_size` sentences are validated at once, over all ranks.

    The loss is divided by the target `tokens` of the global batch or its `sentences` (`normalize`); `norm_by_words`: each sentence's loss
    by its own length first, then by the sentences.

    `*_freq` count steps; 0 or less is never. `loss_valid_freq` None: at the end of each epoch. `save_freq` None: with each validation.
    `bleu_valid_warmup`: no BLEU in the first epochs (up to 50) or steps (more). `early_stop_patience`: the run ends after so many
    validations in a row that are no better.

    `moving_average_method`: validate, and keep, the average of the weights from `moving_average_start_epoch` on: of all alike (sma), or
    such that the average stays with a share of `moving_average_alpha` at each step (ema).

    `exact`, `logical_ranks`, `num_threads`, `precision`, `compile`, `capture`, `strategy`, `tf32`, `tensorboard`, `background` and
    `end_after_failed_saves` (these two of `checkpoint` there) are as of the recipe lm; `compile` may be parts or
    regions too (see `TrainStep`). `buffer_size` is accepted and has no effect: batches are planned over the whole epoch.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    max_epochs: Count = 10000
    max_steps: Count | None = None
    shuffle: bool = True
    use_bucket: bool = True
    batching_key: Literal["samples", "tokens"] = "samples"
    buffer_size: Count | None = None
    batch_size: Count = 64
    update_cycle: Count = 1
    normalize: Literal["tokens", "sentences"] = "tokens"
    norm_by_words: bool = False
    valid_batch_size: Count = 64
    disp_freq: int = 100
    save_freq: int | None = None
    num_kept_checkpoints: Count = 1
    num_kept_best_model: Annotated[int, Field(ge=0)] = 1
    loss_valid_freq: int | None = None
    bleu_valid_freq: int = 0
    bleu_valid_batch_size: Count = 5
    bleu_valid_warmup: Annotated[int, Field(ge=0)] = 0
    bleu_valid_configs: BleuConfig = field(default_factory=BleuConfig)
    early_stop_patience: Count = 100000
    moving_average_method: Literal["sma", "ema"] | None = None
    moving_average_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.0
    moving_average_start_epoch: Annotated[int, Field(ge=0)] = 0
    exact: bool = False
    logical_ranks: Count = 8
    num_threads: Count = 1
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool | Literal["parts", "regions"] = False
    capture: bool = True
    strategy: Literal["overlap", "deferred", "sharded"] = "overlap"
    tf32: bool = False
    tensorboard: bool = True
    background: bool = True
    end_after_failed_saves: Count = 3


@dataclass(frozen=True)
class NmtConfig:
    """A whole run."""

    data_configs: DataConfig
    model_configs: ModelConfig = field(default_factory=ModelConfig)
    optimizer_configs: OptimizerConfig = field(default_factory=OptimizerConfig)
    training_configs: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        schedule = self.optimizer_configs.scheduler_configs
        by_bleu = self.optimizer_configs.schedule_method == "loss" and schedule is not None and schedule.mode == "max"
        if by_bleu and self.training_configs.bleu_valid_freq <= 0:
            raise ConfigError(
                "the schedule loss with mode max looks at BLEU, but training_configs.bleu_valid_freq = "
                f"{self.training_configs.bleu_valid_freq} measures none; set it, or use mode min"
            )
