"""Random GGUF files give llama.cpp's logits, or are refused.

``tests/corpora/ggufs`` keeps files as what ``random_ggufs.draw`` returns, with some of llama.cpp's logits.
``pytest -m slow`` draws others for a share of ``CARRYALL_FUZZ_SECONDS``; it needs llama-cpp-python, which is
compiled from its source. ``random_ggufs.keep`` adds a file.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from engines import CachedDecoder
from fuzzing import new_seeds, seeds
from random_ggufs import Floats, LlamaCpp, RandomFile, draw, prompt, shown
from roundings import ulps_away, with_half_gelu

from carryall.errors import CarryallError, CheckpointError, UnsupportedModelError, WeightWarning
from carryall.exporter.export import export_package

# Of the deviation of the logits, the largest difference. Scores of attention may reach hundreds, and the last
# place of a weight then moves logits by more: twice what ``MOVES`` such changes move them is allowed; if few
# tokens differ, changes of ``FLIPS`` units, but of these tokens alone.
TOLERANCE, MOVES, FLIPS = 1e-3, 6, 64
# Changed keys of which llama.cpp is not the judge, with the reason, by a part of "family: key=value".
DEVIATIONS = {
    "rope.scaling.yarn_attn_factor": "read for the architecture grok only; transformers' meaning is taken",
    "rope.scaling.yarn_beta_": "read for grok and mistral3 only; transformers' meaning is taken",
    "gpt_oss: rope.scaling.type='yarn'": "llama.cpp rounds the bounds; the model's authors do not",
}
for latent in ("deepseek_v2-groups-yarn", "deepseek_v3", "glm4_moe_lite", "youtu"):
    DEVIATIONS[f"{latent}: rope.scal"] = (
        "llama.cpp changes the scale of attention unless yarn_log_multiplier is stated; transformers does not"
    )
    DEVIATIONS[f"{latent}: attention.layer_norm_rms_epsilon"] = (
        "transformers' norms of compressed queries and keys have 1e-6 whatever it is"
    )
# Of the groups of experts of DeepSeek-V2 its authors and transformers take those with the best expert, and
# llama.cpp those with the best two, as in DeepSeek-V3: a few tokens get other experts.
OTHER_GROUPS = "deepseek_v2-groups-yarn"
VERDICTS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; it is compiled from source")
    peer = LlamaCpp()
    yield peer
    peer.close()


def deviates(file: RandomFile) -> bool:
    """Whether llama.cpp is known to ignore or to approximate a changed key."""
    changes = [f"{file.family}: {key}={value!r}" for key, value in file.metadata.items()]
    return any(part in change for change in changes for part in DEVIATIONS)


def exported(file: Path) -> onnx.ModelProto | str:
    """Return the graph with GELU as llama.cpp rounds it, or the message of the error.

    Tensors that the keys leave unused are a warning, which is an error here; llama.cpp refuses such files.
    """
    try:
        package = export_package(file, file.with_suffix(""))
    except (CarryallError, WeightWarning) as error:
        return str(error)
    return with_half_gelu(onnx.load(str(package.model_path)))


def logits_of(model: onnx.ModelProto, folder: Path) -> Floats:
    """Return the logits of the prompt."""
    path = folder / "run.onnx"
    onnx.save(model, str(path))
    options = ort.SessionOptions()
    # Optimized, onnxruntime multiplies int4 weights with activations of 8 bits.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokens = np.array([prompt()])
    net = CachedDecoder(lambda feeds: list(session.run(None, feeds)), path, batch=1)
    return np.array(net(tokens, np.ones_like(tokens))[0])


def difference(file: RandomFile, peer: LlamaCpp, folder: Path) -> float | None:
    """Return how far the logits are from llama.cpp's, by what is allowed; None if either refuses the file."""
    path = folder / "m.gguf"
    file.write(path)
    model = exported(path)
    if isinstance(model, str):
        VERDICTS["refused"] += 1
        return None
    wanted = peer.logits(path)
    if wanted is None or not np.isfinite(wanted).all():
        VERDICTS["refused by llama.cpp" if wanted is None else "not finite"] += 1
        return None
    if deviates(file):
        VERDICTS["deviates"] += 1
        return None
    VERDICTS["compared"] += 1
    found = logits_of(model, folder)
    errors, allowed = np.abs(found - wanted).max(axis=1), np.full(len(wanted), TOLERANCE * wanted.std())
    if not (errors < allowed).all():
        few = np.count_nonzero(errors >= allowed) <= len(errors) // 10
        if few and file.family == OTHER_GROUPS:
            VERDICTS["other groups"] += 1
            return None
        # A few tokens may get other experts, whose scores were all but equal.
        ulps = FLIPS if few else 1
        for seed in range(MOVES):
            moved = np.abs(logits_of(ulps_away(model, ulps, seed), folder) - found).max(axis=1)
            allowed = np.maximum(allowed, 2 * (moved if ulps > 1 else moved.max()))
        VERDICTS["rounding" if (errors < allowed).all() else "wrong"] += 1
    return float((errors / allowed).max())


