"""python cohere_client.py URLS: Cohere's clients rerank."""

from __future__ import annotations

import cohere
from checks import check, main
from vector_checks import KEY, TEXTS, URLS


@check
def rerank_by_a_cross_encoder() -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=URLS["all"])
    answer = client.rerank(model="ranker", query="q", documents=TEXTS, top_n=2)
    scores = [each.relevance_score for each in answer.results]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


@check
def rerank_by_vectors() -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=URLS["all"])
    answer = client.rerank(model="dense", query=TEXTS[1], documents=TEXTS)
    assert answer.results[0].index == 1
    for model in ("colbert", "splade"):
        answer = client.rerank(model=model, query=TEXTS[1], documents=TEXTS)
        assert sorted(each.index for each in answer.results) == [0, 1, 2]


@check
def rerank_in_version_1() -> None:
    client = cohere.Client(api_key=KEY, base_url=URLS["all"])
    answer = client.rerank(model="dense", query=TEXTS[1], documents=TEXTS, return_documents=True)
    assert answer.results[0].document
    assert answer.results[0].document.text == TEXTS[1]


@check
def errors_name_the_document() -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=URLS["all"])
    message = ""
    try:
        client.rerank(model="dense", query="q", documents=["x", "y" * 99])
    except cohere.BadRequestError as error:
        message = str(error)
    assert "document 1 has 100 tokens" in message


main()
