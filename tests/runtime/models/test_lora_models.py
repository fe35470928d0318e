"""Models with LoRA adapters: logits of merged weights, batches, prefixes, quantized packages, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from tiny_lora import layers_of, write_adapter, write_merged
from tiny_models import write_tiny

from carryall import LLM, SamplingParams, export
from carryall.errors import CheckpointError, RequestError, UnknownModelError, UsageError
from carryall.exporter.adapter import read_adapter
from carryall.graph_opt.quantize.algorithms.layer_changes import LayerChanges
from carryall.graph_opt.quantize.recipe import QuantizationRecipe
from carryall.providers import get_provider
from carryall.providers.base import Row, Runner
from carryall.providers.native.library import find_library
from carryall.runtime.models.loading import load_model

PROMPT = np.array([5, 9, 200, 41, 7, 7, 90, 13, 54, 33])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
NAMES = ("a", "b", "c")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base model in float32, adapters a, b (some layers) and c, and each merged into the base."""
    made = tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(made / "cache"))
        base = write_tiny("qwen2", made / "base", dtype=np.float32)
        layers = layers_of(base)
        write_adapter(made / "a", layers)
        some = {name: shape for name, shape in layers.items() if name.endswith(("q_proj", "down_proj"))}
        write_adapter(made / "b", some, seed=2, rank=2, use_rslora=True)
        write_adapter(made / "c", layers, seed=3)
        for name in NAMES:
            write_merged(base, made / name, made / f"with {name}")
        yield made


def adapters(folder: Path, names: tuple[str, ...] = NAMES) -> Mapping[str, Path]:
    return {name: folder / name for name in names}


def logits(runner: Runner, lora: int | None, slot: int = 0) -> Logits:
    """Return the logits of the prompt, in two pieces, and of a token after it."""
    prompt = runner.forward([Row(slot, PROMPT[:6], 0, 6, lora=lora)])[0].copy()
    rest = runner.forward([Row(slot, PROMPT[6:], 6, 4, lora=lora)])[0].copy()
    last = runner.forward([Row(slot, PROMPT[:1], 10, 1, lora=lora)])[0].copy()
    return np.concatenate([prompt, rest, last])


def load_all(runner: Any, folder: Path, names: tuple[str, ...]) -> None:
    for place, name in enumerate(names):
        found = read_adapter(folder / name, runner.info.lora_modules, runner.info.max_lora_rank)
        runner.load_lora(place, found.matrices)


