"""A folder that changes while it is served, and memory that runs short."""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grpc_serving import INFO
from http_serving import http_serving
from model_folder_kit import scan, write_sum
from null_llm import null_llm
from tiny_lora import write_adapter

from carryall.errors import ServiceUnavailableError, UnknownModelError, UsageError
from carryall.runtime.service.core import upkeep
from carryall.runtime.service.core.messages import GenerationRequest
from carryall.runtime.service.core.model_entry import Entry, ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.core.tensor_model import TensorModel
from carryall.runtime.service.core.upkeep import Upkeep, used_memory
from carryall.runtime.types.sampling_params import SamplingParams


def times(models: ModelRepository, version: str = "") -> float:
    """How often the served ``adder`` adds its input, plus 1."""
    (total,) = models.tensor("adder", version).session.run(None, {"A": np.ones(2, np.float32)})
    return float(total[0])


def versions(models: ModelRepository) -> list[tuple[str, str, str]]:
    return [(one.name, one.version, one.state) for one in models.models()]


def test_changed_folders_are_taken_over_without_a_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sum(tmp_path / "adder" / "1" / "model.onnx", 1)
    write_sum(tmp_path / "plain.onnx")

    async def scenario() -> None:
        models = ModelRepository(scan(tmp_path))
        keeping = Upkeep(models, lambda: scan(tmp_path))
        await models.load_all()
        before = models.tensor("plain")
        assert times(models) == 2

        write_sum(tmp_path / "adder" / "2" / "model.onnx", 2)
        write_sum(tmp_path / "other.onnx")
        await keeping.reload()
        assert versions(models) == [
            ("adder", "2", "ready"), ("other", "1", "ready"), ("plain", "1", "ready"),
        ]  # fmt: skip
        assert (times(models), models.tensor("plain") is before) == (3, True)

        with caplog.at_level(logging.WARNING):
            (tmp_path / "adder" / "2" / "model.onnx").write_text("half-written")
            await keeping.reload()
        assert "the changed model 'adder' cannot be loaded" in caplog.text
        assert times(models) == 3  # the old one stays
        loaded = models.tensor("adder")
        await keeping.reload()
        assert models.tensor("adder") is loaded
        write_sum(tmp_path / "adder" / "2" / "model.onnx", 5)
        await keeping.reload()
        assert times(models) == 6

        (tmp_path / "adder" / "config.toml").write_text("version = 1")
        (tmp_path / "other.onnx").unlink()
        await keeping.reload()
        assert versions(models) == [("adder", "1", "ready"), ("plain", "1", "ready")]
        assert times(models) == 2
        with pytest.raises(UnknownModelError):
            models.tensor("other")

        (tmp_path / "adder" / "config.toml").write_text("versio = 1")
        with caplog.at_level(logging.WARNING):
            await keeping.reload()
        assert "not reloaded: " in caplog.text
        assert times(models) == 2
        shutil.rmtree(tmp_path / "adder")
        await keeping.reload()
        assert versions(models) == [("plain", "1", "ready")]

    asyncio.run(scenario())


def test_the_folder_is_polled(tmp_path: Path) -> None:
    write_sum(tmp_path / "adder" / "1" / "model.onnx", 1)

    async def scenario() -> None:
        models = ModelRepository(scan(tmp_path))
        await models.load_all()
        keeping = Upkeep(models, lambda: scan(tmp_path), poll_seconds=0.02)
        keeping.start()
        write_sum(tmp_path / "adder" / "7" / "model.onnx", 7)
        async with asyncio.timeout(30):
            while versions(models) != [("adder", "7", "ready")]:
                await asyncio.sleep(0.01)
        keeping.stop()

    asyncio.run(scenario())


