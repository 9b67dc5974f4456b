"""The configurations that have a name, as plain data: what they leave out is as in `hora.recipes.nmt.config`. Imports no torch.

Those that NJUNMT-pytorch predefines have its numbers. `tatoeba` is for `hora train nmt --config tatoeba --data DIR`; `demo` trains on the
excerpt that comes with Hora, in minutes on two cores.
"""

from collections.abc import Mapping
from typing import Any, Final

Plain = dict[str, Any]


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Both together, mappings key by key; where they differ, `over`."""
    inner = {
        key: merged(under[key], value) for key, value in over.items() if isinstance(value, Mapping) and isinstance(under.get(key), Mapping)
    }
    return {**under, **over, **inner}


_TRANSFORMER_BASE_V1: Final[Plain] = {
    "model_configs": {
        "model": "Transformer",
        "n_layers": 6,
        "n_head": 8,
        "d_model": 512,
        "d_word_vec": 512,
        "d_inner_hid": 2048,
        "dropout": 0.1,
        "label_smoothing": 0.1,
        "layer_norm_first": False,
        "tie_input_output_embedding": True,
    },
    "optimizer_configs": {
        "optimizer": "adam",
        "learning_rate": 0.1,
        "optimizer_params": {"betas": [0.9, 0.98], "eps": 1e-9},
        "schedule_method": "noam",
        "scheduler_configs": {"d_model": 512, "warmup_steps": 4000},
    },
}
_TRANSFORMER_BASE: Final[Plain] = merged(
    _TRANSFORMER_BASE_V1,
    {
        "model_configs": {"layer_norm_first": True},
        "optimizer_configs": {"learning_rate": 0.2, "scheduler_configs": {"warmup_steps": 8000}},
    },
)
_LOW_RESOURCE: Final[Plain] = merged(
    _TRANSFORMER_BASE,
    {
        "model_configs": {"dropout": 0.3},
        "optimizer_configs": {
            "optimizer": "adamw",
            "learning_rate": 5e-4,
            "optimizer_params": {"weight_decay": 1e-4},
            "schedule_method": "isqrt",
            "scheduler_configs": {"min_lr": 1e-9, "warmup_steps": 4000, "decay_steps": 4000},
        },
    },
)
_SMALL: Final[Plain] = {
    "model_configs": {
        "n_layers": 3,
        "n_head": 4,
        "d_model": 256,
        "d_word_vec": 256,
        "d_inner_hid": 512,
        "dropout": 0.1,
        "label_smoothing": 0.1,
    },
    "optimizer_configs": {
        "optimizer": "adamw",
        "grad_clip": 1.0,
        "learning_rate": 1e-3,
        "optimizer_params": {"betas": [0.9, 0.98], "weight_decay": 1e-4},
        "schedule_method": "isqrt",
        "scheduler_configs": {"warmup_steps": 1000, "decay_steps": 1000},
    },
    "training_configs": {"batching_key": "tokens", "batch_size": 4096, "max_epochs": 20},
}
_TATOEBA: Final[Plain] = {
    "data_configs": {"lang_pair": "en-de", "vocabularies": [{"type": "bpe", "max_n_words": 8000}], "max_len": [80, 80]},
    "model_configs": {
        "n_layers": 6,
        "n_head": 8,
        "d_model": 512,
        "d_word_vec": 512,
        "d_inner_hid": 1024,
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": 0.0,
        "ffn_activation": "gelu",
        "label_smoothing": 0.1,
        "tie_source_target_embedding": True,
    },
    "optimizer_configs": {
        "optimizer": "adamw",
        "grad_clip": 1.0,
        "learning_rate": 1.5e-3,
        "optimizer_params": {"betas": [0.9, 0.98], "weight_decay": 1e-4},
        "schedule_method": "cosine",
        "scheduler_configs": {"warmup_steps": 1000},
    },
    "training_configs": {
        "batching_key": "tokens",
        "batch_size": 12000,
        "max_steps": 4600,
        "valid_batch_size": 400,
        "loss_valid_freq": 1000,
        "precision": "bfloat16",
    },
}
_DEMO: Final[Plain] = {
    "data_configs": {
        "lang_pair": "en-de",
        "train_data": ["excerpt:train.en", "excerpt:train.de"],
        "valid_data": ["excerpt:valid.en", "excerpt:valid.de"],
    },
    "model_configs": {
        "n_layers": 2,
        "n_head": 4,
        "d_model": 128,
        "d_word_vec": 128,
        "d_inner_hid": 256,
        "dropout": 0.1,
        "label_smoothing": 0.1,
    },
    "optimizer_configs": {
        "optimizer": "adamw",
        "grad_clip": 1.0,
        "learning_rate": 2e-3,
        "optimizer_params": {"betas": [0.9, 0.98], "weight_decay": 1e-4},
        "schedule_method": "cosine",
        "scheduler_configs": {"warmup_steps": 100},
    },
    "training_configs": {"batching_key": "tokens", "batch_size": 1500, "max_epochs": 8, "valid_batch_size": 128},
}
_DL4MT_BASE: Final[Plain] = {
    "model_configs": {"model": "DL4MT", "d_word_vec": 512, "d_model": 1024, "dropout": 0.5, "bridge_type": "mlp"},
    "optimizer_configs": {
        "optimizer": "adam",
        "learning_rate": 5e-4,
        "grad_clip": 1.0,
        "schedule_method": "loss",
        "scheduler_configs": {"patience": 2, "min_lr": 5e-5, "scale": 0.5},
    },
}
_DL4MT_TATOEBA: Final[Plain] = {
    **_TATOEBA,
    "model_configs": {"model": "DL4MT", "d_word_vec": 512, "d_model": 1024, "dropout": 0.3, "label_smoothing": 0.1},
    "optimizer_configs": merged(_TATOEBA["optimizer_configs"], {"learning_rate": 1e-3}),
}

NAMED: Final[dict[str, Plain]] = {
    "transformer_base": _TRANSFORMER_BASE,
    "transformer_base_v1": _TRANSFORMER_BASE_V1,
    "transformer_base_v2": _TRANSFORMER_BASE,
    "transformer_low_resource": _LOW_RESOURCE,
    "dl4mt_base": _DL4MT_BASE,
    "dl4mt_tatoeba": _DL4MT_TATOEBA,
    "small": _SMALL,
    "tatoeba": _TATOEBA,
    "demo": _DEMO,
}
