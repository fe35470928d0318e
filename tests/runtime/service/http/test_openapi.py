"""The OpenAPI document against the application."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from http_serving import http_serving
from null_llm import null_llm
from starlette.routing import Route

from carryall.runtime.batch.online.routes import BatchService
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.http.app import make_app
from carryall.runtime.service.http.openapi import operations
from carryall.runtime.service.kserve.inference import Inference

NO_BODY = {"/v1/responses/{id}/cancel", "/v1/batches/{id}/cancel"}


def test_every_route_is_in_the_document(tmp_path: Path) -> None:
    def batch(models: ModelRepository, config: ServerConfig) -> BatchService:
        return BatchService(tmp_path, config)

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, parts=[batch]) as served:
            found = (await served.client.get("/openapi.json")).json()
            config = ServerConfig()
            inference = Inference.of(served.models, config)
            app: Any = make_app(served.models, inference, BatchService(tmp_path, config).routes())
            while not hasattr(app, "routes"):
                app = app._app
            expected = Counter(
                (route.path.replace(":path", ""), method)
                for route in app.routes
                if isinstance(route, Route) and route.include_in_schema
                for method in route.methods or ()
                if method != "HEAD"
            )
            described = Counter((path, one.upper()) for path, item in found["paths"].items() for one in item)
            assert described == expected
            assert expected["/v1/responses/{id}", "DELETE"] == expected["/v1/batches", "GET"] == 1

    asyncio.run(scenario())


def test_every_operation_is_described() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            paths = (await served.client.get("/openapi.json")).json()["paths"]
            every = [(path, name, one) for path, item in paths.items() for name, one in item.items()]
            names = Counter(one["operationId"] for _, _, one in every)
            assert set(names.values()) == {1}
            assert [path for path, _, one in every if len(one["summary"]) < 10] == []
            bare = {path for path, name, one in every if name == "post" and "requestBody" not in one}
            assert bare <= NO_BODY
            for path, _, one in every:
                parameters = one.get("parameters", [])
                named = {each["name"] for each in parameters if each["in"] == "path"}
                assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            retrieve = paths["/v1/responses/{id}"]["get"]["parameters"]
            assert [one["name"] for one in retrieve if one["in"] == "query"] == ["stream", "starting_after"]

    asyncio.run(scenario())


def test_fields_are_known_and_documents_without_parameters_answer() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, strict=True) as served:
            found = (await served.client.get("/openapi.json")).json()
            for path, methods in found["paths"].items():
                if "{" in path:
                    continue
                for method, operation in methods.items():
                    body = operation.get("requestBody")
                    if body is None:
                        answer = await served.client.request(method, path)
                        assert answer.status_code == 200, path
                        media = answer.headers.get("content-type", "").partition(";")[0]
                        assert media in operation["responses"]["200"].get("content", [""]), path
                        continue
                    ((media, content),) = body["content"].items()
                    fields = dict.fromkeys(content["schema"]["properties"])
                    sent = (
                        {"json": fields}
                        if media == "application/json"
                        else {"data": dict.fromkeys(fields, "")}
                    )
                    answer = await served.client.request(method, path, **sent)
                    assert answer.status_code in (200, 400), path
                    assert "unknown fields" not in answer.text, (path, answer.text)

    asyncio.run(scenario())


def test_names_are_those_of_the_models() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            paths = (await served.client.get("/openapi.json")).json()["paths"]
            (parameter,) = paths["/v2/models/{model}"]["get"]["parameters"]
            assert parameter["schema"]["enum"] == ["toy"]
            body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body["properties"]["model"] == {"type": "string", "enum": ["toy"]}

    asyncio.run(scenario())


def test_a_summary_has_neither_method_nor_path() -> None:
    async def endpoint() -> None:
        """Handle ``GET /x[/{y}]``: return it.

        More.
        """

    (found,) = operations([Route("/x/{y:path}", endpoint)])
    assert (found.path, found.method, found.summary) == ("/x/{y}", "get", "Return it.")
