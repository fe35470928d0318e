"""python qdrant_vectors.py URLS: qdrant-client in its local mode, with vectors of the service."""

from __future__ import annotations

import httpx
from checks import check, main
from openai import OpenAI
from qdrant_client import QdrantClient, models
from vector_checks import KEY, TEXTS, URLS

OPENAI = OpenAI(base_url=f"{URLS['all']}/v1", api_key=KEY)


def dense(texts: list[str]) -> list[list[float]]:
    answer = OPENAI.embeddings.create(model="dense", input=texts)
    return [each.embedding for each in answer.data]


def sparse(text: str) -> models.SparseVector:
    (found,) = httpx.post(f"{URLS['all']}/embed_sparse", json={"inputs": text, "model": "splade"}).json()
    return models.SparseVector(
        indices=[each["index"] for each in found], values=[each["value"] for each in found]
    )


def multi(text: str) -> list[list[float]]:
    (found,) = httpx.post(f"{URLS['all']}/embed_all", json={"inputs": text, "model": "colbert"}).json()
    return list(found)


def nearest(client: QdrantClient, query: object, using: str) -> str:
    (point,) = client.query_points("texts", query=query, using=using, limit=1).points
    assert point.payload
    return str(point.payload["text"])


@check
def three_kinds_of_vectors_are_found() -> None:
    client, vectors, tokens = QdrantClient(":memory:"), dense(TEXTS), [multi(text) for text in TEXTS]
    largest = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    cosine, dot = models.Distance.COSINE, models.Distance.DOT
    client.create_collection(
        "texts",
        vectors_config={
            "dense": models.VectorParams(size=len(vectors[0]), distance=cosine),
            "multi": models.VectorParams(size=len(tokens[0][0]), distance=dot, multivector_config=largest),
        },
        sparse_vectors_config={"sparse": models.SparseVectorParams()},
    )
    points = [
        models.PointStruct(
            id=number,
            vector={"dense": vectors[number], "multi": tokens[number], "sparse": sparse(text)},
            payload={"text": text},
        )
        for number, text in enumerate(TEXTS)
    ]
    client.upsert("texts", points)
    for number, text in enumerate(TEXTS):
        assert nearest(client, vectors[number], "dense") == text
    assert nearest(client, tokens[1], "multi") in TEXTS
    assert nearest(client, sparse(TEXTS[0]), "sparse") in TEXTS


@check
def maxsim_is_that_of_the_service() -> None:
    client, tokens = QdrantClient(":memory:"), [multi(text) for text in TEXTS]
    largest = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    client.create_collection(
        "texts",
        vectors_config=models.VectorParams(
            size=len(tokens[0][0]), distance=models.Distance.DOT, multivector_config=largest
        ),
    )
    client.upsert("texts", [models.PointStruct(id=number, vector=rows) for number, rows in enumerate(tokens)])
    body = {"inputs": TEXTS[1], "model": "colbert", "prompt_name": "query"}
    (query,) = httpx.post(f"{URLS['all']}/embed_all", json=body).json()
    found = {point.id: point.score for point in client.query_points("texts", query=query).points}
    ask = {"query": TEXTS[1], "documents": TEXTS, "model": "colbert"}
    ranked = httpx.post(f"{URLS['all']}/rerank", json=ask).json()["results"]
    for each in ranked:
        assert abs(found[each["index"]] - each["relevance_score"]) < 1e-4


main()
