from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.recipes.nmt.named import NAMED, merged
from hora.recipes.nmt.resolve import require_files, resolve_config
from hora.recipes.nmt.triggers import Due, Progress, due_after
from hora.train.config import dump_config

OF_NJUNMT = """
data_configs:
  lang_pair: "zh-en"
  train_data:
    - "train/zh.txt"
    - "train/en.txt"
  valid_data:
    - "test/mt03.src"
    - "test/mt03.ref0"
  bleu_valid_reference: "test/mt03.ref"
  vocabularies:
    - type: "word"
      dict_path: "vocab/zh.json"
      max_n_words: 30000
    - type: "bpe"
      dict_path: "vocab/en.json"
      max_n_words: -1
      codes: "vocab/codes.en"
  max_len:
    - 80
    - -1
  num_refs: 4
  eval_at_char_level: false

model_configs:
  model: Transformer
  n_layers: 6
  n_head: 8
  d_word_vec: 512
  d_model: 512
  d_inner_hid: 2048
  dropout: 0.1
  tie_input_output_embedding: true
  layer_norm_first: true
  positional_embedding: learned
  ffn_activation: gelu
  generator_bias: true
  label_smoothing: 0.1

optimizer_configs:
  optimizer: "adam"
  learning_rate: 0.2
  grad_clip: -1.0
  optimizer_params: ~
  schedule_method: noam
  scheduler_configs:
    d_model: 512
    warmup_steps: 8000

training_configs:
  seed: 1234
  max_epochs: 50
  shuffle: true
  use_bucket: true
  buffer_size: 100000
  batch_size: 2500
  batching_key: "tokens"
  update_cycle: 10
  norm_by_words: false
  valid_batch_size: 20
  disp_freq: 500
  save_freq: 500
  num_kept_checkpoints: 1
  num_kept_best_model: 1
  loss_valid_freq: 500
  bleu_valid_freq: 500
  bleu_valid_batch_size: 20
  bleu_valid_warmup: 1
  bleu_valid_configs:
    max_steps: 150
    beam_size: 4
    alpha: 0.6
    postprocess: true
    sacrebleu_args: "--tokenize none -lc"
  early_stop_patience: 50
  moving_average_method: ema
  moving_average_alpha: 0.9
  moving_average_start_epoch: 2
"""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in ("train.en", "train.de", "valid.en.gz", "valid.de"):
        (tmp_path / name).write_text("a\n")
    return tmp_path


def test_file_of_njunmt_is_read_as_it_stands_and_written_to_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(OF_NJUNMT)
    config = resolve_config("a.yaml")
    assert config.data_configs.train_data == (str(tmp_path / "train/zh.txt"), str(tmp_path / "train/en.txt"))
    assert config.data_configs.vocabularies[1].codes == str(tmp_path / "vocab/codes.en")
    assert config.training_configs.bleu_valid_configs.beam_size == 4
    assert config.optimizer_configs.optimizer_params is None
    Path("b.yaml").write_text(dump_config(config))
    assert resolve_config("b.yaml") == config


def test_all_that_is_wrong_in_a_file_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    text = OF_NJUNMT.replace("valid_data", "valid_dat").replace("update_cycle: 10", "update_cicle: 10").replace("noam", "norm")
    path.write_text(text.replace("lang_pair", "lang_pear"))
    with pytest.raises(ConfigError) as caught:
        resolve_config(str(path))
    message = str(caught.value)
    assert "`data_configs.valid_data` is missing" in message
    for wrong, right in (("valid_dat", "valid_data"), ("lang_pear", "lang_pair")):
        assert f"unknown key `data_configs.{wrong}`; did you mean `data_configs.{right}`?" in message
    assert "a.yaml:58:3: unknown key `training_configs.update_cicle`; did you mean `training_configs.update_cycle`?" in message
    assert "did you mean 'noam'?" in message


def test_the_nearer_to_the_user_a_value_is_the_more_it_counts(texts: Path) -> None:
    path = texts / "a.yaml"
    path.write_text("data_configs: {lang_pair: en-de}\nmodel_configs: {dropout: 0.2, n_layers: 2}\n")
    config = resolve_config(str(path), texts, ["model_configs.n_layers=3"], predefined="transformer_base")
    model = config.model_configs
    assert (model.dropout, model.n_layers, model.d_inner_hid, model.n_head) == (0.2, 3, 2048, 8)
    assert config.optimizer_configs.schedule_method == "noam"
    assert config.data_configs.valid_data == (str(texts / "valid.en.gz"), str(texts / "valid.de"))


