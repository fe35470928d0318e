"""Find the files that MODEL names. ``docs/models.md`` lists the forms."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from ...errors import CarryallWarning, ModelNotFoundError
from ...exporter.config import CONFIG_FILE, read_json
from ...exporter.config.genai import GENAI_FILE, graph_name
from ...exporter.ctranslate2 import WEIGHTS_FILE, is_ctranslate2, write_checkpoint
from ...exporter.demo import NAMES, demo_path
from ...exporter.gguf.file import GGUF_SUFFIX, is_projector, shard_paths
from ...exporter.hub import download, is_hub_id
from ...exporter.image_processor import PREPROCESSOR_FILE
from ...exporter.model_names import named_model, similar_names
from ...exporter.package import MODEL_FILE, TOKENIZER_FILE, Package
from ...providers.host.machine import describe_machine
from ...storage.cache import cache_key, cached_folder
from ...storage.hashes import content_key
from ...storage.paths import check_name

_EMBEDDED = {"demo": NAMES[0], **{name: name for name in NAMES}}
_ONNX_FOLDER = "onnx"  # of Transformers.js
_SIDE_FILES = (CONFIG_FILE, GENAI_FILE, TOKENIZER_FILE)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ADAPTER = "adapter_config.json"


def find_model(model: str | Path) -> Path:
    """Return the package, checkpoint folder, ONNX file or GGUF file of MODEL; a hub id is downloaded.

    Names of embedded models (``demo``) always mean these, even if the working folder has a folder of that
    name; write ``./demo`` for the folder. Other names are looked up as a file or folder, then as a short name
    of ``exporter/model_names.toml``, then as a hub id.

    Raises:
        ModelNotFoundError: there is no model of that name, or a folder holds several and none is the default.
        CheckpointError: a configuration file is damaged.
        UsageError: the name is not a valid file name.
        MissingExtraError: it is a hub id, and huggingface_hub is not installed.
    """
    name, path = str(model), Path(model).expanduser()
    check_name(path)
    if isinstance(model, str) and name in _EMBEDDED:
        if path.exists():
            text = f"'{name}' is the embedded model; write ./{name} for the folder"
            warnings.warn(text, CarryallWarning, stacklevel=2)
        return demo_path(_EMBEDDED[name])
    if path.is_file() and path.suffix.lower() in _PICKLES:
        raise _refused_pickle(path)
    if path.is_file() and path.suffix.lower() not in (".onnx", GGUF_SUFFIX):
        raise ModelNotFoundError(f"{path} is not a model: give a folder, an .onnx or a .gguf file")
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return path
    if path.exists():
        raise ModelNotFoundError(f"{path} is a pipe or a device; save the model to a file, and name that")
    if path.is_symlink():
        raise ModelNotFoundError(f"{path} is a link to {path.readlink()}, which leads to no file or folder")
    if isinstance(model, Path) or _looks_like_path(name):
        raise ModelNotFoundError(f"there is no file or folder {name}")
    known = named_model(name)
    if known is not None or is_hub_id(name):
        return find_model(download(known.hub if known else name, describe_machine().memory_total))
    meant = "".join(f"do you mean {other}? Else " for other in similar_names(name)[:1])
    raise ModelNotFoundError(
        f"no model '{name}'; {meant}give a package, a checkpoint folder, a .gguf or .onnx file, a hub id, a "
        "short name (carryall list --names) or 'demo'"
    )


def side_folder(path: Path) -> Path:
    """Return the folder of a model's configuration and tokenizer.

    Args:
        path: a result of ``find_model``. The files of an ONNX file lie beside it, or above its folder if that
            is called ``onnx``, as for Transformers.js.
    """
    if path.is_dir():
        return path
    beside, above = path.parent, path.absolute().parent.parent
    if path.absolute().parent.name == _ONNX_FOLDER and _side_files(above) > _side_files(beside):
        return above
    return beside


def _side_files(folder: Path) -> int:
    return sum((folder / name).is_file() for name in _SIDE_FILES)


def _in_folder(folder: Path) -> Path:
    """Return what a folder holds: itself for a package or checkpoint, else an ONNX or GGUF file."""
    if Package.is_package(folder) or _has_safetensors(folder):
        return folder
    if is_ctranslate2(folder):
        return _converted(folder)
    found = _graph(folder) or _gguf(folder)
    if found is not None:
        return found
    if (folder / _ADAPTER).is_file():
        raise ModelNotFoundError(
            f"{folder} is a LoRA adapter, not a model; give its base model as MODEL, and the adapter by "
            f"--lora NAME={folder}, or merge it: carryall export MODEL OUT --adapter {folder}"
        )
    pickle = next((file for suffix in _PICKLES for file in sorted(folder.glob(f"*{suffix}"))), None)
    if pickle is not None:
        raise _refused_pickle(pickle)
    if (folder / CONFIG_FILE).is_file():
        return folder  # the exporter reports which files are missing
    raise ModelNotFoundError(
        f"{folder} is neither a package nor a checkpoint: it has no {CONFIG_FILE}, .onnx or .gguf file"
    )


def _converted(folder: Path) -> Path:
    """Return a checkpoint of the same weights, which is written into the cache once."""
    names = [WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE, PREPROCESSOR_FILE]
    key = cache_key(ctranslate2=content_key(folder, [name for name in names if (folder / name).is_file()]))

    def build(target: Path) -> None:
        (target / folder.name).mkdir()
        write_checkpoint(folder, target / folder.name)

    return cached_folder("ctranslate2", key, build, {"model": str(folder)}) / folder.name


def _refused_pickle(file: Path) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{file.parent} holds its weights as a pickle ({file.name}), which can run any code when opened. "
        "If you trust it, convert it in a sandbox with transformers: AutoModelForCausalLM.from_pretrained"
        "(SRC).save_pretrained(DST)"
    )


def _has_safetensors(folder: Path) -> bool:
    names = ("model.safetensors", "model.safetensors.index.json")
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in names)


def _graph(folder: Path) -> Path | None:
    """Return the ONNX file of a folder: of onnxruntime-genai, Optimum, Transformers.js or mobius."""
    settings = folder / GENAI_FILE
    if settings.is_file():
        path = folder / graph_name(read_json(settings), settings)
        if not path.is_file():
            raise ModelNotFoundError(f"{settings} names the graph {path.name}, which does not exist")
        return path
    for place in (folder, folder / _ONNX_FOLDER):
        if (place / MODEL_FILE).is_file():
            return place / MODEL_FILE
        found = sorted(place.glob("*.onnx"))
        if found:
            return _only(folder, found)
    return None


def _gguf(folder: Path) -> Path | None:
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() == GGUF_SUFFIX)
    decoders = [file for file in found if not is_projector(file.name)] or found
    models = {shard_paths(file)[0]: None for file in decoders}
    return _only(folder, models) if models else None


def _only(folder: Path, files: Iterable[Path]) -> Path:
    paths = list(files)
    if len(paths) > 1:
        names = ", ".join(file.relative_to(folder).as_posix() for file in paths)
        raise ModelNotFoundError(f"{folder} holds several models; name one of its files: {names}")
    return paths[0]


def _looks_like_path(name: str) -> bool:
    """Whether a name can only be a path; ``org/name`` may be a path or a hub id."""
    return name.startswith((".", "~", "/")) or "\\" in name or ("/" in name and not is_hub_id(name))
