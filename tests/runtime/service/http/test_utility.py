"""Tokens, scores and ranks over HTTP are those of the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm


def test_tokens_of_prompts_and_messages_and_back() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = (await served.post("/tokenize", prompt="def f(x):", return_token_strs=True)).json()
            assert answer["tokens"] == llm.encode("def f(x):")
            assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
            assert "".join(answer["token_strs"]) == "def f(x):"
            assert (await served.post("/detokenize", tokens=answer["tokens"])).json() == {
                "prompt": "def f(x):"
            }
            chat = await served.post("/tokenize", messages=[{"role": "user", "content": "Hi"}])
            assert chat.json()["tokens"] == llm.encode("[user]Hi", add_special_tokens=False)

    asyncio.run(scenario())


def test_scores_and_ranks_are_the_engines() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post("/score", text="def ", continuations=["f", "g(x)"])
            expected = await llm.score("def ", ["f", "g(x)"])
            assert [one["score"] for one in answer.json()["data"]] == [one.logprob for one in expected]
            documents = ["a b", "c d", "e f"]
            scores = await llm.rerank("q", documents)
            best = sorted(range(3), key=lambda index: -scores[index])
            ranked = (await served.post("/v1/rerank", query="q", documents=documents, top_n=2)).json()
            assert [one["index"] for one in ranked["results"]] == best[:2]
            assert ranked["results"][0] == {
                "index": best[0],
                "relevance_score": scores[best[0]],
                "document": {"text": documents[best[0]]},
            }
            pairs = await served.post("/score", text_1="q", text_2=documents)
            assert [one["score"] for one in pairs.json()["data"]] == scores

    asyncio.run(scenario())


def test_answers_to_a_conversation_are_scored_behind_its_template() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            messages = [{"role": "user", "content": "def "}]
            answer = (await served.post("/score", messages=messages, continuations=["f", "g(x)"])).json()
            begun = [*messages, {"role": "assistant", "content": "g("}]
            how = {"continue_final_message": True, "add_generation_prompt": False}
            more = (await served.post("/score", messages=begun, continuations=["x)"], **how)).json()
            tokens = (await served.post("/tokenize", messages=begun, **how)).json()["tokens"]
        text, prompt = "[user]def ", "[user]def [assistant]g("
        assert tokens == llm.encode(prompt, add_special_tokens=False)
        async with null_llm() as llm:  # the same model, whose cache is empty
            expected = await llm.score([text, text, prompt], ["f", "g(x)", "x)"])
        found = [entry["token_logprobs"] for entry in (*answer["data"], *more["data"])]
        assert found == [score.token_logprobs for score in expected]
        whole = sum(len(llm.encode(text + end)) for end in ("f", "g(x)"))
        assert answer["usage"]["prompt_tokens"] == whole

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "either 'prompt'"),
        ("/tokenize", {"prompt": "x", "messages": []}, "either 'prompt'"),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "add_generation_prompt",
        ),
        ("/score", {"continuations": ["x"], "text": "a", "messages": []}, "either 'text'"),
        (
            "/score",
            {
                "continuations": ["x"],
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"tools": 1},
            },
            "reserved",
        ),
        ("/detokenize", {"tokens": ["x"]}, "list of token ids"),
        ("/detokenize", {"tokens": [10**9]}, "outside the vocabulary"),
        ("/rerank", {"query": "q"}, "'documents' must be"),
        ("/rerank", {"query": "q", "documents": ["x"] * 2049}, "maximum is 2048"),
        ("/rerank", {"documents": ["x"]}, "'query' is required"),
        ("/rerank", {"query": "q", "documents": ["x"], "top_n": 0}, "'top_n' must be"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 queries for 3 documents"),
        ("/score", {"text": "", "continuations": ["x"]}, "at least one token"),
    ],
)
def test_unsupported_requests_are_refused(path: str, body: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(path, **body)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), (
                answer.text
            )

    asyncio.run(scenario())
