"""The OpenAPI document against the application."""

from __future__ import annotations

import asyncio
from typing import Any

from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.service.http.openapi import document


def test_every_path_is_a_route_and_its_fields_are_known() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, strict=True) as served:
            found = (await served.client.get("/openapi.json")).json()
            assert found == document(["toy"], ["toy"])
            for path, methods in found["paths"].items():
                for method, operation in methods.items():
                    body = operation.get("requestBody")
                    if body is None:
                        assert (await served.client.request(method, path)).status_code == 200, path
                        continue
                    schema = body["content"]["application/json"]["schema"]
                    fields = dict.fromkeys(schema["properties"])
                    answer = await served.client.request(method, path, json=fields)
                    assert answer.status_code in (200, 400), path
                    assert "unknown fields" not in answer.text, (path, answer.text)

    asyncio.run(scenario())


def test_sampling_options_have_their_ranges() -> None:
    paths: Any = document(["a"], ["b"])["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    top_p = body["properties"]["top_p"]
    assert (top_p["type"], top_p["exclusiveMinimum"], top_p["maximum"]) == ("number", 0, 1)
    assert body["properties"]["stop"]["type"] == "array"
    assert body["properties"]["model"] == {"enum": ["a"]}