@pytest.fixture(scope="module", params=["cpu", "cpu, paged", "openvino"])
def provider(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The fields of ``ModelConfig`` for a provider that is available here."""
    name, _, paged = request.param.partition(", ")
    reason = get_provider(name).available()
    if paged and find_library() is None:
        reason = "carryall's kernels are not built"
    if reason is not None:
        pytest.skip(reason)
    return {"provider": name, "provider_options": {"kv_memory": "paged"} if paged else {}}


@pytest.mark.long
def test_logits_are_those_of_merged_weights(folder: Path, provider: dict[str, Any]) -> None:
    runner = load_model(folder / "base", **provider, max_loras=3, max_slots=4).runner
    load_all(runner, folder, NAMES)
    found = {None: logits(runner, None)} | {name: logits(runner, place) for place, name in enumerate(NAMES)}
    runner.close()
    for name, got in found.items():
        source = folder / ("base" if name is None else f"with {name}")
        plain = load_model(source, **provider, max_slots=4).runner
        expected = logits(plain, None)
        plain.close()
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-5 * np.abs(expected).max())
    assert min(np.abs(found[name] - found[None]).max() for name in NAMES) > 0.1


@pytest.mark.long
def test_a_row_does_not_depend_on_the_adapters_beside_it(folder: Path, provider: dict[str, Any]) -> None:
    """The masked products are exact zeros; only the order of a sum may change with the number of columns."""
    runner = load_model(folder / "base", **provider, max_loras=3, max_slots=4).runner
    load_all(runner, folder, NAMES)
    places = [2, None, 0, 1]
    alone = [logits(runner, place, slot) for slot, place in enumerate(places)]
    steps = [(PROMPT[:6], 0), (PROMPT[6:], 6), (PROMPT[:1], 10)]
    batch = [
        [
            one.copy()
            for one in runner.forward([Row(s, tokens, start, 1, lora=p) for s, p in enumerate(places)])
        ]
        for tokens, start in steps
    ]
    runner.close()
    for slot in range(4):
        for step, position in enumerate((5, 9, 10)):
            np.testing.assert_allclose(batch[step][slot][0], alone[slot][position], rtol=0, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "least"),
    [("int4-fast", 0.9), ("int8-fast", 0.97), ("int8-dynamic", 0.97), ("int8", 0.97), ("int4", 0.9)],
)
def test_adapters_stay_float_on_a_quantized_base(
    folder: Path, tmp_path: Path, method: str, least: float
) -> None:
    """The change by the adapter is that of the float model, up to the noise of quantization."""
    package = export(folder / "base", tmp_path / "package", quantize=method).path
    loaded = load_model(package, max_slots=2, loras={"a": folder / "a"})
    loaded.runner.load_lora(0, loaded.adapters.get("a").matrices)
    quantized = logits(loaded.runner, 0) - logits(loaded.runner, None, 1)
    loaded.close()
    base = load_model(folder / "base", max_slots=2).runner
    tuned = load_model(folder / "with a", max_slots=2).runner
    exact = logits(tuned, None) - logits(base, None)
    base.close()
    tuned.close()
    assert np.corrcoef(quantized.ravel(), exact.ravel())[0, 1] > least


@pytest.mark.long
def test_requests_choose_adapters_by_name(folder: Path) -> None:
    with LLM(folder / "base", loras=adapters(folder), max_loras=2, max_slots=4) as llm:
        assert llm.loras == NAMES
        loras = ["a", None, "b", "c", "a"]
        prompt = PROMPT.tolist()
        together = [one.outputs[0].token_ids for one in llm.generate([prompt] * 5, GREEDY, lora=loras)]
        apart = [llm.generate(prompt, GREEDY, lora=name)[0].outputs[0].token_ids for name in loras]
        assert together == apart
        assert len({tuple(tokens) for tokens in together}) == 4
        with LLM(folder / "with a", max_slots=4) as merged:
            assert merged.generate(prompt, GREEDY)[0].outputs[0].token_ids == together[0]
        with pytest.raises(UnknownModelError, match="no LoRA adapter 'd'; there are: a, b, c"):
            llm.generate(prompt, GREEDY, lora="d")
        with pytest.raises(UsageError, match="2 loras for 1 prompts"):
            llm.generate([prompt], GREEDY, lora=["a", "b"])
        llm.unload_lora("b")
        llm.load_lora("d", folder / "b")
        assert llm.generate(prompt, GREEDY, lora="d")[0].outputs[0].token_ids == together[2]
        with pytest.raises(RequestError, match="adapter 'd' already"):
            llm.load_lora("d", folder / "a")
        write_adapter(folder / "other", {"model.layers.9.self_attn.q_proj": (32, 32)})
        with pytest.raises(CheckpointError, match=r"changes 'model\.layers\.9\.self_attn\.q_proj'"):
            llm.load_lora("e", folder / "other")
        assert llm.loras == ("a", "c", "d")


def test_a_package_without_a_record_of_its_rotation_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = QuantizationRecipe("int8-fast", rotate=True, algorithm="rtn")
    monkeypatch.setattr(LayerChanges, "store", lambda *_: None)
    package = export(folder / "base", tmp_path / "p", quantize=recipe)
    with pytest.raises(UsageError, match=r"quantized with rotate by an older version.*quantize the model"):
        load_model(package.path, max_loras=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loras": {"a": "missing"}, "max_loras": 0}, "1 loras are given, but max_loras is 0"),
        ({"max_lora_rank": 4}, "max_lora_rank has no effect without adapters"),
        ({"lora_modules": ("q_proj",)}, "lora_modules has no effect without adapters"),
        ({"loras": {"a": 3}}, "loras must map names to folders, found 'a': 3"),
        ({"loras": {"a": "missing"}}, "missing is not a LoRA adapter"),
        ({"max_loras": 1, "provider": "cpu:0-0,cpu:1-1"}, "a split model cannot run LoRA adapters"),
        (
            {"max_loras": 1, "lora_modules": ("c_attn",)},
            "has no linear layer c_attn .*it has: down_proj, gate_proj",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(folder / "base", **options)


def test_without_adapters_the_graph_has_no_branches(folder: Path) -> None:
    loaded = load_model(folder / "base", max_slots=2)
    assert loaded.runner.info.max_loras == 0
    assert b"lora" not in loaded.graphs[0].read_bytes()
    loaded.close()


def test_the_tensors_of_the_kit_have_the_names_of_peft(folder: Path) -> None:
    assert all(
        name.startswith("base_model.model.model.layers")
        for name in load_file(folder / "a" / "adapter_model.safetensors")
    )