def test_requests_are_split_by_weight(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_sum(tmp_path / "adder" / str(number) / "model.onnx", number)
    config = tmp_path / "adder" / "config.toml"
    config.write_text('versions = "all"\n[weights]\n1 = 3\n2 = 1\n')

    async def scenario() -> None:
        models = ModelRepository(scan(tmp_path))
        await models.load_all()
        assert [times(models, str(number)) for number in (1, 2, 3)] == [2, 3, 4]
        split = Counter(times(models) for _ in range(1000))
        assert split.keys() == {2, 3}
        assert split[2] == pytest.approx(750, abs=75)  # more than 5 standard deviations
        await models.unload("adder", "1")
        assert {times(models) for _ in range(20)} == {3}
        await models.unload("adder", "2")
        assert {times(models) for _ in range(20)} == {4}  # the newest that is ready
        kept = models.tensor("adder", "3")
        config.write_text("versions = [2, 3]\n")
        await Upkeep(models, lambda: scan(tmp_path)).reload()
        assert models.tensor("adder") is kept

    asyncio.run(scenario())


def test_a_response_names_the_version_that_answered(tmp_path: Path) -> None:
    for number in (1, 2):
        write_sum(tmp_path / "adder" / str(number) / "model.onnx", number)
    (tmp_path / "adder" / "config.toml").write_text('versions = "all"\n[weights]\n1 = 1\n2 = 1\n')
    body = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [2], "data": [1, 1]}]}

    async def scenario() -> None:
        async with http_serving(None, ModelRepository(scan(tmp_path))) as served:
            answers = [(await served.post("/v2/models/adder/infer", **body)).json() for _ in range(40)]
            found = {(one["model_version"], one["outputs"][0]["data"][0]) for one in answers}
            assert found == {("1", 2), ("2", 3)}
            stats = (await served.client.get("/v2/models/stats")).json()["model_stats"]
            counts = {one["version"]: one["inference_count"] for one in stats}
            assert counts == Counter(one["model_version"] for one in answers)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("versions = [1, 4]", "has no version 4; there are: 1, 2"),
        ("versions = []", "name at least 1 version"),
        ('versions = "some"', "must be 'latest', 'all' or a list"),
        ("[weights]\n1 = 1", "names version 1, which is not served"),
        ("[weights]\n2 = -1", "must be at least 0, not -1"),
        ("[weights]\n2 = 0", "all weights in .* are 0"),
        ("[batching]\nsize = 1", "did you mean 'max_size'"),
        ("[batching]\nmax_size = 0", "max_size"),
        ('kind = "encoder"\n[encoder]\npool = 1', "did you mean 'pooling'"),
    ],
)
def test_wrong_policies_are_named(text: str, message: str, tmp_path: Path) -> None:
    for number in (1, 2):
        write_sum(tmp_path / "adder" / str(number) / "model.onnx")
    (tmp_path / "adder" / "config.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        scan(tmp_path)


def test_the_least_recently_used_idle_model_goes_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "MEMORY_SECONDS", 0.01)
    for name in "abc":
        write_sum(tmp_path / f"{name}.onnx")

    async def scenario() -> None:
        models = ModelRepository(scan(tmp_path))
        await models.load_all()

        def ready() -> str:
            return "".join(one.name for one in models.models() if one.state == "ready")

        limit = 2  # one byte for each model that is ready
        keeping = Upkeep(models, memory_limit=limit, memory=lambda: len(ready()))
        models.tensor("a")  # b was not used since it was loaded
        keeping.start()
        async with asyncio.timeout(30):
            while len(ready()) > limit:
                await asyncio.sleep(0.005)
        assert ready() == "ac"
        assert [one.name for one in models.models() if one.on_request] == ["a", "b", "c"]
        with pytest.raises(ServiceUnavailableError, match="'b' is loading again; retry later"):
            models.tensor("b")
        assert models.ready  # the others go on
        async with asyncio.timeout(30):
            while ready() != "ab":  # c is the oldest now
                await asyncio.sleep(0.005)
        keeping.stop()
        assert not [task for task in asyncio.all_tasks() if "_watch" in repr(task) and not task.cancelling()]
        await models.unload("a")
        with pytest.raises(ServiceUnavailableError, match="not loaded; load it first"):
            models.tensor("a")  # an operator unloaded it: it stays

    asyncio.run(scenario())


def test_the_end_of_a_request_counts_as_use_and_a_model_with_adapters_stays(tmp_path: Path) -> None:
    folder = tmp_path / "style"
    write_adapter(folder, {"layer": (1, 1)})
    request = GenerationRequest(prompt="x", params=SamplingParams(max_tokens=40, ignore_eos=True))

    async def scenario() -> None:
        async with null_llm(max_loras=1) as long, null_llm(max_loras=1) as short:
            loads = {"long": lambda: ServedModel(long, INFO), "short": lambda: ServedModel(short, INFO)}
            models = ModelRepository(loads)
            await models.load_all()
            running = models.llm("long").generate(request)
            await anext(running)
            assert [part async for part in models.llm("short").generate(request)][-1].finish_reason
            assert [part async for part in running][-1].finish_reason == "length"
            short.load_lora("style", folder)
            long.load_lora("style", folder)
            assert not await models.evict_idle()
            short.unload_lora("style")
            assert await models.evict_idle()
            assert [(one.name, one.state) for one in models.models()] == [
                ("long", "ready"), ("short", "unloaded"),
            ]  # fmt: skip

    asyncio.run(scenario())


