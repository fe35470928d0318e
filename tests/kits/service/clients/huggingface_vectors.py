"""python huggingface_vectors.py URLS: InferenceClient, as for text-embeddings-inference."""

from __future__ import annotations

import numpy as np
from checks import check, main
from huggingface_hub import InferenceClient
from vector_checks import TEXTS, URLS


@check
def feature_extraction() -> None:
    client = InferenceClient(URLS["dense"])
    one = client.feature_extraction(TEXTS[0])
    several = client.feature_extraction(TEXTS, normalize=False, truncate=True)
    assert (one.ndim, several.shape[0]) == (2, 3)
    np.testing.assert_allclose(one[0], several[0] / np.linalg.norm(several[0]), rtol=1e-5)
    prompted = client.feature_extraction(TEXTS[0], prompt_name="query", dimensions=4)
    assert prompted.shape == (1, 4)
    by_path = client.feature_extraction(TEXTS[0], model=f"{URLS['dense']}/embed")
    np.testing.assert_allclose(by_path, one, rtol=1e-5)


@check
def sentence_similarity() -> None:
    scores = InferenceClient(URLS["dense"]).sentence_similarity(TEXTS[1], other_sentences=TEXTS)
    assert scores[1] == max(scores)
    assert abs(scores[1] - 1) < 1e-5


@check
def text_classification() -> None:
    client = InferenceClient(URLS["inference"])
    labels = client.text_classification(TEXTS[0])
    assert {each.label for each in labels} == {"contradiction", "entailment", "neutral"}
    assert abs(sum(each.score for each in labels) - 1) < 1e-5
    (best,) = client.text_classification(TEXTS[0], top_k=1, function_to_apply="sigmoid")
    assert best.label == labels[0].label


@check
def zero_shot_classification() -> None:
    client = InferenceClient(URLS["inference"])
    found = client.zero_shot_classification(
        TEXTS[0], candidate_labels=["sport", "art"], hypothesis_template="is {}"
    )
    assert {each.label for each in found} == {"sport", "art"}
    assert abs(sum(each.score for each in found) - 1) < 1e-5


@check
def token_classification() -> None:
    client = InferenceClient(URLS["names"])
    found = client.token_classification(TEXTS[0], aggregation_strategy="simple")
    assert found
    assert all(TEXTS[0][part.start : part.end] == part.word for part in found)
    assert all(part.entity_group for part in found)


main()
