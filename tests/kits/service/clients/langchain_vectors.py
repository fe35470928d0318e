"""python langchain_vectors.py URLS: LangChain's embeddings for OpenAI and for text-embeddings-inference."""

from __future__ import annotations

import asyncio

import numpy as np
from checks import check, main
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr
from vector_checks import KEY, TEXTS, URLS

OPENAI = OpenAIEmbeddings(
    model="dense",
    base_url=f"{URLS['all']}/v1",
    api_key=SecretStr(KEY),
    check_embedding_ctx_length=False,
)
TEI = HuggingFaceEndpointEmbeddings(model=URLS["dense"])


@check
def documents_and_queries() -> None:
    vectors = OPENAI.embed_documents(TEXTS)
    np.testing.assert_allclose(OPENAI.embed_query(TEXTS[0]), vectors[0], atol=1e-5)
    np.testing.assert_allclose(TEI.embed_documents(TEXTS), vectors, atol=1e-5)
    np.testing.assert_allclose(TEI.embed_query(TEXTS[0]), vectors[0], atol=1e-5)


@check
def asynchronous() -> None:
    vectors = asyncio.run(OPENAI.aembed_documents(TEXTS))
    np.testing.assert_allclose(vectors, OPENAI.embed_documents(TEXTS), atol=1e-5)


@check
def a_store_finds_texts() -> None:
    for embeddings in (OPENAI, TEI):
        store = InMemoryVectorStore(embeddings)
        store.add_texts(TEXTS)
        for text in TEXTS:
            (document,) = store.similarity_search(text, k=1)
            assert document.page_content == text


@check
def dimensions() -> None:
    model = OpenAIEmbeddings(
        model="dense",
        base_url=f"{URLS['all']}/v1",
        api_key=SecretStr(KEY),
        dimensions=4,
        check_embedding_ctx_length=False,
    )
    assert len(model.embed_query("x")) == 4


main()
