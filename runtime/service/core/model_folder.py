"""Find the models of a folder, with their kinds, versions and settings.

A model is a subfolder or an ``.onnx`` file. A subfolder may hold numbered subfolders, one per version. It may
hold a ``config.toml``, which overrides the command line's options::

    kind = "tensor"      # llm, tensor or encoder; default: detected from the files
    version = 2          # serve this version only
    versions = "all"     # or a list of numbers; default: the largest
    load = false         # load on request only

    [weights]            # shares of requests that name no version; default: all to the largest
    1 = 90
    2 = 10

    [model]
    provider = "openvino"

    [engine]
    max_slots = 8

    [batching]           # of tensor models; see ``Batching``
    max_size = 32

    [encoder]            # arguments of ``TextEncoder``
    pooling = "mean"
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....errors import ModelNotFoundError, UsageError
from ....exporter.package import Package
from ....options import check_names, checked, declared
from ....providers.base import DeviceMemory, RunnerConfig
from ....records import dataclass
from ...api.load_encoder import OPTIONS, encoder_folder, is_encoder_folder, load_encoder
from ...engine.config import EngineConfig
from ...models.config import ModelConfig
from ...models.split import device_memory
from .model_entry import ModelKind, ModelLoader
from .served_model import load_served_model
from .tensor_model import Batching, TensorModel

CONFIG_FILE = "config.toml"
_KINDS: tuple[ModelKind, ...] = ("llm", "tensor", "encoder")


@dataclass(frozen=True, slots=True)
class _Settings:
    """The content of a ``config.toml``."""

    kind: ModelKind | None = None
    version: int | None = None
    versions: str | list[int] = "latest"
    load: bool = True
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    batching: dict[str, Any] | None = None
    encoder: dict[str, Any] = dataclasses.field(default_factory=dict)


_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "version": (int,),
    "versions": (str, list),
    "load": (bool,),
    "weights": (dict,),
    "model": (dict,),
    "engine": (dict,),
    "batching": (dict,),
    "encoder": (dict,),
}


@dataclass(frozen=True, slots=True)
class _Common:
    """The options of all models of a folder."""

    model: ModelConfig
    engine: EngineConfig
    warm_up: bool


def models_in(
    folder: Path, model: ModelConfig, engine: EngineConfig, *, warm_up: bool = False
) -> dict[str, list[ModelLoader]]:
    """Return the loaders of a folder's models, by name in alphabetical order, one per version.

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
    common = _Common(model, engine, warm_up)
    loaders: dict[str, list[ModelLoader]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            loaders[path.name] = _loaders(path, common)
        elif path.suffix == ".onnx":
            load = _tensor_load(path, model, None, engine.max_queue, warm_up=warm_up)
            stamp = _stamp([path], _Settings())
            memory = _memory_of(model)
            loaders[path.stem] = [ModelLoader(load, kind="tensor", stamp=stamp, device_memory=memory)]
    if not loaders:
        raise UsageError(f"{folder} has no models: it has neither folders nor .onnx files")
    return loaders


def encoder_loader(model: ModelConfig, *, warm_up: bool) -> ModelLoader | None:
    """Return the loader of MODEL if it is the folder of an encoder; None for other models.

    Raises:
        CheckpointError: see ``is_encoder_folder``.
        UsageError: a ``config.toml`` in the folder is invalid, or ``model`` has a ``rope_scaling``.
    """
    if (folder := encoder_folder(model.model)) is None:
        return None
    if model.rope_scaling is not None:
        raise UsageError(
            f"{model.model} is a text encoder, whose rotary embedding is fixed; omit rope_scaling"
        )
    options = _settings(folder / CONFIG_FILE).encoder
    return ModelLoader(
        _encoder_load(folder, model, options, folder, warm_up=warm_up),
        kind="encoder",
        device_memory=_memory_of(model),
    )


def _memory_of(model: ModelConfig) -> Callable[[], list[DeviceMemory]]:
    """Return a function that returns the memory of the devices of a session, which has no further options."""
    return lambda: device_memory(model.provider, RunnerConfig())


def _loaders(folder: Path, common: _Common) -> list[ModelLoader]:
    """Return the loaders of a model's versions, the largest last."""
    config = folder / CONFIG_FILE
    settings = _settings(config)
    versions = _versions(folder, settings)
    weights = _weights(settings, versions, config)
    loaders = []
    for number, path in versions.items():
        kind = settings.kind or _kind(path)
        name = folder.name if len(versions) == 1 else f"{folder.name}:{number}"
        loaders.append(
            ModelLoader(
                _load(kind, path, name, folder, settings, common),
                kind=kind,
                version=str(number),
                wanted=settings.load,
                weight=weights[number],
                stamp=_stamp(sorted(path.rglob("*")), settings),
                device_memory=_memory_of(_changed(common.model, settings.model, folder)),
            )
        )
    return loaders


def _load(
    kind: ModelKind, path: Path, name: str, folder: Path, settings: _Settings, common: _Common
) -> Callable[[], Any]:
    """Return the function that loads one version.

    Raises:
        ModelNotFoundError: a tensor model has no ``.onnx`` file, or several.
        UsageError: an option is invalid.
    """
    model = _changed(common.model, settings.model, folder)
    if kind == "llm":
        own = dataclasses.replace(model, model=path)
        engine = _changed(common.engine, settings.engine, folder)
        return lambda: load_served_model(own, name=name, engine_config=engine, warm_up=common.warm_up)
    if kind == "encoder":
        return _encoder_load(path, model, settings.encoder, folder, warm_up=common.warm_up)
    if (file := _only_onnx(path)) is None:
        raise ModelNotFoundError(f"{path} has no .onnx file, or several; a tensor model needs exactly one")
    given = settings.batching
    batching = None if given is None else checked(Batching, given, f"[batching] of {folder / CONFIG_FILE}")
    most = _changed(common.engine, settings.engine, folder).max_queue
    return _tensor_load(file, model, batching, most, warm_up=common.warm_up)


def _tensor_load(
    path: Path, model: ModelConfig, batching: Batching | None, max_queue: int | None, *, warm_up: bool
) -> Callable[[], TensorModel]:
    def load() -> TensorModel:
        from ...api.session import InferenceSession  # imports onnxruntime

        session = InferenceSession(path, providers=[model.provider], allow_fallback=model.allow_fallback)
        loaded = TensorModel(session, batching, max_queue)
        if warm_up:
            loaded.warm_up()
        return loaded

    return load


def _encoder_load(
    path: Path, model: ModelConfig, options: dict[str, Any], folder: Path, *, warm_up: bool
) -> Callable[[], Any]:
    check_names(options, OPTIONS, f"[encoder] of {folder / CONFIG_FILE}")
    return lambda: load_encoder(path, model.provider, options, warm_up=warm_up)


def _stamp(paths: list[Path], settings: _Settings) -> str:
    """Return a text that changes when one of the files, or a setting of the loading, changes."""
    loading = settings.kind, settings.model, settings.engine, settings.batching, settings.encoder
    digest = hashlib.sha256(repr(loading).encode())
    for path in paths:
        if path.is_file() and path.name != CONFIG_FILE:
            stat = path.stat()
            digest.update(f"{path}\0{stat.st_mtime_ns}\0{stat.st_size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _settings(path: Path) -> _Settings:
    if not path.is_file():
        return _Settings()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from error
    check_names(content, _TYPES, str(path))
    for name, value in content.items():
        if type(value) not in _TYPES[name]:
            types = " or ".join(each.__name__ for each in _TYPES[name])
            raise UsageError(f"{name} in {path} must be of type {types}, not {value!r}")
    if content.get("kind", "llm") not in _KINDS:
        raise UsageError(f"kind in {path} must be llm, tensor or encoder, not {content['kind']!r}")
    return _Settings(**content)


def _versions(folder: Path, settings: _Settings) -> dict[int, Path]:
    """Return the folders of the versions that are served, by number; 1 if there are no versions."""
    there = {int(path.name): path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()}
    wanted: Any = [settings.version] if settings.version is not None else settings.versions
    if isinstance(wanted, list):
        for number in wanted:
            if type(number) is not int or number not in there:
                numbers = ", ".join(map(str, sorted(there))) or "none"
                raise UsageError(f"{folder} has no version {number}; there are: {numbers}")
        if not wanted:
            raise UsageError(f"versions in {folder / CONFIG_FILE} is empty; name at least 1 version")
        return {number: there[number] for number in sorted(wanted)}
    if wanted not in ("latest", "all"):
        raise UsageError(
            f"versions in {folder / CONFIG_FILE} must be 'latest', 'all' or a list of numbers, not {wanted!r}"
        )
    if not there:
        return {1: folder}
    return {number: there[number] for number in (sorted(there) if wanted == "all" else [max(there)])}


def _weights(settings: _Settings, versions: dict[int, Path], config: Path) -> dict[int, float]:
    """Return the weight of each version; without ``[weights]``, only the largest version has one."""
    if not settings.weights:
        return {number: float(number == max(versions)) for number in versions}
    for name, weight in settings.weights.items():
        if not name.isdecimal() or int(name) not in versions:
            raise UsageError(f"[weights] in {config} names version {name}, which is not served")
        if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
            raise UsageError(f"the weight of version {name} in {config} must be at least 0, not {weight!r}")
    if not any(settings.weights.values()):
        raise UsageError(f"all weights in {config} are 0")
    return {number: float(settings.weights.get(str(number), 0)) for number in versions}


def _kind(path: Path) -> ModelKind:
    if is_encoder_folder(path) and not _is_llm(path):
        return "encoder"
    if Package.is_package(path) or _is_llm(path):
        return "llm"
    return "llm" if _only_onnx(path) is None else "tensor"


def _only_onnx(folder: Path) -> Path | None:
    files = list(folder.glob("*.onnx"))
    return files[0] if len(files) == 1 else None


def _is_llm(folder: Path) -> bool:
    """Return whether a folder's configuration is that of a model that generates text."""
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
