"""python llama_index_vectors.py URLS: LlamaIndex's embeddings and reranker."""

from __future__ import annotations

import numpy as np
from checks import check, main
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as Rerank
from vector_checks import KEY, TEXTS, URLS

OPENAI = OpenAILikeEmbedding(model_name="dense", api_base=f"{URLS['all']}/v1", api_key=KEY)
TEI = TextEmbeddingsInference(model_name="dense", base_url=URLS["dense"])


@check
def texts_and_queries() -> None:
    vectors = OPENAI.get_text_embedding_batch(TEXTS)
    np.testing.assert_allclose(OPENAI.get_query_embedding(TEXTS[0]), vectors[0], atol=1e-5)


@check
def text_embeddings_inference() -> None:
    assert len(TEI.get_text_embedding_batch(TEXTS)) == 3
    assert len(TEI.get_query_embedding("x")) == len(TEI.get_text_embedding("x"))


@check
def an_index_finds_texts() -> None:
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=OPENAI)
    for text in TEXTS:
        (found,) = index.as_retriever(similarity_top_k=1).retrieve(text)
        assert found.text == text


@check
def rerank() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    ranker = Rerank(base_url=URLS["dense"], top_n=2, model_name="dense")
    found = ranker.postprocess_nodes(nodes, query_str=TEXTS[1])
    assert len(found) == 2


main()
