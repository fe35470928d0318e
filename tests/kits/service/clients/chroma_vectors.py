"""python chroma_vectors.py URLS: Chroma's embedding functions and an in-memory collection."""

from __future__ import annotations

import os
from typing import Any

import chromadb
from checks import check, main
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer, OpenAIEmbeddingFunction
from vector_checks import KEY, TEXTS, URLS

os.environ["CHROMA_OPENAI_API_KEY"] = KEY


def finds(function: Any, name: str) -> None:
    """Check that a collection of the texts finds each of them."""
    collection = chromadb.EphemeralClient().create_collection(name, embedding_function=function)
    collection.add(ids=["0", "1", "2"], documents=TEXTS)
    for number, text in enumerate(TEXTS):
        assert collection.query(query_texts=[text], n_results=1)["ids"] == [[str(number)]]


@check
def openai_embedding_function() -> None:
    function = OpenAIEmbeddingFunction(api_base=f"{URLS['all']}/v1", model_name="dense", api_key=KEY)
    assert len(function(TEXTS)) == 3
    finds(function, "openai")


@check
def openai_embedding_function_with_dimensions() -> None:
    function = OpenAIEmbeddingFunction(
        api_base=f"{URLS['all']}/v1", model_name="dense", api_key=KEY, dimensions=4
    )
    assert len(function(TEXTS)[0]) == 4


@check
def huggingface_embedding_server() -> None:
    function = HuggingFaceEmbeddingServer(url=f"{URLS['dense']}/embed")
    assert len(function(TEXTS)) == 3
    finds(function, "tei")


main()
