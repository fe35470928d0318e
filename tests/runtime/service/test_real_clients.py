"""Clients that others wrote, each in its own environment; docs/clients.md is the report."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_kit import write_encoder
from grpc_serving import INFO
from http_serving import http_serving
from null_llm import TEMPLATE, null_llm
from own_environment import python_with
from PIL import Image
from tiny_vlms import write_vlm
from vision_golden import golden_path, picture

from carryall.exporter.demo import demo_path
from carryall.runtime.api.text_encoder import TextEncoder
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel, load_served_model
from carryall.runtime.tasks.export import export
from carryall.runtime.text.tokenizer import Tokenizer

CLIENTS = Path(__file__).resolve().parents[2] / "kits/service/clients"
# The newest versions; docs/clients.md names those that were last seen to work.
PACKAGES = {
    "openai_client.py": ("openai", "anthropic"),
    "anthropic_client.py": ("openai", "anthropic"),
    "ollama_client.py": ("ollama",),
    "huggingface_client.py": ("huggingface_hub",),
    "litellm_client.py": ("litellm",),
    "langchain_client.py": ("langchain-openai",),
    "open_responses_client.py": ("openresponses-types",),
    "pydantic_ai_client.py": ("pydantic-ai-slim[openai]",),
    "openai_agents_client.py": ("openai-agents",),
    "instructor_client.py": ("instructor",),
    "smolagents_client.py": ("smolagents[openai]",),
    "haystack_client.py": ("haystack-ai",),
    "llama_index_client.py": ("llama-index-llms-openai-like",),
    "langgraph_client.py": ("langgraph", "langchain-openai"),
    "dspy_client.py": ("dspy",),
    "autogen_client.py": ("autogen-agentchat", "autogen-ext[openai]"),
    "open_webui_client.py": ("open-webui",),
}
SECONDS = 300
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,unsupported_method"
CHECKS += ",response_schema_conformance,response_headers_conformance"

pytestmark = pytest.mark.slow


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[str]:
    """The URL of a service of a language model ``toy`` and an encoder ``vectors``."""
    write_encoder(folder)
    async with null_llm(template=TEMPLATE, step_seconds=0.002) as llm:
        models = ModelRepository(
            {
                "toy": lambda: ServedModel(llm, INFO, {"max_tokens": 16}),
                "vectors": ModelLoader(lambda: TextEncoder(folder), kind="encoder"),
            },
            default="toy",
        )
        async with http_serving(None, models) as served:
            yield served.url


async def output_of(command: list[str], folder: Path, **environment: str) -> str:
    """What a command prints, run in a folder; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CLIENTS), **environment},
    )
    out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0, f"{out.decode()[-9000:]}\n{err.decode()[-3000:]}"
    return out.decode()


@pytest.mark.parametrize("script", PACKAGES)
def test_client(script: str, tmp_path: Path) -> None:
    python = python_with(*PACKAGES[script])

    async def scenario() -> None:
        async with service(tmp_path / "encoder") as url:
            out = await output_of([str(python), str(CLIENTS / script), url], tmp_path)
            results = json.loads(out.splitlines()[-1])
            assert len(results) > 3
            assert {name: error for name, error in results.items() if error} == {}

    asyncio.run(scenario())


SEEING = {
    "openai": ("openai", "anthropic"),
    "anthropic": ("openai", "anthropic"),
    "ollama": ("ollama",),
    "litellm": ("litellm",),
    "langchain": ("langchain-openai",),
    "docling": ("docling", "torch==2.13.0"),  # a CPU build, which docling would not choose by itself
}


@pytest.mark.parametrize("client", SEEING)
def test_a_client_sends_a_picture(client: str, tmp_path: Path) -> None:
    """The answer is that of transformers to the same pixels."""
    python, golden = python_with(*SEEING[client]), np.load(golden_path("smolvlm"))
    package, file = tmp_path / "toy", tmp_path / "picture.png"
    export(write_vlm(tmp_path / "checkpoint"), package)
    Image.fromarray(picture()).save(file)
    answer = Tokenizer(package).decode(golden["tokens"][:12].tolist())

    async def scenario() -> None:
        options: dict[str, Any] = {"provider": "cpu", "max_slots": 2, "kv_cache_dtype": "float32"}
        models = ModelRepository({"toy": lambda: load_served_model(package, **options)}, default="toy")
        async with http_serving(None, models) as served:
            command = [str(python), str(CLIENTS / "seeing_client.py"), served.url]
            out = await output_of([*command, str(file), answer, client], tmp_path)
        results = json.loads(out.splitlines()[-1])
        assert results
        assert {name: error for name, error in results.items() if error} == {}

    asyncio.run(scenario())


