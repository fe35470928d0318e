"""python haystack_vectors.py URLS: Haystack's embedders and rankers."""

from __future__ import annotations

import os

import numpy as np
from checks import check, main
from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from vector_checks import KEY, TEXTS, URLS

os.environ["HF_API_TOKEN"] = KEY
OPENAI = {"api_base_url": f"{URLS['all']}/v1", "model": "dense", "api_key": Secret.from_token(KEY)}


@check
def openai_embedders_in_a_pipeline() -> None:
    documents = OpenAIDocumentEmbedder(**OPENAI).run([Document(content=text) for text in TEXTS])["documents"]
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents(documents)
    pipeline = Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(**OPENAI))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    for text in TEXTS:
        (found,) = pipeline.run({"embedder": {"text": text}})["retriever"]["documents"]
        assert found.content == text


@check
def embedders_of_text_embeddings_inference() -> None:
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )

    options = {"api_type": "text_embeddings_inference", "api_params": {"url": URLS["dense"]}, "token": None}
    vector = HuggingFaceAPITextEmbedder(**options).run(TEXTS[0])["embedding"]
    (document,) = HuggingFaceAPIDocumentEmbedder(**options).run([Document(content=TEXTS[0])])["documents"]
    np.testing.assert_allclose(document.embedding, vector, atol=1e-5)


@check
def ranker_of_text_embeddings_inference() -> None:
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    ranker = HuggingFaceTEIRanker(url=URLS["dense"], top_k=2, token=None)
    found = ranker.run(query=TEXTS[1], documents=[Document(content=text) for text in TEXTS])["documents"]
    assert found[0].content == TEXTS[1]
    assert len(found) == 2


main()
