"""A folder of models: kinds, versions, settings, and a service of a language model beside a tensor model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folder_kit import scan, write_sum

from carryall.errors import (
    PackageError,
    ServiceUnavailableError,
    UnknownModelError,
    UnsupportedTaskError,
    UsageError,
)
from carryall.exporter.demo import demo_path
from carryall.runtime.service.core.messages import GenerationRequest
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.types.sampling_params import SamplingParams


def test_a_language_model_and_tensor_models_are_told_apart_and_served(tmp_path: Path) -> None:
    shutil.copytree(demo_path("draft"), tmp_path / "coder")
    write_sum(tmp_path / "adder" / "1" / "model.onnx", 1)
    write_sum(tmp_path / "adder" / "3" / "model.onnx", 2)
    write_sum(tmp_path / "plain.onnx")
    (tmp_path / ".hidden").mkdir()

    async def scenario() -> None:
        repository = ModelRepository(scan(tmp_path))
        assert [(one.name, one.kind, one.version) for one in repository.models()] == [
            ("adder", "tensor", "3"),
            ("coder", "llm", "1"),
            ("plain", "tensor", "1"),
        ]
        with pytest.raises(ServiceUnavailableError, match="not loaded"):
            repository.tensor("adder")
        await repository.load_all()
        assert repository.ready
        array = np.array([1, 2], np.float32)
        np.testing.assert_array_equal(
            repository.tensor("adder").session.run(None, {"A": array})[0], 3 * array
        )
        np.testing.assert_array_equal(
            repository.tensor("plain", "1").session.run(None, {"A": array})[0], 2 * array
        )
        request = GenerationRequest(prompt="def", params=SamplingParams(max_tokens=3, ignore_eos=True))
        assert (await repository.llm().complete(request)).usage.completion_tokens == 3
        assert repository.llm("coder").name == "coder"
        with pytest.raises(UnknownModelError, match="no version 1 of 'adder'; version 3 is served"):
            repository.tensor("adder", "1")
        with pytest.raises(UnsupportedTaskError, match="is a tensor model"):
            repository.llm("adder")
        with pytest.raises(UnsupportedTaskError, match="is a language model"):
            repository.tensor("coder")
        await repository.unload("adder")
        with pytest.raises(ServiceUnavailableError, match="not loaded"):
            repository.tensor("adder")
        repository.close()

    asyncio.run(scenario())


def test_a_version_can_be_chosen_and_loading_put_off(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_sum(tmp_path / "adder" / str(version) / "model.onnx")
    assert [one.version for one in scan(tmp_path)["adder"]] == ["10"]
    (tmp_path / "adder" / "config.toml").write_text("version = 2\nload = false\n")
    (loader,) = scan(tmp_path)["adder"]
    assert (loader.version, loader.wanted) == ("2", False)

    async def scenario() -> None:
        write_sum(tmp_path / "other.onnx")
        repository = ModelRepository(scan(tmp_path))
        await repository.load_all()
        assert [one.state for one in repository.models()] == ["unloaded", "ready"]
        await repository.load("adder")
        assert repository.tensor("adder", "2") is not None

    asyncio.run(scenario())


def test_one_broken_model_leaves_the_others_but_only_broken_ones_are_an_error(tmp_path: Path) -> None:
    def broken() -> Any:
        raise PackageError("cut off")

    async def scenario() -> None:
        write_sum(tmp_path / "fine.onnx")
        loaders: dict[str, Any] = {"broken": ModelLoader(broken), **scan(tmp_path)}
        repository = ModelRepository(loaders)
        await repository.load_all()
        assert [(one.state, one.reason) for one in repository.models()] == [
            ("failed", "cut off"),
            ("ready", ""),
        ]
        with pytest.raises(PackageError, match="cut off"):
            await ModelRepository({"broken": broken}).load_all()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 4", "has no version 4; there are: 1"),
        ('kind = "llama"', "kind in .* must be llm, tensor or encoder"),
        ("load = 1", "load in .* must be of type bool, not 1"),
        ("model = 3", "model in .* must be of type dict, not 3"),
        ("[model]\nprovidr = 'cpu'", "did you mean 'provider'"),
        ("[model]\nmodel = 'x'", "the folder is the model"),
        ("[broken", "cannot be read as TOML"),
        ("name = 3", "has no option 'name'"),
    ],
)
def test_invalid_settings_are_refused(text: str, message: str, tmp_path: Path) -> None:
    write_sum(tmp_path / "adder" / "1" / "model.onnx")
    (tmp_path / "adder" / "config.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        scan(tmp_path)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no models"):
        scan(tmp_path)
    with pytest.raises(UsageError, match="is not a folder of models"):
        scan(tmp_path / "none")
