"""The OpenAPI document of some operations."""

from __future__ import annotations

from carryall.runtime.service.http.schemas.document import ModelNames, Operation, document

NAMES = ModelNames(["a"], ["b"], ["a", "b"])


def test_media_types_follow_the_endpoint() -> None:
    paths = document(
        [
            Operation(path, "post", "Run.")
            for path in ("/v1/completions", "/generate_stream", "/tokenize", "/api/pull")
        ]
        + [Operation("/health", "get", "Probe.")],
        NAMES,
    )["paths"]
    done = {path: item[method]["responses"]["200"].get("content", {}) for path, item in paths.items()
            for method in item}  # fmt: skip
    assert {path: set(media) for path, media in done.items()} == {
        "/v1/completions": {"application/json", "text/event-stream"},
        "/generate_stream": {"text/event-stream"},
        "/tokenize": {"application/json"},
        "/api/pull": {"application/json", "application/x-ndjson"},
        "/health": set(),
    }


def test_versions_of_a_model_take_the_same_body() -> None:
    path = "/v2/models/{model}/versions/{version}/infer"
    (operation,) = document([Operation(path, "post", "Infer.")], NAMES)["paths"][path].values()
    assert operation["requestBody"]["content"]["application/json"]["schema"]["required"] == ["inputs"]
    assert [one["name"] for one in operation["parameters"]] == ["model", "version"]
    assert operation["parameters"][0]["schema"]["enum"] == ["a", "b"]


def test_before_models_are_ready_every_name_is_possible() -> None:
    asked = [Operation("/v2/models/{model}", "get", "Describe."), Operation("/api/show", "post", "Show.")]
    paths = document(asked, ModelNames([], [], []))["paths"]
    assert paths["/v2/models/{model}"]["get"]["parameters"][0]["schema"] == {"type": "string"}
    body = paths["/api/show"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["model"] == {"type": "string"}
