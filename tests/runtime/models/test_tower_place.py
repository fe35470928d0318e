"""Encoders of pictures and sound on another provider than the decoder's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tiny_models import write_tiny
from tiny_trocr import write_trocr
from tiny_vlms import write_vlm
from tiny_whisper import write_whisper
from trocr_golden import NEW_TOKENS as TROCR_TOKENS
from trocr_golden import SEED as TROCR_SEED
from trocr_golden import golden_path as trocr_golden
from trocr_golden import pictures
from vision_golden import NEW_TOKENS, golden_path, picture
from whisper_golden import SEED, sounds

from carryall import LLM, SamplingParams
from carryall.cli import carryall as program
from carryall.errors import CarryallError, ProviderUnavailableError, UsageError
from carryall.exporter.export import export_package
from carryall.providers.base import RunnerConfig
from carryall.runtime.models.tower_place import TowerPlace, tower_place

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
Json = dict[str, Any]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    export_package(write_vlm(folder / "checkpoint"), folder / "package")
    return folder / "package"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The outputs of each run of OpenVINO's session."""
    pytest.importorskip("openvino")
    from carryall.providers.openvino.model import OpenVinoSession

    asked, run = list[list[str]](), OpenVinoSession.run

    def counted(session: Any, names: list[str], feeds: Any) -> Any:
        asked.append(names)
        return run(session, names, feeds)

    monkeypatch.setattr(OpenVinoSession, "run", counted)
    return asked


def asking(*seen: Any, text: str = "") -> list[Json]:
    parts: list[Json] = [{"type": "image", "image": each} for each in seen]
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}]


def tokens(llm: LLM, messages: list[Json], params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.chat(messages, params)
    output.check()
    return list(output.outputs[0].token_ids)


def test_the_tower_alone_runs_there(package: Path, runs: list[list[str]]) -> None:
    wanted = np.load(golden_path("smolvlm"))["tokens"].tolist()
    question = asking(picture(), text="What is it?")
    with LLM(package, kv_cache_dtype="float32", tower_provider="openvino:CPU") as llm:
        assert not runs
        assert tokens(llm, question) == wanted
        assert set(map(tuple, runs)) == {("image_states",)}
        count = len(runs)
        assert tokens(llm, question) == wanted
        assert len(runs) == count
    runs.clear()
    with LLM(package, kv_cache_dtype="float32") as llm:
        assert tokens(llm, question) == wanted
    assert not runs


@pytest.mark.long
@pytest.mark.parametrize(
    "places", [{"tower_provider": "openvino"}, {"provider": "openvino", "tower_provider": "cpu"}], ids=str
)
def test_a_decoder_attends_to_rows_of_another_provider(
    places: Json, runs: list[list[str]], tmp_path: Path
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=TROCR_TOKENS, ignore_eos=True)
    with LLM(write_trocr(tmp_path, "vit", TROCR_SEED), **places) as llm:
        answers = [tokens(llm, asking(each), greedy) for each in pictures()]
    assert answers == np.load(trocr_golden("vit"))["tokens"][:, 1:].tolist()
    assert (["image_states"] in runs) == (places["tower_provider"] == "openvino")


@pytest.mark.long
def test_sound_is_encoded_there_too(runs: list[list[str]], tmp_path: Path) -> None:
    folder = write_whisper(tmp_path, SEED)
    with LLM(folder) as llm:
        expected = llm.transcribe(sounds()[0])
    with LLM(folder, tower_provider="openvino") as llm:
        assert llm.transcribe(sounds()[0]).text == expected.text
    assert set(map(tuple, runs)) == {("audio_states",)}


def test_kept_keys_and_values_of_pictures_belong_to_their_tower(package: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    cached = []
    question = asking(picture(), text="What is it?")
    for place in (None, "openvino", None, "openvino"):
        with LLM(package, tower_provider=place, prefix_cache_dir=str(tmp_path)) as llm:
            (output,) = llm.chat(question, GREEDY)
            assert output.metrics is not None
            cached.append(output.metrics.cached_tokens)
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_the_decoders_provider_keeps_its_options() -> None:
    config = RunnerConfig(num_threads=1, context_length=64, options={"tower": "float32"})
    assert tower_place(None, "cpu", config) == TowerPlace("cpu", config)
    assert tower_place("cpu", "cpu", config).config.options["tower"] == "float32"
    other = tower_place("openvino:CPU", "cpu", config)
    assert (other.provider, other.config) == (
        "openvino",
        RunnerConfig(num_threads=1, options={"device": "CPU"}),
    )


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        ("nowhere", UsageError, "unknown provider 'nowhere'"),
        (
            "cpu:0-1,openvino:2-2",
            UsageError,
            "must be one provider, with a device if need be: cpu, openvino:GPU",
        ),
        ("cuda,cpu", UsageError, "must be one provider"),
        ("auto", UsageError, "must be one provider"),
        ("cpu:1", UsageError, "provider 'cpu' has no devices to choose from"),
        ("cuda", ProviderUnavailableError, "tower_provider 'cuda' is not available: "),
    ],
)
def test_other_places_are_refused_when_the_model_is_loaded(
    place: str, kind: type[CarryallError], message: str, package: Path
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        LLM(package, tower_provider=place)


def test_a_device_that_is_not_there_is_refused_when_the_model_is_loaded(package: Path) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(ProviderUnavailableError, match=r"there is no device 'GPU\.7', only CPU"):
        LLM(package, tower_provider="openvino:GPU.7")


def test_models_of_text_have_no_tower(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tower_provider has no effect: .* reads text only; omit it"):
        LLM(write_tiny("llama", tmp_path), tower_provider="cpu")


@pytest.mark.long
def test_the_command_line_chooses_it(package: Path, runs: list[list[str]], tmp_path: Path) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    arguments = [
        "run",
        str(package),
        "What?",
        "--image",
        str(tmp_path / "a.png"),
        "--max-tokens",
        "4",
        "--json",
    ]
    said = []
    for more in ([], ["--tower-provider", "openvino"]):
        result = CliRunner().invoke(program, [*arguments, "--temperature", "0", *more])
        assert result.exit_code == 0, result.output
        said.append(json.loads(result.stdout)["text"])
    assert said[0] == said[1]
    assert runs
