"""What a handler does beside generating: tokens, vectors, scores."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from grpc_serving import repository
from null_llm import null_llm
from tiny_models import EOS, write_tiny

from carryall import AsyncLLM
from carryall.errors import PromptTooLongError, RequestError, UnsupportedTaskError
from carryall.runtime.service.access.admission import Admission
from carryall.runtime.service.access.policy import Policy
from carryall.runtime.service.core.chat import Conversation, read_message
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.messages import GenerationRequest
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import load_served_model
from carryall.runtime.types.sampling_params import SamplingParams


def test_tokens_of_texts_and_conversations_and_back() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            models = repository(llm)
            await models.load_all()
            handler = models.llm()
            tokens = await handler.tokenize("def f(x):")
            assert tokens == llm.encode("def f(x):")
            assert await handler.detokenize(tokens) == "def f(x):"
            chat = Conversation([read_message({"role": "user", "content": "Hi"})])
            assert await handler.tokenize(chat) == llm.encode("[user]Hi", add_special_tokens=False)
            assert await handler.tokenize("") == []
            assert await handler.detokenize([]) == ""
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await handler.detokenize([10**6])

    asyncio.run(scenario())


def test_scores_and_ranks_are_the_engines() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            models = repository(llm)
            await models.load_all()
            handler = models.llm()
            assert await handler.score("def ", ["f", "g"]) == await llm.score("def ", ["f", "g"])
            documents = ["a b", "c d"]
            assert await handler.rerank("q", documents) == await llm.rerank("q", documents)
            assert handler.stats().finished >= 4

    asyncio.run(scenario())


def test_a_model_without_hidden_states_gives_no_vectors() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            models = repository(llm)
            await models.load_all()
            with pytest.raises(UnsupportedTaskError):
                await models.llm().embed(["text"])

    asyncio.run(scenario())


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_the_engines(normalize: bool) -> None:
    async def scenario() -> None:
        models = ModelRepository.of_one("draft", lambda: load_served_model("draft", max_slots=2))
        await models.load_all()
        texts: list[str | list[int]] = ["def f", [1, 2, 3]]
        found = await models.llm().embed(texts, normalize=normalize)
        models.close()
        llm = AsyncLLM("draft", max_slots=2)
        expected = await llm.embed(texts, normalize=normalize)
        np.testing.assert_array_equal(found.vectors, expected)
        assert found.prompt_tokens == 3 + len(llm.encode("def f"))
        llm.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize(("interval", "most"), [(1, 21), (5, 6), (100, 2)])
def test_a_stream_may_have_fewer_and_larger_pieces(interval: int, most: int) -> None:
    params = SamplingParams(max_tokens=21, ignore_eos=True, temperature=0)

    async def scenario() -> None:
        async with null_llm(step_seconds=0.003) as llm:
            models = repository(llm)
            await models.load_all()
            admission = Admission(models, Policy(ServerConfig(stream_interval=interval)))
            asked = admission.admitted(GenerationRequest(prompt="x", params=params))
            opening, *deltas = [delta async for delta in models.llm().generate(asked)]
            assert (opening.opens, opening.prompt_tokens) == (True, deltas[0].prompt_tokens)
            whole = await models.llm().complete(GenerationRequest(prompt="x", params=params))
            assert "".join(delta.text for delta in deltas) == whole.choices[0].text
            assert sum(len(delta.token_ids) for delta in deltas) == 21
            assert len(deltas) <= most
            assert len(deltas[0].token_ids) < 21
            assert deltas[-1].usage == whole.usage

    asyncio.run(scenario())


@pytest.mark.parametrize("behind", [[], [EOS]])
def test_a_text_that_is_cut_keeps_the_special_tokens_behind_it(tmp_path: Path, behind: list[int]) -> None:
    folder = write_tiny("qwen3", tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = raw.id_to_token(EOS)
    template = f"$A {special}" if behind else "$A"
    raw.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=[(special, EOS)])
    raw.save(str(folder / "tokenizer.json"))

    async def scenario() -> None:
        models = ModelRepository.of_one(
            "tiny", lambda: load_served_model(folder, max_slots=2, context_length=16, provider="cpu")
        )
        await models.load_all()
        handler = models.llm()
        long = "abcdefghij" * 4
        whole = await handler.tokenize(long)
        assert whole[len(whole) - len(behind) :] == behind
        for text, kept in (
            (long, [*whole[: 15 - len(behind)], *behind]),
            (long[:3], await handler.tokenize(long[:3])),
            (whole, whole[:15]),
        ):
            found = await handler.embed([text], truncate=True)
            assert found.prompt_tokens == len(kept)
            np.testing.assert_array_equal(found.vectors, (await handler.embed([kept])).vectors)
            if len(kept) == 15:
                with pytest.raises(PromptTooLongError):
                    await handler.embed([text])
        models.close()

    asyncio.run(scenario())
