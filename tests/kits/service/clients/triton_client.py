"""Run by the environment that has tritonclient: what a Triton user does, against an address of each protocol.

python triton_client.py grpc|http|aio GRPC_ADDRESS HTTP_ADDRESS
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from typing import Any
from uuid import uuid4

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException, shared_memory

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.full((2, 4), 0.5, np.float32)
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def tensor(module: Any, name: str, datatype: str, array: Any, **options: Any) -> Any:
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **options)
    return made


def sums(module: Any, **options: Any) -> list[Any]:
    return [tensor(module, "A", "FP32", A, **options), tensor(module, "B", "FP32", B, **options)]


def texts(module: Any, text: str, *, stream: bool) -> list[Any]:
    sampling = json.dumps(GREEDY).encode()
    return [
        tensor(module, "text_input", "BYTES", np.array([text.encode()], object)),
        tensor(module, "sampling_parameters", "BYTES", np.array([sampling], object)),
        tensor(module, "stream", "BOOL", np.array([stream])),
        tensor(module, "exclude_input_in_output", "BOOL", np.array([True])),
    ]


def refused(call: Any, *words: str) -> None:
    message = "the call was not refused"
    try:
        call()
    except InferenceServerException as error:
        message = str(error)
    assert all(word in message for word in words), message


def common(module: Any, client: Any) -> str:
    """What both clients do alike; returns the text of the language model."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("sum")
    assert client.is_model_ready("sum", "1")
    np.testing.assert_array_equal(client.infer("sum", sums(module)).as_numpy("SUM"), A + B)
    wanted = [module.InferRequestedOutput("SUM")]
    answer = client.infer("sum", sums(module), outputs=wanted, request_id="7", model_version="1")
    np.testing.assert_array_equal(answer.as_numpy("SUM"), A + B)
    strings = np.array([["ä", ""]], object)
    echoed = client.infer("texts", [tensor(module, "INPUT0", "BYTES", strings)]).as_numpy("OUTPUT0")
    assert [one.decode() for one in echoed.ravel()] == ["ä", ""]
    halves = np.array([[0.5, -2.0]], np.float16)
    echoed = client.infer("half", [tensor(module, "INPUT0", "FP16", halves)]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(echoed, halves)
    brains = np.array([[0.5, -2.0]], ml_dtypes.bfloat16)
    echoed = client.infer("brain", [tensor(module, "INPUT0", "BF16", brains)]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(echoed, brains)
    refused(lambda: client.infer("no", sums(module)), "no model 'no'")
    refused(lambda: client.infer("sum", sums(module)[:1]), "the inputs must be A, B")
    refused(lambda: client.get_model_metadata("no"), "no model 'no'")
    text = client.infer("toy", texts(module, "def f(x):", stream=False)).as_numpy("text_output")
    client.unload_model("toy")
    assert not client.is_model_ready("toy")
    return str(text[0].decode())


def through_shared_memory(module: Any, client: Any) -> None:
    """Both inputs and the output lie in one region."""
    key, size = f"carryall-{uuid4().hex}", A.nbytes
    handle = shared_memory.create_shared_memory_region("region", key, 3 * size)
    try:
        shared_memory.set_shared_memory_region(handle, [A, B])
        client.register_system_shared_memory("region", key, 3 * size)
        inputs = [module.InferInput(name, list(A.shape), "FP32") for name in "AB"]
        for i, one in enumerate(inputs):
            one.set_shared_memory("region", size, offset=i * size)
        wanted = module.InferRequestedOutput("SUM")
        wanted.set_shared_memory("region", size, offset=2 * size)
        client.infer("sum", inputs, outputs=[wanted])
        found = shared_memory.get_contents_as_numpy(handle, np.float32, list(A.shape), 2 * size)
        np.testing.assert_array_equal(found, A + B)
        refused(lambda: client.register_system_shared_memory("region", key, size), "already registered")
        client.unregister_system_shared_memory("region")
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def check_grpc(address: str) -> str:
    client = triton_grpc.InferenceServerClient(address)
    assert client.get_server_metadata().name == "carryall"
    assert [one.name for one in client.get_model_metadata("sum").inputs] == ["A", "B"]
    assert client.get_model_config("sum", as_json=True)["config"]["name"] == "sum"
    names = [one.name for one in client.get_model_repository_index().models]
    assert set(names) == {"toy", "sum", "texts", "half", "brain"}, names
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    client.async_stream_infer(
        "toy", texts(triton_grpc, "def f(x):", stream=True), request_id="1", enable_empty_final_response=True
    )
    parts = []
    while True:
        result, error = found.get(timeout=30)
        assert error is None, error
        parts.append(result.as_numpy("text_output")[0].decode())
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.async_stream_infer("no", sums(triton_grpc), request_id="2")
    _, error = found.get(timeout=30)
    assert "no model 'no'" in str(error)
    client.stop_stream()
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer("sum", sums(triton_grpc), lambda result, error: done.put((result, error)))
    result, error = done.get(timeout=30)
    np.testing.assert_array_equal(result.as_numpy("SUM"), A + B)
    through_shared_memory(triton_grpc, client)
    text = common(triton_grpc, client)
    assert text == "".join(parts)
    stats = client.get_inference_statistics("sum").model_stats[0]
    assert stats.inference_count == 8, stats
    client.close()
    return text


def check_http(address: str) -> None:
    client = triton_http.InferenceServerClient(address)
    assert client.get_server_metadata()["name"] == "carryall"
    assert [one["name"] for one in client.get_model_metadata("sum")["inputs"]] == ["A", "B"]
    assert client.get_model_config("sum")["name"] == "sum"
    assert len(client.get_model_repository_index()) == 5
    plain = sums(triton_http, binary_data=False)
    wanted = [triton_http.InferRequestedOutput("SUM", binary_data=False)]
    np.testing.assert_array_equal(client.infer("sum", plain, outputs=wanted).as_numpy("SUM"), A + B)
    pending = client.async_infer("sum", sums(triton_http))
    np.testing.assert_array_equal(pending.get_result().as_numpy("SUM"), A + B)
    through_shared_memory(triton_http, client)
    common(triton_http, client)
    assert client.get_inference_statistics("sum")["model_stats"][0]["inference_count"] > 0
    client.close()


async def check_aio(grpc_address: str, http_address: str) -> None:
    client = triton_grpc_aio.InferenceServerClient(grpc_address)
    answer = await client.infer("sum", sums(triton_grpc_aio))
    np.testing.assert_array_equal(answer.as_numpy("SUM"), A + B)

    async def requests() -> Any:
        for n in range(3):
            yield {"model_name": "sum", "inputs": sums(triton_grpc_aio), "request_id": str(n)}

    ids = []
    async for result, error in client.stream_infer(requests()):
        assert error is None, error
        np.testing.assert_array_equal(result.as_numpy("SUM"), A + B)
        ids.append(result.get_response().id)
    assert sorted(ids) == ["0", "1", "2"]
    await client.close()
    async with triton_http_aio.InferenceServerClient(http_address) as http:
        answer = await http.infer("sum", sums(triton_http_aio))
        np.testing.assert_array_equal(answer.as_numpy("SUM"), A + B)


if __name__ == "__main__":
    _, mode, grpc_address_, http_address_ = sys.argv
    if mode == "grpc":
        check_grpc(grpc_address_)
    elif mode == "http":
        check_http(http_address_)
    else:
        asyncio.run(check_aio(grpc_address_, http_address_))
    print("fine")