class Slow:
    """An encoder whose requests and unloading wait."""

    def __init__(self) -> None:
        self.go_on, self.began = threading.Event(), threading.Event()

    def encode(self, texts: list[str], **options: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(ids=[1]) for _ in texts]

    def embed(self, texts: list[Any], **options: Any) -> Any:
        self.began.set()
        self.go_on.wait(10)
        return np.ones((len(texts), 2), np.float32)


def test_a_model_that_is_being_unloaded_says_so_or_is_loaded_again() -> None:
    made: list[Slow] = []

    def load() -> Slow:
        made.append(Slow())
        return made[-1]

    async def scenario() -> None:
        models = ModelRepository({"toy": ModelLoader(load, kind="encoder")})
        await models.load_all()
        (entry,) = models.entries
        for evict, message in ((False, "'toy' is being unloaded; load it first"), (True, "loading again")):
            await models.load("toy")
            running = asyncio.create_task(models.serving(models.find("toy")).embedder().embed(["x"]))
            await asyncio.to_thread(made[-1].began.wait, 10)
            unloading = asyncio.create_task(entry.unload(10, evict=evict))
            await asyncio.sleep(0)
            for _ in range(2):
                with pytest.raises(ServiceUnavailableError, match=message):
                    models.serving(models.find("toy")).embedder()
            made[-1].go_on.set()
            assert (await running).prompt_tokens == 1  # it was not cut
            assert await unloading
        async with asyncio.timeout(30):
            while entry.state != "ready":
                await asyncio.sleep(0.005)
        assert len(made) == 3  # once, though two requests asked for it

    asyncio.run(scenario())


def test_an_evicted_version_keeps_its_requests(tmp_path: Path) -> None:
    for number in (1, 2):
        write_sum(tmp_path / "adder" / str(number) / "model.onnx", number)
    (tmp_path / "adder" / "config.toml").write_text('versions = "all"\n')

    async def scenario() -> None:
        models = ModelRepository(scan(tmp_path))
        await models.load_all()
        models.tensor("adder", "1")  # version 2 was used less recently
        assert await models.evict_idle()
        with pytest.raises(ServiceUnavailableError, match="loading again"):
            models.tensor("adder")  # and not an answer of version 1
        async with asyncio.timeout(30):
            while versions(models)[1][2] != "ready":
                await asyncio.sleep(0.005)
        assert times(models) == 3
        models.tensor("adder", "1")
        assert await models.evict_idle()
        await models.unload("adder", "2")  # now by an operator: it stays
        assert times(models) == 2

    asyncio.run(scenario())


def test_the_service_is_ready_while_a_model_is_loaded_again() -> None:
    release = threading.Event()

    async def scenario() -> None:
        loads = {"fast": lambda: None, "slow": lambda: release.wait(10)}
        models = ModelRepository(
            {name: ModelLoader(load, kind="tensor", wanted=name == "fast") for name, load in loads.items()}
        )
        await models.load_all()
        loading = asyncio.create_task(models.load("slow"))
        async with asyncio.timeout(30):
            while versions(models)[1][2] != "loading":
                await asyncio.sleep(0.005)
        assert models.ready
        release.set()
        await loading

    asyncio.run(scenario())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory in arenas")
def test_an_unloaded_model_gives_its_memory_back() -> None:
    class Blocks:
        """A model of many small blocks, between which some are kept by others."""

        def __init__(self) -> None:
            self.blocks = [bytes(1000) for _ in range(100_000)]

        def close(self) -> None:
            kept.extend(self.blocks[::100])
            self.blocks.clear()

    kept: list[bytes] = []

    async def scenario() -> None:
        models = ModelRepository({"toy": ModelLoader(Blocks, kind="tensor")})
        await models.load_all()
        before = used_memory()
        await models.unload("toy")
        assert before - used_memory() > 50 * 2**20

    asyncio.run(scenario())


def test_a_busy_model_and_the_last_one_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sum(tmp_path / "a.onnx")

    async def scenario() -> None:
        models = ModelRepository(scan(tmp_path))
        await models.load_all()
        assert not await models.evict_idle()
        loaded: Any = models.tensor("a")
        models = ModelRepository(
            {name: ModelLoader(lambda: TensorModel(loaded.session), kind="tensor") for name in "xy"}
        )
        await models.load_all()
        with monkeypatch.context() as busy:
            busy.setattr(Entry, "active", 1)
            assert not await models.evict_idle()
        assert await models.evict_idle()

    asyncio.run(scenario())
    assert used_memory() > 2**20
