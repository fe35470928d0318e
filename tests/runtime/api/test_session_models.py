"""InferenceSession on models that are not decoders: an encoder and an image classifier from PyTorch."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carryall import DynamicBatcher, InferenceSession
from carryall.providers import get_provider

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the tracer
VOCAB, HIDDEN, HEADS = 60, 32, 4


def bert() -> Any:
    """BERT (https://arxiv.org/abs/1810.04805) with two small layers."""
    torch.manual_seed(0)
    layers = torch.nn

    class Layer(layers.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = layers.Linear(HIDDEN, 3 * HIDDEN), layers.Linear(HIDDEN, HIDDEN)
            self.up, self.down = layers.Linear(HIDDEN, 48), layers.Linear(48, HIDDEN)
            self.norms = layers.ModuleList([layers.LayerNorm(HIDDEN) for _ in range(2)])

        def forward(self, x: Any, mask: Any) -> Any:
            heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = heads[0], heads[1], heads[2]
            scores = query @ key.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5 + mask
            attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
            x = self.norms[0](x + self.out(attended))
            return self.norms[1](x + self.down(layers.functional.gelu(self.up(x))))

    class Bert(layers.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = layers.Embedding(VOCAB, HIDDEN), layers.Embedding(40, HIDDEN)
            self.layers = layers.ModuleList([Layer(), Layer()])
            self.pooler = layers.Linear(HIDDEN, HIDDEN)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            positions = torch.arange(input_ids.shape[1])
            x = self.words(input_ids) + self.places(positions)
            mask = (1.0 - attention_mask[:, None, None].to(x.dtype)) * -1e4
            for layer in self.layers:
                x = layer(x, mask)
            return x, torch.tanh(self.pooler(x[:, 0]))

    return Bert().eval()


def classifier() -> Any:
    torch.manual_seed(1)
    layers = torch.nn
    return layers.Sequential(
        layers.Conv2d(3, 8, 3, stride=2, padding=1),
        layers.BatchNorm2d(8),
        layers.ReLU(),
        layers.Conv2d(8, 16, 3, groups=8),
        layers.AdaptiveAvgPool2d(1),
        layers.Flatten(),
        layers.Linear(16, 10),
        layers.Softmax(-1),
    ).eval()


def sentences(count: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Token ids padded on the right."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCAB, (count, length))
    mask = (np.arange(length) < rng.integers(1, length + 1, (count, 1))).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


def images(count: int, seed: int = 0) -> dict[str, Any]:
    return {"image": np.random.default_rng(seed).standard_normal((count, 3, 16, 20), np.float32)}


def encoded(model: Any, feeds: dict[str, Any]) -> list[Any]:
    with torch.no_grad():
        found = model(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    return [output.numpy() for output in found]


def traced(model: Any, example: dict[str, Any], outputs: list[str], path: Path, axes: list[str]) -> Path:
    names = list(example)
    dynamic = {name: dict(enumerate(axes)) for name in names} | {name: {0: "batch"} for name in outputs}
    given = tuple(torch.from_numpy(array) for array in example.values())
    torch.onnx.export(
        model, given, path, input_names=names, output_names=outputs, dynamic_axes=dynamic, dynamo=False
    )
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bert.onnx"
    return traced(bert(), sentences(2, 7), ["hidden", "pooled"], path, ["batch", "length"])


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "classifier.onnx"
    return traced(classifier(), images(2), ["scores"], path, ["batch"])


def test_an_encoder_gives_what_pytorch_gives(encoder: Path) -> None:
    session = InferenceSession(encoder, providers=["cpu"])
    for count, length in ((1, 3), (4, 12)):
        feeds = sentences(count, length, length)
        for found, expected in zip(session.run(None, feeds), encoded(bert(), feeds), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_image_classifier_gives_what_pytorch_gives(vision: Path) -> None:
    feeds = images(3, 5)
    with torch.no_grad():
        expected = classifier()(torch.from_numpy(feeds["image"])).numpy()
    (scores,) = InferenceSession(vision, providers=["cpu"]).run(["scores"], feeds)
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_torch_tensors_go_in_and_out_without_copies(encoder: Path) -> None:
    session = InferenceSession(encoder, providers=["cpu"])
    feeds = {name: torch.from_numpy(array) for name, array in sentences(2, 5).items()}
    pooled = torch.empty(2, HIDDEN)
    results = session.run_tensors(feeds, {"pooled": pooled})
    expected = encoded(bert(), {name: tensor.numpy() for name, tensor in feeds.items()})
    np.testing.assert_allclose(pooled.numpy(), expected[1], atol=1e-5)
    hidden = torch.from_dlpack(results["hidden"])
    assert hidden.data_ptr() == results["hidden"].data_ptr()
    np.testing.assert_allclose(hidden.numpy(), expected[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "vision"])
def test_requests_of_threads_and_tasks_share_batches(kind: str, request: pytest.FixtureRequest) -> None:
    """Sentences of equal length share a batch; every caller gets the result of a separate run."""
    session = InferenceSession(request.getfixturevalue(kind), providers=["cpu"])
    lengths = (5, 5, 9, 5, 9, 5)
    asked = [images(1, i) if kind == "vision" else sentences(1, n, i) for i, n in enumerate(lengths)]
    alone = [session.run(None, feeds) for feeds in asked]
    with DynamicBatcher(session, max_batch_size=4, max_delay=0.05) as batcher:
        found: dict[int, Any] = {}

        def ask(index: int) -> None:
            found[index] = batcher.run(asked[index])

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        async def awaited() -> list[Any]:
            return list(await asyncio.gather(*(batcher.run_awaited(feeds) for feeds in asked)))

        for results in ([found[index] for index in range(len(asked))], asyncio.run(awaited())):
            for own, expected in zip(results, alone, strict=True):
                for one, other in zip(own.values(), expected, strict=True):
                    np.testing.assert_allclose(one, other, atol=1e-5)


def test_other_providers_sessions_run_them_too(encoder: Path, vision: Path) -> None:
    provider = get_provider("openvino")
    if provider.available() is not None:
        pytest.skip("openvino is not installed")
    for path, feeds in ((encoder, sentences(2, 6)), (vision, images(2))):
        expected = InferenceSession(path, providers=["cpu"]).run(None, feeds)
        for one, other in zip(provider.session(path).run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
