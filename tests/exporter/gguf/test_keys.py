"""Every key of a GGUF file is read, has no effect, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import write_gguf

from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.gguf.architecture import architectures
from carryall.exporter.gguf.config import config_of
from carryall.exporter.gguf.file import GgufFile
from carryall.exporter.gguf.keys import READ, READ_OF_TOKENIZER
from carryall.exporter.gguf.tokenizer import gguf_tokenizer

BASE = {
    "block_count": 6, "embedding_length": 64, "attention.head_count": 4, "attention.key_length": 16,
    "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 10_000.0,
}  # fmt: skip


# What architectures must state beside it.
DELTA = {"ssm.time_step_rank": 4, "ssm.inner_size": 32}
WINDOWS = [True, False] * 3
WINDOWED = {"attention.sliding_window": 8, "attention.sliding_window_pattern": WINDOWS}
LATENT = {
    "attention.head_count_kv": [0, 1] * 3,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 8,
    "kda.head_dim": 8,
}
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "falcon-h1"), DELTA),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), DELTA),
    "lfm2": {"attention.head_count_kv": [0, 1]},
    "lfm2moe": {"attention.head_count_kv": [0, 1]},
    "granite_swa": WINDOWED,
    "mellum": WINDOWED,
    "muse-glimmer": WINDOWED,
    "kimi-linear": LATENT,
    "bailingmoe3": {**LATENT, "kda.gate_lower_bound": -5.0},
    "gemma4": {
        "attention.sliding_window_pattern": WINDOWS,
        "attention.key_length_swa": 8,
        "feed_forward_length": 32,
        "rope.freq_base_swa": 1e4,
    },
}
LAYERS: dict[str, Any] = {
    f"model.layers.{layer}.mixer.q_proj.weight": np.zeros((4, 4), np.float32) for layer in range(6)
}
EMBEDDINGS: dict[str, Any] = {
    f"model.{name}.weight": np.zeros((8, 4), np.float32)
    for name in ("embed_tokens", "embeddings", "word_embeddings")
}
# Fields that files hold as tensors.
CONSTANTS = {"muse-glimmer": {"qk_scale_factor": 3.87}}


def metadata(name: str = "llama", **changes: Any) -> dict[str, Any]:
    stated = {
        **BASE,
        **NEEDED.get(name, {}),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in stated.items()}}


def read(found: Mapping[str, Any], *, by_frequency: bool = False) -> dict[str, Any]:
    factors = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8} if by_frequency else None
    return config_of(found, EMBEDDINGS | LAYERS, factors, CONSTANTS.get(found["general.architecture"]))


class Recorded(Mapping[str, Any]):
    """Metadata that notes the keys that are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content, self.seen = content, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def items(self) -> Any:
        """All items, without noting them: the check of the keys is no reader."""
        return self.content.items()


def test_the_tables_are_what_the_readers_read(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.yarn_attn_factor": 1.0,
    }
    seen = Recorded({**file.metadata, **scaling})
    read(seen)
    of_architecture = {key.removeprefix("llama.") for key in seen.seen if key.startswith("llama.")}
    assert of_architecture >= READ
    for kind, more in (("gpt2", {}), ("llama", {"tokenizer.ggml.scores": [0.0] * 260})):
        words = Recorded({**file.metadata, **more, "tokenizer.ggml.model": kind})
        gguf_tokenizer(words, 260)
        seen.seen |= words.seen
    of_tokenizer = {key.removeprefix("tokenizer.") for key in seen.seen if key.startswith("tokenizer.")}
    assert of_tokenizer == READ_OF_TOKENIZER


@pytest.mark.parametrize(
    ("stated", "factor"),
    [
        ({"attn_factor": 0.8 / 1.138629436}, 0.8),
        ({"yarn_attn_factor": 0.8 / 1.138629436}, 0.8),
        ({"attn_factor": 0.5, "yarn_attn_factor": 2.0}, 1.138629436),
    ],
)
def test_factors_of_attention_of_yarn_are_multiplied(stated: dict[str, float], factor: float) -> None:
    """Those of llama.cpp's rope_yarn, which multiplies by 1 + 0.1 ln(factor) too; a factor of 4."""
    scaling: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    more: dict[str, Any] = {f"rope__scaling__{name}": value for name, value in stated.items()}
    config = read(metadata(**scaling, **more))
    assert config["rope_scaling"]["attention_factor"] == pytest.approx(factor, rel=1e-8)


def test_bounds_of_yarn_are_read() -> None:
    found = metadata(
        rope__scaling__type="yarn",
        rope__scaling__yarn_beta_fast=16.0,
        rope__scaling__yarn_beta_slow=2.0,
        rope__scaling__yarn_ext_factor=-1.0,
    )
    scaling = read(found)["rope_scaling"]
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (16.0, 2.0)
    assert "attention_factor" not in scaling
    with pytest.raises(CheckpointError, match=r"'llama\.rope\.scaling\.yarn_beta_fast' is 'x', no number"):
        read({**found, "llama.rope.scaling.yarn_beta_fast": "x"})


