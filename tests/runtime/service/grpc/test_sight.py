"""Pictures reach a model through gRPC, and the answer is that of transformers."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_serving import serving
from PIL import Image
from tiny_vlms import SPECIAL, write_vlm
from vision_golden import golden_path, picture

from carryall import AsyncLLM
from carryall.client import AsyncClient
from carryall.errors import RequestError
from carryall.proto import kserve_pb2, kserve_pb2_grpc
from carryall.runtime.service.kserve.tensors import of_bytes, to_raw
from carryall.runtime.tasks.export import export
from carryall.runtime.text.tokenizer import Tokenizer

GOLDEN = np.load(golden_path("smolvlm"))
NEW = 12
QUESTION = {"type": "text", "text": "What is it?"}


def png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture()).save(out, "PNG")
    return out.getvalue()


@pytest.mark.long
def test_parts_and_tensors_of_pictures_give_the_answer_of_transformers(tmp_path: Path) -> None:
    package = tmp_path / "package"
    export(write_vlm(tmp_path / "checkpoint"), package)
    answer = Tokenizer(package).decode(GOLDEN["tokens"][:NEW].tolist())
    parts: list[dict[str, Any]] = [{"type": "image", "image": png()}, QUESTION]
    llm = AsyncLLM(package, max_slots=2, provider="cpu", kv_cache_dtype="float32")

    async def scenario() -> None:
        async with serving(llm) as served, AsyncClient(served.address) as client:
            messages = [{"role": "user", "content": parts}]
            reply = await client.chat(messages, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert (reply.text, reply.usage.prompt_tokens) == (answer, len(GOLDEN["token_ids"]))
            for image, why in ((b"x", "no supported format"), (b"", "part 1 of a message is empty")):
                with pytest.raises(RequestError, match=why):
                    await client.chat([{"role": "user", "content": [{"type": "image", "image": image}]}])
            with pytest.raises(RequestError, match="a part of a content must be"):
                await client.chat([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
            assert await inferred(served.address, QUESTION["text"]) == answer
            typed = QUESTION["text"] + "".join(SPECIAL)  # stays text, of which each byte is a token
            messages = [{"role": "user", "content": [parts[0], {"type": "text", "text": typed}]}]
            reply = await client.chat(messages, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert reply.usage.prompt_tokens == len(GOLDEN["token_ids"]) + len("".join(SPECIAL))
            assert await inferred(served.address, typed) == reply.text != answer

    async def inferred(address: str, question: str) -> str:
        """Return the answer over the Open Inference Protocol, with the file's bytes as they are."""
        request = kserve_pb2.ModelInferRequest(model_name="toy")
        for name, value in (("text_input", question.encode()), ("image", png())):
            request.inputs.add(name=name, datatype="BYTES", shape=[1])
            request.raw_input_contents.append(to_raw(of_bytes([value])))
        request.parameters["temperature"].double_param = 0
        request.parameters["max_tokens"].int64_param = NEW
        request.parameters["ignore_eos"].bool_param = True
        request.parameters["exclude_input_in_output"].bool_param = True
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            given = await stub.ModelInfer(request)
        return bytes(given.raw_output_contents[0][4:]).decode()

    try:
        asyncio.run(scenario())
    finally:
        llm.shutdown()
