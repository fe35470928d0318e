"""python open_webui_client.py URL: what the page of Open WebUI does, through its own service.

It runs beside the service, with no other connection, and makes the embeddings of documents by it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from checks import check, main

URL = sys.argv[1]
FOLDER = Path(tempfile.mkdtemp())
TURNS = [{"role": "user", "content": "Hi"}]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
CLIENT = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120)


def call(method: str, path: str, status: int = 200, **body: Any) -> Any:
    answer = CLIENT.request(method, path, json=body or None)
    assert answer.status_code == status, (answer.status_code, answer.text)
    return answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text


@check
def models_of_both_connections() -> None:
    """The model of a name that both connections have is Ollama's."""
    listed = {model["id"]: model["owned_by"] for model in call("GET", "/api/models")["data"]}
    assert listed == {"toy": "ollama", "vectors": "ollama"}
    assert [model["id"] for model in call("GET", "/openai/models")["data"]] == ["toy", "vectors"]
    assert call("POST", "/ollama/verify", url=URL, key="")["version"]
    assert len(call("POST", "/openai/verify", url=f"{URL}/v1", key="none")["data"]) == 2


@check
def facts_of_models() -> None:
    assert {model["name"] for model in call("GET", "/ollama/api/tags")["models"]} == {"toy", "vectors"}
    assert {model["name"] for model in call("GET", "/ollama/api/ps")["models"]} == {"toy", "vectors"}
    assert "completion" in call("POST", "/ollama/api/show", model="toy")["capabilities"]
    assert call("GET", "/ollama/api/version/0")["version"] == call("GET", "/ollama/api/version")["version"]


@check
def chat_of_the_page() -> None:
    body: Any = {"model": "toy", "messages": TURNS, "params": {"max_tokens": 8, "temperature": 0.0}}
    whole = call("POST", "/api/chat/completions", **body, stream=False)
    lines = call("POST", "/api/chat/completions", **body, stream=True).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices")]
    assert "".join(texts) == whole["choices"][0]["message"]["content"] != ""
    assert whole["usage"]["completion_tokens"] == 8
    assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines


@check
def tasks_of_the_page() -> None:
    for task in ("title", "tags", "follow_up"):
        turns = [*TURNS, {"role": "assistant", "content": "Hello"}]
        answer = call("POST", f"/api/v1/tasks/{task}/completions", model="toy", messages=turns)
        assert answer["choices"][0]["message"]["content"], task


@check
def each_api_behind_the_connections() -> None:
    few: Any = {"model": "toy", "messages": TURNS}
    short: Any = {"options": {"num_predict": 4}, "stream": False}
    assert call("POST", "/ollama/api/chat", **few, **short)["message"]["content"]
    assert call("POST", "/ollama/api/generate", model="toy", prompt="def f", **short)["response"]
    assert call("POST", "/ollama/v1/chat/completions", **few, max_tokens=4)["choices"]
    assert call("POST", "/ollama/v1/completions", model="toy", prompt="def f", max_tokens=4)["choices"]
    assert call("POST", "/ollama/v1/messages", **few, max_tokens=4)["content"]
    assert call("POST", "/ollama/v1/responses", model="toy", input="Hi", max_output_tokens=4)["output"]
    assert call("POST", "/openai/chat/completions", **few, max_tokens=4)["choices"]
    assert call("POST", "/openai/responses", model="toy", input="Hi", max_output_tokens=4)["output"]


@check
def embeddings() -> None:
    several = call("POST", "/ollama/api/embed", model="vectors", input=["a b", "c"])["embeddings"]
    assert len(several) == 2
    assert call("POST", "/ollama/api/embeddings", model="vectors", prompt="a b")["embedding"] == several[0]
    (one,) = call("POST", "/ollama/v1/embeddings", model="vectors", input="a b")["data"]
    assert one["embedding"] == several[0]
    assert len(call("POST", "/api/embeddings", model="vectors", input="a b")["data"]) == 1


@check
def a_document_is_found_by_its_vector() -> None:
    path = "/api/v1/retrieval"
    texts = {"birds": "a bird sings", "ships": "c ship sails"}
    for name, text in texts.items():
        call("POST", f"{path}/process/text", name=name, content=text, collection_name=name)
    found = call(
        "POST",
        f"{path}/query/collection",
        collection_names=list(texts),
        query=texts["ships"],
        k=1,
        hybrid=False,
    )
    assert found["documents"][0][0] == texts["ships"]


@check
def models_are_let_go_and_pulled() -> None:
    assert call("POST", "/ollama/api/pull/0", model="toy").splitlines()[-1] == '{"status": "success"}'
    assert "serve MODEL" in call("POST", "/ollama/api/pull/0", 404, model="nothing")["detail"]
    assert call("POST", "/ollama/api/unload", model="toy") == {"status": True}
    assert call("POST", "/ollama/api/generate", model="toy", prompt="x", stream=False)["done"]


@check
def what_a_service_cannot_do_is_told() -> None:
    for method, what, body in (
        ("POST", "create", {"model": "mario", "from": "toy"}),
        ("POST", "copy", {"source": "toy", "destination": "other"}),
        ("DELETE", "push", {"model": "toy"}),
        ("DELETE", "delete", {"model": "toy"}),
    ):
        assert "a service" in call(method, f"/ollama/api/{what}/0", 501, **body)["detail"], what


environment = {
    "OLLAMA_BASE_URL": URL, "OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_ENGINE": "ollama", "RAG_EMBEDDING_MODEL": "vectors", "RAG_OLLAMA_BASE_URL": URL,
    "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "none", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1",
    "DATA_DIR": str(FOLDER), "ANONYMIZED_TELEMETRY": "false", "DO_NOT_TRACK": "true",
}  # fmt: skip
program = Path(sys.executable).with_name("open-webui")
with (FOLDER / "log").open("wb") as log:
    service = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(PORT)],
        env={**os.environ, **environment}, stdout=log, stderr=log,
    )  # fmt: skip
try:
    until = time.monotonic() + 240
    while True:
        try:
            CLIENT.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            if service.poll() is not None or time.monotonic() > until:
                raise SystemExit((FOLDER / "log").read_text()[-3000:]) from None
            time.sleep(1)
    signed_in = call("POST", "/api/v1/auths/signin", email="", password="")
    CLIENT.headers["Authorization"] = f"Bearer {signed_in['token']}"
    main()
finally:
    service.terminate()
    service.wait()