@pytest.mark.parametrize("name", NAMED)
def test_named_configurations_are_whole_but_for_the_texts(name: str, texts: Path) -> None:
    config = resolve_config(name, texts, ["data_configs.lang_pair=en-de"])
    assert config.model_configs.model == ("DL4MT" if name.startswith("dl4mt") else "Transformer")


def test_demo_needs_nothing_else() -> None:
    require_files(resolve_config("demo"))


def test_wrong_names_and_missing_texts_are_told(texts: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config must be a YAML file or one of .*did you mean tatoeba\?"):
        resolve_config("tatoba")
    with pytest.raises(ConfigError, match=r"--predefined_config must be one of .*transformer_base\?"):
        resolve_config("demo", predefined="transformer_bas")
    with pytest.raises(ConfigError, match=r"lacks train\.fr, valid\.fr"):
        resolve_config("small", texts, ["data_configs.lang_pair=en-fr"])
    with pytest.raises(ConfigError, match=r"`data_configs` is missing"):
        resolve_config("small")
    config = resolve_config("demo", overrides=["data_configs.vocabularies=[{type: bpe, codes: none}]"])
    for kept in (None, texts):
        with pytest.raises(ConfigError, match=r"codes must name a file, but there is no .*none"):
            require_files(config, kept)
    (texts / "vocab.json").touch()
    require_files(config, texts)  # a run that goes on has its vocabularies


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model_configs.d_model=64", "d_word_vec must be its d_model"),
        ("data_configs.vocabularies=[{codes: a}]", "must be of type bpe"),
        ("data_configs.vocabularies=[{type: bpe, codes: a, sentencepiece: b}]", "has both"),
        ("data_configs.vocabularies=[{max_n_words: 4}]", "more than the 4 symbols"),
        ("data_configs.vocabularies=[]", "one for both, but are 0"),
        ("data_configs.max_len=[0, 5]", "at least 1 on each side"),
        ("data_configs.lang_pair=en", "two names with a hyphen"),
        ("optimizer_configs={schedule_method: loss, scheduler_configs: {mode: max}}", "mode max looks at BLEU"),
    ],
)
def test_values_that_do_not_go_together_are_refused(override: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        resolve_config("demo", overrides=[override])


def test_mappings_are_merged_key_by_key() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}


def training_of(*overrides: str):
    return resolve_config("demo", overrides=[f"training_configs.{override}" for override in overrides]).training_configs


def test_what_is_due_follows_from_the_step() -> None:
    training = training_of("disp_freq=2", "loss_valid_freq=3", "bleu_valid_freq=4", "save_freq=6", "bleu_valid_warmup=1")
    due = {step: due_after(training, step=step, epoch=step // 10, ends_epoch=step % 10 == 0) for step in range(1, 25)}
    assert [step for step, each in due.items() if each.display] == list(range(2, 25, 2))
    assert [step for step, each in due.items() if each.loss] == list(range(3, 25, 3))
    assert [step for step, each in due.items() if each.bleu] == [12, 16, 20, 24]
    assert [step for step, each in due.items() if each.save] == [6, 12, 18, 24]
    in_steps = training_of("bleu_valid_freq=50", "bleu_valid_warmup=100")
    assert [step for step in range(1, 201) if due_after(in_steps, step=step, epoch=0, ends_epoch=False).bleu] == [150, 200]


def test_nothing_said_means_the_end_of_an_epoch_and_zero_means_never() -> None:
    training = training_of("disp_freq=0")
    assert due_after(training, step=7, epoch=0, ends_epoch=False) == Due()
    assert due_after(training, step=7, epoch=0, ends_epoch=True) == Due(display=True, loss=True)
    assert not due_after(training_of("loss_valid_freq=-1"), step=7, epoch=0, ends_epoch=True).loss
    assert due_after(training, step=7, epoch=0, ends_epoch=False, debug=True) == Due(display=True, loss=True, save=True)


def test_validations_that_are_no_better_are_counted() -> None:
    progress = Progress()
    for value, num_bad in ((3.0, 0), (3.0, 1), (4.0, 2), (2.0, 0), (2.5, 1)):
        progress.judge(value, larger_is_better=False)
        assert progress.num_bad == num_bad
    progress.judge(9.0, larger_is_better=True)
    assert (progress.best, progress.num_bad) == (9.0, 0)
