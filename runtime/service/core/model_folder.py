"""Find the models of a folder, with their kind, version and settings.

A model is a subfolder or an ``.onnx`` file. A subfolder may hold numbered subfolders, one per version; the
largest version is served. It may hold a ``config.toml``, which overrides the command line's options::

    kind = "tensor"      # or "llm"; default: detected from the files
    version = 2          # default: the largest
    load = false         # load on request only

    [model]
    provider = "openvino"

    [engine]
    max_slots = 8
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....errors import ModelNotFoundError, UsageError
from ....options import check_names, checked, declared
from ...engine.config import EngineConfig
from ...models.config import ModelConfig
from .repository import ModelKind, ModelLoader
from .served_model import load_served_model

CONFIG_FILE = "config.toml"
_KEYS = ("kind", "version", "load", "model", "engine")


@dataclass(frozen=True, slots=True)
class _Settings:
    """The content of a ``config.toml``."""

    kind: ModelKind | None = None
    version: int | None = None
    load: bool = True
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)


def models_in(
    folder: Path, model: ModelConfig, engine: EngineConfig, *, warm_up: bool = False
) -> dict[str, ModelLoader]:
    """Return the loaders of a folder's models, by name, in alphabetical order.

    Args:
        folder: the folder of models.
        model: options of every model, except ``model.model``.
        engine: options of every language model's engine.
        warm_up: run each model once before it accepts requests.

    Raises:
        UsageError: the folder does not exist or is empty, or a ``config.toml`` is invalid.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of models")
    found: dict[str, ModelLoader] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found[path.name] = _loader(path, model, engine, warm_up=warm_up)
        elif path.suffix == ".onnx":
            found[path.stem] = _tensor_loader(path, model, "1", load=True)
    if not found:
        raise UsageError(f"{folder} has no models: it has neither folders nor .onnx files")
    return found


def _loader(folder: Path, model: ModelConfig, engine: EngineConfig, *, warm_up: bool) -> ModelLoader:
    settings = _settings(folder / CONFIG_FILE)
    path, version = _version(folder, settings.version)
    file = _only_onnx(path)
    kind: Literal["llm", "tensor"] = settings.kind or ("llm" if _is_llm(path) or file is None else "tensor")
    of_model = _changed(model, settings.model, folder)
    if kind == "tensor":
        if file is None:
            raise ModelNotFoundError(
                f"{path} has no .onnx file, or several; a tensor model needs exactly one"
            )
        return _tensor_loader(file, of_model, version, load=settings.load)
    own = dataclasses.replace(of_model, model=path)
    of_engine = _changed(engine, settings.engine, folder)
    return ModelLoader(
        lambda: load_served_model(own, name=folder.name, engine_config=of_engine, warm_up=warm_up),
        version=version,
        wanted=settings.load,
    )


def _tensor_loader(path: Path, model: ModelConfig, version: str, *, load: bool) -> ModelLoader:
    def open_session() -> Any:
        from ...api.session import InferenceSession  # imports onnxruntime

        return InferenceSession(path, providers=[model.provider], allow_fallback=model.allow_fallback)

    return ModelLoader(open_session, kind="tensor", version=version, wanted=load)


def _settings(path: Path) -> _Settings:
    if not path.is_file():
        return _Settings()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from error
    check_names(content, _KEYS, str(path))
    expected: dict[str, type] = {"kind": str, "version": int, "load": bool, "model": dict, "engine": dict}
    for name, value in content.items():
        if type(value) is not expected[name]:
            raise UsageError(f"{name} in {path} must be of type {expected[name].__name__}, not {value!r}")
    if content.get("kind", "llm") not in ("llm", "tensor"):
        raise UsageError(f"kind in {path} must be 'llm' or 'tensor', not {content['kind']!r}")
    return _Settings(**content)


def _version(folder: Path, wanted: int | None) -> tuple[Path, str]:
    """Return the folder and number of the version that is served; 1 if there are no versions."""
    versions = {int(path.name): path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()}
    if wanted is not None and wanted not in versions:
        there_are = ", ".join(map(str, sorted(versions))) or "none"
        raise UsageError(f"{folder} has no version {wanted}; there are: {there_are}")
    if not versions:
        return folder, "1"
    number = max(versions) if wanted is None else wanted
    return versions[number], str(number)


def _only_onnx(folder: Path) -> Path | None:
    files = list(folder.glob("*.onnx"))
    return files[0] if len(files) == 1 else None


def _is_llm(folder: Path) -> bool:
    """Return whether a folder is a package, or a checkpoint of a model that generates text."""
    if (folder / "carryall.json").is_file():
        return True
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = config.get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(
        "ForCausalLM" in str(name) or "ForConditionalGeneration" in str(name) for name in architectures
    )


def _changed(config: Any, changes: dict[str, Any], folder: Path) -> Any:
    """Return the options with the changes of the model's ``config.toml``."""
    if not changes:
        return config
    owner = f"{folder / CONFIG_FILE}"
    check_names(changes, declared(type(config)), owner)
    if "model" in changes:
        raise UsageError(f"{owner} cannot set model: the folder is the model")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    required = {"model": config.model} if isinstance(config, ModelConfig) else {}
    checked(type(config), {**required, **given}, owner)
    return dataclasses.replace(config, **given)
