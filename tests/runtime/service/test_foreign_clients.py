"""Clients that others wrote, each in an environment of its own, against a server with all protocols."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from grpc_serving import serving
from http_serving import http_serving
from null_llm import null_llm
from own_environment import python_with
from tensor_models import echo_model, mixed_repository, sum_model

from carryall.runtime.types.sampling_params import SamplingParams

CLIENTS = Path(__file__).resolve().parents[2] / "kits/service/clients"

pytestmark = pytest.mark.slow


async def run(python: Path, script: str, *arguments: str) -> str:
    """What a script of ``CLIENTS`` prints."""
    process = await asyncio.create_subprocess_exec(
        python,
        CLIENTS / script,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


@pytest.mark.parametrize("mode", ["grpc", "http", "aio"])
def test_tritonclient(mode: str) -> None:
    python = python_with("tritonclient[grpc,http]==2.73.0")

    async def scenario() -> None:
        sessions = {
            "sum": sum_model(),
            "texts": echo_model(ir.DataType.STRING),
            "half": echo_model(ir.DataType.FLOAT16),
            "brain": echo_model(ir.DataType.BFLOAT16),
        }
        async with null_llm(step_seconds=0.005) as llm:
            models = mixed_repository(llm, sessions)
            allowed: dict[str, Any] = {"shared_memory": True}
            async with (
                serving(llm, models, **allowed) as served,
                http_serving(llm, models, **allowed) as http,
            ):
                address = http.url.removeprefix("http://")
                assert await run(python, "triton_client.py", mode, served.address, address) == "fine\n"

    asyncio.run(scenario())


def test_a_routers_own_stubs() -> None:
    python = python_with("smg-grpc-proto==0.4.28")

    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, serving(llm) as served:
            tokens = llm.encode("def f(x):")
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            *_, expected = [output async for output in llm.generate(tokens, params)]
            found = await run(python, "vllm_router.py", served.address, json.dumps(tokens))
            assert json.loads(found) == expected.outputs[0].token_ids

    asyncio.run(scenario())