@pytest.mark.long
@pytest.mark.parametrize("kept", seeds("ggufs"), ids=lambda path: path.stem)
def test_kept_files_give_the_logits_of_llama_cpp(kept: Path, tmp_path: Path) -> None:
    content = json.loads(kept.read_text())
    file, wanted = RandomFile(**content["file"]), np.array(content["logits"])
    file.write(tmp_path / "m.gguf")
    model = exported(tmp_path / "m.gguf")
    assert not isinstance(model, str), model
    found = logits_of(model, tmp_path)
    assert np.abs(shown(found) - wanted).max() < TOLERANCE * found.std()


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.recurrent_layers": 1}, r"'qwen35\.attention\.recurrent_layers' is 1, no list of flags"),
        ({"attention.recurrent_layers": [True]}, r"recurrent_layers' has 1 values for 4 layers"),
        ({"rope.dimension_sections": "none"}, r"dimension_sections' is 'none', no list of integers"),
        ({"nextn_predict_layers": "none"}, r"nextn_predict_layers' is 'none', no integer"),
        ({"full_attention_interval": 0.5}, r"full_attention_interval' is 0\.5, no integer"),
    ],
)
def test_values_of_other_types_are_refused_in_hybrids(
    metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    RandomFile("qwen3_5_text", metadata=metadata).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=named):
        export_package(tmp_path / "m.gguf", tmp_path / "package")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope.dimension_count": [1, 0]}, r"'llama\.rope\.dimension_count' is \[1, 0\], no integer"),
        ({"rope.freq_base": "none"}, r"'llama\.rope\.freq_base' is 'none', no number"),
        ({"attention.head_count": True}, r"'llama\.attention\.head_count' is True, no integer"),
        ({"block_count": 2.0}, r"'llama\.block_count' is 2\.0, no integer"),
        ({"rope.scaling.type": 2}, r"'llama\.rope\.scaling\.type' is 2, no text"),
    ],
)
def test_values_of_other_types_are_refused(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    RandomFile("llama", metadata=metadata).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=named):
        export_package(tmp_path / "m.gguf", tmp_path / "package")


@pytest.mark.parametrize(
    ("family", "metadata", "freqs", "named"),
    [
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, True, "by frequency"),
        ("gemma2", {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, False, "rope.scaling.factor"),
        ("gemma3_text", {"attention.sliding_window_pattern": 5.0}, False, "sliding_window_pattern"),
        (
            "gemma3_text",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 0.5},
            False,
            r"gemma3\.rope\.scaling\.attn_factor .* layers with windows",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 0.1}, False, "scores have no cap"),
        ("lfm2", {"attention.sliding_window": 2}, False, "lfm2.attention.sliding_window = 2"),
        ("gemma4_text", {"rope.scaling.factor": 4.0}, False, "a Gemma 4 with a scaled rope"),
    ],
)
def test_what_no_graph_says_is_refused(
    family: str, metadata: dict[str, Any], freqs: bool, named: str, tmp_path: Path
) -> None:
    RandomFile(family, metadata=metadata, freqs=freqs).write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=named):
        export_package(tmp_path / "m.gguf", tmp_path / "package")


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "granitemoe"])
def test_a_hidden_size_of_0_is_an_error_of_the_file(family: str, tmp_path: Path) -> None:
    RandomFile(family, metadata={"embedding_length": 0}).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="'hidden_size' must be an integer"):
        export_package(tmp_path / "m.gguf", tmp_path / "package")


@pytest.mark.slow
def test_random_files_give_the_logits_of_llama_cpp(
    llama_cpp: LlamaCpp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for seed in new_seeds():
        folder = tmp_path / str(seed)
        folder.mkdir()
        error = difference(draw(seed), llama_cpp, folder)
        if error is not None and not error < 1:
            wrong.append((seed, error, draw(seed).text()))
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"{VERDICTS.total()} files: {dict(VERDICTS)}")
    assert wrong == []
    assert VERDICTS["compared"] > 0