def test_the_local_rope_of_gemma_is_read() -> None:
    assert read(metadata("gemma3", rope__freq_base_swa=5_000.0))["rope_local_base_freq"] == 5_000.0
    with pytest.raises(UnsupportedModelError, match=re.escape("qwen2.rope.freq_base_swa = 5000.0")):
        read(metadata("qwen2", rope__freq_base_swa=5_000.0))


EFFECTS: dict[str, Any] = {
    "rope.scaling.yarn_ext_factor": 0.5,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.scaling.alpha": 1000.0,
    "rope.scaling.attn_factor": 1.2,
    "rope.scaling.yarn_attn_factor": 1.2,
    "rope.dimension_sections": [8, 8, 0, 0],
    "rope.dimension_count_swa": 8,
    "attention.scale": 0.125,
    "attention.clamp_kqv": 8.0,
    "attention.causal": False,
    "attention.max_alibi_bias": 8.0,
    "attention.sliding_window_pattern": 4,
    "attention.key_length_swa": 8,
    "attention.temperature_scale": 0.1,
    "logit_scale": 0.25,
    "residual_scale": 0.22,
    "embedding_scale": 12.0,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
    "nextn_predict_layers": 1,
    "leading_dense_block_count": 1,
    "use_parallel_residual": True,
    "swiglu_clamp_exp": 7.0,
    "embedding_length_per_layer_input": 256,
    "nobody_knows": 1,
}


@pytest.mark.parametrize("key", EFFECTS)
def test_what_is_not_read_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(f"llama.{key}")):
        read({**metadata(), f"llama.{key}": EFFECTS[key]})


NEUTRAL: dict[str, Any] = {
    "rope.scaling.yarn_ext_factor": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.finetuned": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.dimension_count_swa": 16,
    "attention.scale": 0.25,
    "attention.causal": True,
    "attention.max_alibi_bias": 0.0,
    "attention.key_length_swa": 16,
    "vocab_size": 8,
    "logit_scale": 1.0,
    "expert_weights_scale": 0.0,
    "nextn_predict_layers": 0,
    "tensor_data_layout": "x",
}


@pytest.mark.parametrize("key", NEUTRAL)
def test_values_without_effect_change_nothing(key: str) -> None:
    assert read({**metadata(), f"llama.{key}": NEUTRAL[key]}) == read(metadata())


@pytest.mark.parametrize(("name", "period"), [("gemma2", 2), ("gemma3", 6), ("gpt-oss", 2)])
def test_the_usual_pattern_of_windows_is_accepted(name: str, period: int) -> None:
    layers = [(layer + 1) % period != 0 for layer in range(6)]
    for value in (period, layers):
        read(metadata(name, attention__sliding_window_pattern=value))
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern"):
        read(metadata(name, attention__sliding_window_pattern=[not layer for layer in layers]))


@given(name=st.sampled_from(sorted(architectures())), key=st.text("abc._", min_size=1), value=st.integers())
def test_unknown_keys_are_refused_and_those_of_others_are_not(name: str, key: str, value: int) -> None:
    found = metadata(name)
    with pytest.raises(UnsupportedModelError, match=re.escape(f"{name}.unknown{key} = {value}"[:80])):
        read({**found, f"{name}.unknown{key}": value})
    with pytest.raises(UnsupportedModelError, match=re.escape(f"tokenizer.ggml.unknown{key}")):
        read({**found, f"tokenizer.ggml.unknown{key}": value})
    others = {f"general.{key}": value, f"other{key}.x": value, f"split.{key}": value}
    assert read({**found, **others}) == read(found)


def test_all_known_keys_of_tokenizers_are_in_a_table() -> None:
    """Those of the gguf package: a newer package with more keys shows here what is to be decided."""
    keys = [value for name, value in vars(gguf.Keys.Tokenizer).items() if name.isupper()]
    for key in keys:
        value = "" if key == "tokenizer.chat_template" else False
        read({**metadata(), key.replace("{name}", "tool_use"): value})


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("chat_template", 3, "text"),
        ("chat_template", ["a"], "text"),
        ("ggml.add_bos_token", 1, "flag"),
        ("ggml.add_eos_token", "no", "flag"),
        ("ggml.add_space_prefix", 0, "flag"),
    ],
)
def test_values_of_tokenizers_have_their_types(key: str, value: object, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'tokenizer\.{re.escape(key)}' is .*, no {kind}"):
        read({**metadata(), f"tokenizer.{key}": value})


def test_a_file_that_ends_texts_does_so(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_gguf("llama", tmp_path / "m.gguf")
    stated = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    files = gguf_tokenizer({**GgufFile(tmp_path / "m.gguf").metadata, **stated}, 260).files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    assert tokenizer.encode("the").tokens == ["<s>", "th", "e", "</s>"]
    assert tokenizer.encode("e", "e").tokens == ["<s>", "e", "</s>", "<s>", "e", "</s>"]
