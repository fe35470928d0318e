"""A changed field of config.json gives transformers' result or is refused by name.

The slow test changes each field of each family's tiny configuration, and tries fields of other families:
``pytest -m slow tests/exporter/test_config_fields.py``, with torch and transformers, for hours.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_changes import Array, changes, other_values, tokens, transformers_run
from engines import CachedDecoder, onnxruntime
from fuzzing import new_seeds
from tiny_models import CONFIGS, tiny_config, write_tokenizer

from carryall.errors import CarryallError
from carryall.exporter.config_checks import check_options
from carryall.exporter.export import export_package
from carryall.exporter.family import normalised_config

FIELDS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "config_fields.json").read_text()
)
TOLERANCE = 2e-3  # of the standard deviation of the logits

# Where transformers 5.24 is not the judge.
DEVIATIONS = {
    # It limits the cache to a window that its masks do not have: pieces differ from the whole.
    "layer_types": "cache",
    # It pops rope_theta for the full layers only, and does not take "type" for "rope_type".
    "olmo3: rope_theta": "version 4",
    # It reads the field and passes it to no layer.
    "gemma3_text: attn_logit_softcapping": "unused",
    # Its first files state "gelu" for the tanh form, beside hidden_activation, which counts here.
    "gemma: hidden_activation": "older files",
    # Padding changes its states, behind a projection with a bias.
    "lfm2: conv_bias": "padding",
    "lfm2_moe: conv_bias": "padding",
    "lfm3: conv_bias": "padding",
    "granitemoehybrid: mamba_proj_bias": "padding",
    "falcon_h1: mamba_proj_bias": "padding",
    "nemotron_h: use_bias": "padding",
    # It bounds the time steps of prompts only, so that a prompt in pieces would differ from the whole.
    "nemotron_h: time_step_min": "pieces",
}


# Fields that transformers' models read and that change nothing here, with the reason. A field of one family
# is written with it.
NO_EFFECT = {
    **dict.fromkeys(
        (
            *("attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "embedding_dropout"),
            *("hidden_dropout", "layerdrop", "resid_pdrop", "residual_dropout", "router_jitter_noise"),
            *("router_aux_loss_coef", "initializer_range", "embedding_initializer_range"),
            *("rescale_prenorm_residual", "time_step_floor", "time_step_max"),
        ),
        "training and its start",
    ),
    **dict.fromkeys(("pretraining_tp", "slow_but_exact", "reorder_and_upcast_attn"), "order of sums"),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "use_mamba_kernels"), "order of sums"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "dtype"),
        "form of the output",
    ),
    "pad_token_id": "the mask tells of padding",
    **dict.fromkeys(
        (
            *("audio_config", "audio_token_id", "image_token_id", "mm_tokens_per_image", "video_token_id"),
            "vision_config",
        ),
        "not the decoder",
    ),
    **dict.fromkeys(
        (
            *("deepseek_v2: head_dim", "minicpm3: head_dim"),
            *("deepseek_v2: num_key_value_heads", "deepseek_v3: num_key_value_heads"),
            *("glm4_moe_lite: num_key_value_heads", "minicpm3: num_key_value_heads"),
            "youtu: num_key_value_heads",
        ),
        "sizes of latent attention have other names",
    ),
    **dict.fromkeys(
        (
            *("deepseek_v2: n_group", "deepseek_v2: topk_group", "qwen2_moe: sliding_window"),
            *("qwen3_moe: sliding_window", "exaone4: sliding_window_pattern"),
            *("ernie4_5_moe: moe_layer_end_index", "ernie4_5_moe: moe_layer_interval"),
            *("falcon: num_ln_in_parallel_attn", "falcon_h1: mamba_d_ssm", "granitemoehybrid: mamba_expand"),
            "granitemoehybrid: position_embedding_type",
        ),
        "another field of the tiny configuration decides",
    ),
    **dict.fromkeys(
        ("smollm3: no_rope_layers", "falcon_h1: time_step_limit", "granitemoehybrid: time_step_limit"),
        "twice the values mean the same",
    ),
    "gemma4_unified_text: use_bidirectional_attention": "only 'all' has an effect, and is refused",
    "nemotron_h: tie_word_embeddings": "files always have a head",
    "smollm3: use_sliding_window": "layer_types decides",
    "stablelm: qk_layernorm": "the graph is written by it, not the configuration",
}


def normalised(config: dict[str, object]) -> str:
    """Return a configuration as the exporter reads it, or that it is refused."""
    try:
        check_options(config)
        return repr(normalised_config(config))
    except CarryallError:
        return "refused"


@pytest.mark.long
@pytest.mark.parametrize("model_type", FIELDS)
def test_every_field_is_read_known_or_refused(model_type: str) -> None:
    """The fields are those that transformers' model of the family reads as it runs, with their defaults."""
    config = tiny_config(model_type)
    usual = normalised(config)
    unread = []
    for field, value in FIELDS[model_type].items():
        others = [] if isinstance(value, dict) else other_values(value)
        same = [normalised({**config, field: other}) == usual for other in others]
        listed = field in NO_EFFECT or f"{model_type}: {field}" in NO_EFFECT
        if others and all(same) and not listed:
            unread.append(field)
    assert unread == []