TASK = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


def test_lm_eval(tmp_path: Path) -> None:
    """lm-eval's accuracy by ``echo`` and ``logprobs`` is what the engine itself says."""
    python = python_with("lm-eval[api]", "transformers")
    questions = [
        {"question": f"def f{n}(x):", "choices": [" return x", " pass", " x = 1"], "answer": n % 3}
        for n in range(6)
    ]
    data = tmp_path / "tiny.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            right = 0
            for one in questions:
                scores = await llm.score(str(one["question"]), one["choices"])  # type: ignore[arg-type]
                sums = [score.logprob for score in scores]
                right += sums.index(max(sums)) == one["answer"]
            options = f"model=toy,base_url={served.url}/v1/completions,num_concurrent=4,max_retries=1"
            options += f",tokenizer_backend=huggingface,tokenizer={demo_path('pycoder')},max_length=512"
            command = [
                str(python.with_name("lm_eval")),
                "--model",
                "local-completions",
                "--model_args",
                options,
            ]
            command += ["--tasks", "tiny", "--include_path", str(tmp_path), "--output_path", str(tmp_path)]
            await output_of(
                command, tmp_path, OPENAI_API_KEY="none", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"
            )
            (report,) = tmp_path.rglob("results_*.json")
            found = json.loads(report.read_text())["results"]["tiny"]["acc,none"]
            assert found == pytest.approx(right / len(questions))

    asyncio.run(scenario())


@asynccontextmanager
async def demo_service(folder: Path) -> AsyncIterator[str]:
    """The URL of ``carryall serve`` with the embedded model, all endpoints and short contexts."""
    command = [sys.executable, "-m", "carryall", "serve", "demo", "--json", "--http-port", "0"]
    command += ["--grpc-port", "none", "--context-length", "256", "--shared-memory"]
    command += ["--batch-folder", str(folder / "batches")]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=folder)
    assert process.stdout is not None
    try:
        yield f"http://{json.loads(await process.stdout.readline())['http']}"
    finally:
        process.terminate()
        assert await process.wait() == 0


def test_schemathesis(tmp_path: Path) -> None:
    """Nothing is found by requests that schemathesis makes from the OpenAPI document, in a bounded time."""
    python = python_with("schemathesis")

    async def scenario() -> None:
        async with demo_service(tmp_path) as url:
            command = [str(python.with_name("schemathesis")), "run", f"{url}/openapi.json", "--no-color"]
            command += ["--phases", "examples,coverage,fuzzing,stateful", "--seed", "1", "--no-shrink"]
            command += ["--workers", "2"]
            command += ["--max-examples", os.environ.get("CARRYALL_SCHEMATHESIS_EXAMPLES", "6")]
            command += ["--max-time", str(SECONDS - 100), "--request-timeout", "30", "--continue-on-failure"]
            # Without its models, the service would refuse the rest. Encoders alone have the others: a
            # language model answers 501, which schemathesis takes for a fault.
            encoders = "^/(decode|embed_all|embed_sparse|predict|similarity)$"
            command += ["--exclude-path-regex", f"/unload|{encoders}", "--checks", CHECKS]
            out = await output_of(command, tmp_path)
            made, passed = re.findall(r"(\d+) generated, (\d+) passed", out)[0]
            assert made == passed

    asyncio.run(scenario())


def test_guidellm(tmp_path: Path) -> None:
    """A benchmark of streams completes: every request of it succeeds, with the tokens that were asked for."""
    python = python_with("guidellm")

    async def scenario() -> None:
        async with demo_service(tmp_path) as url:
            backend = f"kind=openai_http,target={url},model=demo,request_format=/v1/completions"
            command = [str(python.with_name("guidellm")), "run", "--disable-console", "--backend", backend]
            command += ["--tokenizer", f"kind=hf_auto,model={demo_path('pycoder')}"]
            command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
            command += ["--profile", "kind=concurrent,streams=4"]
            command += ["--constraint", "kind=max_requests,count=24"]
            command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
            await output_of(command, tmp_path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
            (found,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
            totals = found["metrics"]["request_totals"]
            assert totals == {"successful": 24, "errored": 0, "incomplete": 0, "total": 24}
            requests = found["requests"]["successful"]
            assert {one["output_metrics"]["text_tokens"] for one in requests} == {32}
            assert all(one["time_to_first_token_ms"] > 0 for one in requests)

    asyncio.run(scenario())
