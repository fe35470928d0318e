"""Recognise and load a text encoder that is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ModelNotFoundError, UsageError
from ...exporter.config import CONFIG_FILE, read_config
from ...exporter.ctranslate2 import is_ctranslate2
from ...exporter.encoders.modules import MODULES_FILE, side_files
from ...exporter.encoders.names import classifies_tokens, is_classifier, is_encoder
from ...exporter.package import Package, fingerprint
from ...storage.cache import cache_key, cached_folder
from ...storage.hashes import content_key
from ...storage.paths import check_name
from ..text.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from .text_classifier import TextClassifier
    from .text_encoder import TextEncoder
    from .token_classifier import TokenClassifier

OPTIONS = ("pooling", "normalize", "max_tokens", "truncate")
MODEL_FILES = ("model.onnx", "onnx/model.onnx", "model_optimized.onnx")
_SHARED = {"max_tokens", "truncate"}
_WARM_UP_TEXT = "warm-up"


def model_file(folder: Path) -> Path | None:
    """Return the ONNX file of an encoder's folder: of ``MODEL_FILES`` the first, else the only one.

    Folders of Optimum and fastembed have it beside the tokenizer, those of transformers.js in ``onnx``.

    Raises:
        ModelNotFoundError: there are several others.
    """
    for name in MODEL_FILES:
        if (folder / name).is_file():
            return folder / name
    others = sorted([*folder.glob("*.onnx"), *(folder / "onnx").glob("*.onnx")])
    if len(others) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in others)
        raise ModelNotFoundError(f"{folder} has several ONNX files: {names}; name one, such as {others[0]}")
    return others[0] if others else None


def folder_of_file(path: Path) -> Path:
    """Return the folder of an encoder's ONNX file that has the tokenizer: its own, or the one above."""
    own = (path.parent / TOKENIZER_FILE).is_file()
    return path.parent if own or path.parent.name != "onnx" else path.parent.parent


def prepared_encoder(source: Path) -> Path:
    """Return the folder of an encoder's ONNX file: ``source``, or the cached package of a checkpoint.

    Raises:
        CarryallError: the checkpoint cannot be exported; see ``carryall.export``.
        ModelNotFoundError: see ``model_file``.
    """
    if source.is_file():
        return folder_of_file(source)
    if (
        model_file(source) is not None
        or not (source / CONFIG_FILE).is_file()
        or not is_encoder(read_config(source))
    ):
        return source
    content = {"weights": fingerprint(source), "modules": content_key(source, side_files(source))}

    def build(folder: Path) -> None:
        from ...exporter.image_processor import has_processor
        from ..models.encoder_package import export_encoder_package  # imports the library of graphs

        blind = not has_processor(source)
        export_encoder_package(source, folder / source.name, {}, None, text_only=blind)

    return cached_folder("packages", cache_key(encoder=content), build, {"model": str(source)}) / source.name


def is_encoder_folder(folder: Path) -> bool:
    """Return whether a folder is a package, a checkpoint or an ONNX export of an encoder.

    It may have the files of sentence-transformers.

    Raises:
        CheckpointError: the configuration of a package is damaged.
    """
    if Package.is_package(folder):
        return (folder / CONFIG_FILE).is_file() and is_encoder(read_config(folder))
    if not (folder / TOKENIZER_FILE).is_file() or is_ctranslate2(folder):
        return False
    exports = [*folder.glob("*.onnx"), *(folder / "onnx").glob("*.onnx")]
    if (folder / MODULES_FILE).is_file() and exports:
        return True
    return (folder / CONFIG_FILE).is_file() and is_encoder(read_config(folder))


def encoder_folder(model: str | Path | None) -> Path | None:
    """Return the folder that ``model`` names if it is that of an encoder; None for other models.

    Raises:
        CheckpointError: the configuration of a package is damaged.
        UsageError: the name is not a valid file name.
    """
    if model is None:
        return None
    folder = Path(model).expanduser()
    check_name(folder)
    return folder if folder.is_dir() and is_encoder_folder(folder) else None


def load_encoder(
    folder: Path, provider: str, options: Mapping[str, Any], *, warm_up: bool
) -> TextEncoder | TextClassifier | TokenClassifier:
    """Load an encoder; a classifier of texts or tokens if its configuration names one.

    Args:
        folder: see ``TextEncoder``; or an ONNX file in such a folder. The files of a package are checked
            first.
        provider: as for ``InferenceSession``.
        options: arguments of ``TextEncoder``; a classifier has only ``max_tokens`` and ``truncate``.
        warm_up: run it once.

    Raises:
        CarryallError: see ``TextEncoder`` and ``TextClassifier``.
        UsageError: an option is given that a classifier does not have.
    """
    from .text_classifier import TextClassifier  # imports onnxruntime
    from .text_encoder import TextEncoder
    from .token_classifier import TokenClassifier

    if Package.is_package(folder):
        Package.open(folder)
    home = folder_of_file(folder) if folder.is_file() else folder
    config = read_config(home) if (home / CONFIG_FILE).is_file() else {}
    if not is_classifier(config) and not classifies_tokens(config):
        encoder = TextEncoder(folder, providers=[provider], **options)
        if warm_up:
            _run_once(encoder)
        return encoder
    if other := sorted(options.keys() - _SHARED):
        raise UsageError(f"{folder} classifies texts; it has no option {other[0]}")
    if classifies_tokens(config):
        finder = TokenClassifier(folder, providers=[provider], **options)
        if warm_up:
            finder.scores([_WARM_UP_TEXT])
        return finder
    classifier = TextClassifier(folder, providers=[provider], **options)
    if warm_up:
        classifier.logits([_WARM_UP_TEXT])
    return classifier


def _run_once(encoder: TextEncoder) -> None:
    """Compute one kind of vectors; all kinds are outputs of one graph."""
    if "dense" in encoder.kinds:
        encoder.embed([_WARM_UP_TEXT])
    elif "sparse" in encoder.kinds:
        encoder.embed_sparse([_WARM_UP_TEXT])
    else:
        encoder.embed_tokens([_WARM_UP_TEXT])