def deviates(model_type: str, change: str) -> bool:
    """Whether transformers is known to be wrong about a changed field."""
    name = change.partition("=")[0].partition(" ")[0]
    return name in DEVIATIONS or f"{model_type}: {name}" in DEVIATIONS


def carryall_run(folder: Path) -> list[Array]:
    """Return the logits of each of ``tokens``."""
    package = export_package(folder, folder.parent / "package")
    net = CachedDecoder(onnxruntime(package.model_path), package.model_path, batch=2)
    return [net(piece, mask) for piece, mask in tokens()]


def wrong_result(config: dict[str, object], folder: Path) -> str | None:
    """Return by how much a configuration's result is wrong; None if it is right or refused."""
    try:
        expected = transformers_run(config, folder)
    except Exception:  # noqa: BLE001 -- what transformers raises for configurations that it refuses
        return None
    if not all(np.isfinite(part).all() for part in expected):
        return None
    write_tokenizer(folder)
    try:
        results = carryall_run(folder)
    except CarryallError:
        return None
    difference = _difference(results, expected)
    if difference < TOLERANCE:
        return None
    # Large scores make a one-hot of each softmax, and units in the last place of weights larger errors.
    own = _difference(transformers_run(config, folder.parent / "nudged", nudged=True), expected)
    return (
        None
        if difference < 4 * own
        else f"{difference:.1e} of the deviation of the logits, {own:.1e} by rounding"
    )


def _difference(results: list[Array], expected: list[Array]) -> float:
    """Return the largest difference where the mask is 1, of the deviation of the logits; NaN is infinity."""
    spread = max(float(part.std()) for part in expected)
    pieces = zip(tokens(), results, expected, strict=True)
    largest = max(float(np.abs(result - right)[mask == 1].max()) for (_, mask), result, right in pieces)
    return largest / spread if np.isfinite(largest) else float("inf")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_changed_field_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = tiny_config(model_type)
    if model_type not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("transformers has no text model of this family")
    defaults = {
        **transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict(),
        **config,
    }
    wrong = []
    for index, (change, changed) in enumerate(changes(config, defaults)):
        fault = wrong_result(changed, tmp_path / str(index) / "checkpoint")
        if fault is not None and not deviates(model_type, change):
            wrong.append(f"{change}: {fault}")
    assert wrong == []


def random_config(model_type: str, draw: random.Random) -> tuple[list[str], dict[str, object]]:
    """Return two to four changes of a family's configuration, and the changed one."""
    import transformers

    config, names = tiny_config(model_type), list[str]()
    for _ in range(draw.randint(2, 4)):
        try:
            made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
        except Exception:  # noqa: BLE001 -- what transformers raises for configurations that it refuses
            break
        change, changed = draw.choice(list(changes(config, {**made.to_dict(), **config})))
        if not deviates(model_type, change):
            names.append(change)
            config = changed
    return names, config


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_changes_of_several_fields_are_right_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Draws configurations of all families for a share of ``CARRYALL_FUZZ_SECONDS``."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    families = [model_type for model_type in CONFIGS if model_type in known]
    wrong, count = [], 0
    for seed in new_seeds():
        count += 1
        model_type = families[seed % len(families)]
        names, config = random_config(model_type, random.Random(seed))
        fault = wrong_result(config, tmp_path / str(seed) / "checkpoint")
        if fault is not None:
            wrong.append(f"{model_type} {names}: {fault}")
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
    with capsys.disabled():
        print(f"{count} configurations")
    assert wrong == []
