"""Models from GGUF compute what llama.cpp and transformers compute with the same file."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from own_environment import python_with, smollm2_gguf
from tiny_gguf import write_gguf

from carryall.exporter.export import export_package

Floats = npt.NDArray[np.float32]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": None}  # blocks of 256
EXACT = ("F32", "F16", "BF16")
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
RANDOM = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    # transformers does not read the size of a head, soft caps and windows, so these have its defaults.
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
}
PROMPT = np.random.default_rng(0).integers(0, 256, 24)
CAPITAL = np.array([504, 3575, 282, 4649, 314])  # "The capital of France is"
GREEDY = 64

TRANSFORMERS = """
import pathlib, sys
import numpy as np, torch, transformers
out, count, tokens, *files = sys.argv[1:]
ids = torch.tensor([[int(token) for token in tokens.split(",")]])
found = {}
for file in map(pathlib.Path, files):
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    options = {"do_sample": False, "max_new_tokens": int(count), "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        whole = model.generate(ids, **options)[:, :-1] if int(count) else ids
        found[file.stem] = model(whole).logits[0].numpy()
        found[file.stem + " tokens"] = whole[0].numpy()
np.savez(out, **found)
"""


def portable_logits(file: Path, tokens: npt.NDArray[np.int64], folder: Path) -> Floats:
    """Return the logits of the exported graph, computed in floats."""
    options = ort.SessionOptions()
    # Optimized, onnxruntime multiplies int4 weights with activations of 8 bits.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    package = export_package(file, folder / f"{file.stem} package").path
    session = ort.InferenceSession(package / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": tokens[None],
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "position_ids": np.arange(len(tokens))[None],
    }
    for entry in session.get_inputs():
        if entry.name not in feeds:
            feeds[entry.name] = np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.float32)
    return np.array(session.run(["logits"], feeds)[0][0])


def write_all(folder: Path) -> list[Path]:
    """Write a tiny file of every type and of every family."""
    for kind in (*EXACT, *WRITTEN, *RANDOM):
        write_gguf("llama", folder / f"{kind}.gguf", types=kind, **SIZES)
    for family, more in FAMILIES.items():
        write_gguf(family, folder / f"{family}.gguf", **more)
    return sorted(folder.glob("*.gguf"))


def with_transformers(
    folder: Path, tokens: npt.NDArray[np.int64], count: int, *files: Path
) -> dict[str, Any]:
    """Return transformers' logits by a file's stem, and the tokens, of which ``count`` are its own."""
    python = python_with("torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "gguf==0.19.0")
    arguments = [str(folder / "found.npz"), str(count), ",".join(map(str, tokens)), *map(str, files)]
    done = subprocess.run(
        [str(python), "-c", TRANSFORMERS, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(folder / "found.npz"))


@pytest.mark.slow
def test_every_type_and_family_equals_transformers(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    expected = with_transformers(tmp_path, PROMPT, 0, *files)
    for file in files:
        wanted = expected[file.stem]
        found = portable_logits(file, PROMPT, tmp_path)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=file.stem)


@pytest.mark.slow
def test_a_real_model_generates_the_tokens_of_transformers(tmp_path: Path) -> None:
    file = smollm2_gguf()
    expected = with_transformers(tmp_path, CAPITAL, GREEDY, file)
    tokens, wanted = expected[f"{file.stem} tokens"], expected[file.stem]
    found = portable_logits(file, tokens, tmp_path)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    own = found.argmax(axis=1)[len(CAPITAL) - 1 : -1]  # greedy tokens, by induction over the steps
    np.testing.assert_array_equal(own, tokens[len(CAPITAL) :])
    assert len(own) == GREEDY - 1


class LlamaCpp:
    """Logits of llama.cpp, with a KV cache of float32."""

    def __init__(self, file: Path, context: int) -> None:
        llama_cpp = pytest.importorskip(
            "llama_cpp", reason="llama-cpp-python is not installed; it is compiled from source for minutes"
        )
        options = {"n_ctx": context, "n_batch": context, "logits_all": True, "verbose": False, "n_threads": 2}
        self._model = llama_cpp.Llama(str(file), type_k=0, type_v=0, **options)

    def logits(self, tokens: npt.NDArray[np.int64]) -> Floats:
        self._model.reset()
        self._model.eval(tokens.tolist())
        return np.array(self._model.scores[: len(tokens)])

    def greedy(self, tokens: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Return the tokens and ``count`` further ones, each the most probable."""
        found = tokens.tolist()
        self._model.reset()
        self._model.eval(found)
        for _ in range(count):
            found.append(int(self._model.scores[len(found) - 1].argmax()))
            self._model.eval(found[-1:])
        return np.array(found)


def relative_error(found: Floats, wanted: Floats) -> float:
    """Return the root mean square of the difference, relative to the deviation of the logits."""
    return float(np.sqrt(np.square(found - wanted).mean()) / wanted.std())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXACT, *WRITTEN, *RANDOM, *FAMILIES])
def test_logits_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """llama.cpp rounds the inputs of products to the type of the weight, of quantized ones to 8 bits.

    Measured (llama-cpp-python 0.3.36): F32 1e-6; gemma2 3e-4, since GELU is a table of 16 bits; F16 0.002;
    others 0.002 to 0.11. An error of layout or scale gives about 1.
    """
    file = tmp_path / f"{name}.gguf"
    if name in FAMILIES:
        write_gguf(name, file, **FAMILIES[name])
    else:
        write_gguf("llama", file, types=name, **SIZES)
    wanted = LlamaCpp(file, 64).logits(PROMPT)
    bound = {"F16": 0.01, "gemma2": 1e-3}.get(name, 1e-5 if name in ("F32", *FAMILIES) else 0.15)
    assert relative_error(portable_logits(file, PROMPT, tmp_path), wanted) < bound


@pytest.mark.slow
def test_a_real_model_generates_the_tokens_of_llama_cpp(tmp_path: Path) -> None:
    """Where the best two tokens are closer than the rounding of the inputs, either may be chosen."""
    file = smollm2_gguf()
    tokens = LlamaCpp(file, 128).greedy(CAPITAL, GREEDY)
    wanted = LlamaCpp(file, 128).logits(tokens)
    found = portable_logits(file, tokens, tmp_path)
    error = relative_error(found, wanted)
    assert error < 0.05  # measured: 0.033, and 63 of 64 tokens equal, the other 0.04 below the best
    places = np.arange(len(CAPITAL) - 1, len(tokens) - 1)
    own, best = wanted[places, found[places].argmax(axis=1)], wanted[places].max(axis=1)
    assert (best - own).max() < error * wanted.std()
    assert (own == best).mean() > 0.95
