"""The schemas of request bodies."""

from __future__ import annotations

from carryall.runtime.service.http.schemas.bodies import bodies


def test_sampling_options_have_their_ranges() -> None:
    fields = bodies({"enum": ["a"]}, {"enum": ["b"]})["/v1/completions"]["properties"]
    top_p = fields["top_p"]
    assert (top_p["type"], top_p["exclusiveMinimum"], top_p["maximum"]) == ("number", 0, 1)
    assert fields["stop"]["type"] == "array"
    assert fields["model"] == {"enum": ["a"]}


def test_embeddings_name_an_embedder() -> None:
    assert bodies({"enum": ["a"]}, {"enum": ["b"]})["/v1/embeddings"]["properties"]["model"] == {
        "enum": ["b"]
    }
