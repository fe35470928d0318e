"""LoRA adapters of a service: chosen by ``model``, loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from api_keys import key_file
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from tiny_lora import write_adapter

from carryall.runtime.types.sampling_params import SamplingParams

PROMPT: dict[str, Any] = {"prompt": "def f(x):", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three adapters of the toy model, and one for another model."""
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, {"layer": (1, 1)}, seed=seed)
    write_adapter(tmp_path / "other", {"layers.9.q_proj": (4, 4)})
    return tmp_path


def test_adapters_are_loaded_listed_chosen_and_unloaded(folder: Path) -> None:
    async def scenario() -> None:
        async with null_llm(max_loras=2) as llm, http_serving(llm) as served:
            for name in "abc":
                done = await served.post(LOAD, lora_name=name, lora_path=str(folder / name))
                assert (done.status_code, done.text) == (
                    200,
                    f"Success: LoRA adapter '{name}' added successfully.",
                )
            listed = {one["id"]: one for one in (await served.client.get("/v1/models")).json()["data"]}
            assert list(listed) == ["toy", "a", "b", "c"]
            assert (listed["a"]["parent"], listed["a"]["root"]) == ("toy", str(folder / "a"))
            assert listed["toy"]["parent"] is None
            names = ["toy", "a", "b", "c"]
            answers = await asyncio.gather(
                *[served.post("/v1/completions", model=name, **PROMPT) for name in names]
            )
            bodies = [answer.json() for answer in answers]
            assert [body["model"] for body in bodies] == names
            assert len({body["choices"][0]["text"] for body in bodies}) == 4
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            chatted = await served.post("/v1/chat/completions", model="a", stream=True, **chat)
            assert '"model":"a"' in chatted.text.replace(": ", ":")
            done = await served.post(UNLOAD, lora_name="b")
            assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'b' removed successfully.")
            gone = await served.post("/v1/completions", model="b", **PROMPT)
            assert gone.status_code == 404
            assert "there is no model 'b'; there are: toy, a, c" in gone.text
            again = await served.post("/v1/completions", model="c", **PROMPT)
            assert again.json()["choices"] == bodies[3]["choices"]

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "a"}, 400, "'lora_path' is required"),
        (LOAD, {"lora_name": "", "lora_path": "x"}, 400, "'lora_name' is required"),
        (LOAD, {"lora_name": 3, "lora_path": "x"}, 400, "'lora_name'"),
        (LOAD, {"lora_name": "toy", "lora_path": "a"}, 400, "the name 'toy' is that of another model"),
        (LOAD, {"lora_name": "x", "lora_path": "missing"}, 400, "missing is not a LoRA adapter"),
        (LOAD, {"lora_name": "x", "lora_path": "other"}, 400, "changes 'layers.9.q_proj'"),
        (LOAD, {"lora_name": "x", "lora_path": "a", "model": "y"}, 404, "there is no model 'y'"),
        (UNLOAD, {"lora_name": "x"}, 404, "there is no LoRA adapter 'x'; there are: none"),
        ("/v1/embeddings", {"model": "x", "input": "a"}, 404, "there is no model 'x'"),
    ],
)
def test_wrong_requests_change_nothing(
    folder: Path, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    async def scenario() -> None:
        async with null_llm(max_loras=1) as llm, http_serving(llm) as served:
            given = {**body, "lora_path": str(folder / body["lora_path"])} if body.get("lora_path") else body
            answer = await served.post(path, **given)
            assert message in answer.text
            assert answer.status_code == status
            assert llm.loras == ()

    asyncio.run(scenario())


def test_adapters_have_no_embeddings(folder: Path) -> None:
    async def scenario() -> None:
        async with null_llm(max_loras=1) as llm, http_serving(llm) as served:
            llm.load_lora("a", folder / "a")
            answer = await served.post("/v1/embeddings", model="a", input="x")
            assert answer.status_code == 501
            assert "'a' is a LoRA adapter, which has no embeddings; name its base model 'toy'" in answer.text

    asyncio.run(scenario())


@pytest.mark.long
def test_adapters_come_and_go_during_traffic(folder: Path) -> None:
    async def scenario() -> None:
        async with null_llm(max_loras=1, step_seconds=0.002) as llm, http_serving(llm) as served:
            for name in "ab":
                llm.load_lora(name, folder / name)
            expected = {
                name: (await served.post("/v1/completions", model=name, **PROMPT)).json()["choices"]
                for name in ("toy", "a", "b")
            }

            async def ask(name: str) -> None:
                answer = await served.post("/v1/completions", model=name, **PROMPT)
                assert answer.json()["choices"] == expected[name]

            async def change() -> None:
                for _ in range(5):
                    await served.post(LOAD, lora_name="c", lora_path=str(folder / "c"))
                    await served.post("/v1/completions", model="c", **PROMPT)
                    await served.post(UNLOAD, lora_name="c")

            await asyncio.gather(change(), *[ask(name) for name in ("toy", "a", "b") * 6])
            llm.unload_lora("a")
            metrics = (await served.client.get("/metrics")).text
            assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",' in metrics

    asyncio.run(scenario())


def test_running_adapters_are_measured(folder: Path) -> None:
    async def scenario() -> None:
        async with null_llm(max_loras=1, step_seconds=0.05) as llm, http_serving(llm) as served:
            for name in "ab":
                llm.load_lora(name, folder / name)
            tasks = [
                asyncio.create_task(served.post("/v1/completions", model=name, **{**PROMPT, "max_tokens": 8}))
                for name in "ab"
            ]
            found = ""
            while 'waiting_lora_adapters="b"' not in found and not tasks[1].done():
                found = (await served.client.get("/metrics")).text
            assert 'running_lora_adapters="a",waiting_lora_adapters="b"' in found
            await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_loading_needs_the_admin_right(folder: Path) -> None:
    async def scenario() -> None:
        keys = key_file(folder, plain="", boss="admin = true")
        async with null_llm(max_loras=1) as llm, http_serving(llm, api_keys=keys) as served:
            body = {"lora_name": "a", "lora_path": str(folder / "a")}
            for path in (LOAD, UNLOAD):
                answer = await served.client.post(
                    path, json=body, headers={"Authorization": "Bearer plain-key"}
                )
                assert answer.status_code == 403
                assert "may not load or unload models" in answer.text
            answer = await served.client.post(LOAD, json=body, headers={"Authorization": "Bearer boss-key"})
            assert answer.status_code == 200

    asyncio.run(scenario())


async def text_of(served: HttpServed, path: str, **body: Any) -> tuple[int, str]:
    """The status, and the text that an endpoint answers."""
    answer = await served.post(path, **body)
    document = answer.json()
    return answer.status_code, str(document.get("text_output") or document.get("generated_text") or document)


def test_other_apis_choose_adapters_by_their_parameters(folder: Path) -> None:
    async def scenario() -> None:
        async with null_llm(max_loras=2) as llm, http_serving(llm) as served:
            for name in "ab":
                llm.load_lora(name, folder / name)
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            expected: dict[str | None, str] = {}
            for lora in (None, "a", "b"):
                *_, last = [output async for output in llm.generate("def f(x):", params, lora=lora)]
                expected[lora] = last.outputs[0].text
            assert len(set(expected.values())) == 3
            ask = {"text_input": "def f(x):", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
            options = json.dumps({"temperature": 0, "max_tokens": 8, "ignore_eos": True, "lora_name": "a"})
            kserve = "/v2/models/toy/generate"
            for lora, text in expected.items():
                assert await text_of(served, kserve, **ask, adapter_id=lora) == (200, text)
                tgi = {"inputs": "def f(x):", "parameters": {"max_new_tokens": 8, "adapter_id": lora}}
                assert (await text_of(served, "/generate", **tgi))[1] == text
            triton = {"text_input": "def f(x):", "sampling_parameters": options}
            assert await text_of(served, kserve, **triton) == (200, expected["a"])
            refused: list[tuple[str, dict[str, Any], int]] = [
                (kserve, {**ask, "adapter_id": "c"}, 404),
                (kserve, {**ask, "adapter_id": 3}, 400),
                ("/generate", {"inputs": "x", "parameters": {"adapter_id": "c"}}, 404),
                ("/generate", {"inputs": "x", "parameters": {"adapter_id": 3}}, 400),
            ]
            for path, wrong, status in refused:
                found, message = await text_of(served, path, **wrong)
                assert found == status
                assert ("no LoRA adapter 'c'; there are: a, b" in message) == (status == 404), message

    asyncio.run(scenario())


def test_sampling_parameters_without_an_element_are_refused() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
            empty = {"name": "sampling_parameters", "datatype": "BYTES", "shape": [0], "data": []}
            answer = await served.post("/v2/models/toy/infer", inputs=[text, empty])
            assert answer.status_code == 400
            assert "input 'sampling_parameters' must be BYTES with one element" in answer.text

    asyncio.run(scenario())
