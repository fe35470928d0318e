"""Open ONNX Runtime sessions strictly: on the requested execution provider, or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import (
    CarryallError,
    GraphError,
    MissingExtraError,
    ModelNotFoundError,
    OutOfMemoryError,
    ProviderRuntimeError,
    ProviderUnavailableError,
)
from ...graph_opt.graph.exact_session import prepare_session
from ...storage.distributions import distribution_folder, distribution_version
from ...storage.paths import check_utf8
from ..captures import no_capture
from ..placement import (
    RECORD,
    Placement,
    heavy_nodes,
    placed_nodes,
    read_model,
    stray_nodes,
    summarise,
    weight_bytes_by_node,
)

CPU = "CPUExecutionProvider"

# Distributions that can install the folder onnxruntime/, and the extra of carryall that installs each.
_WHEELS = {
    "onnxruntime": "cpu",
    "onnxruntime-gpu": "cuda",
    "onnxruntime-directml": "directml",
    "onnxruntime-openvino": None,
    "onnxruntime-qnn": None,
    "onnxruntime-rocm": None,
    "onnxruntime-migraphx": None,
    "onnxruntime-training": None,
    "onnxruntime-silicon": None,
}
# The extra of carryall that installs an execution provider.
_EXTRAS = {
    CPU: "cpu",
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "tensorrt",
    "DmlExecutionProvider": "directml",
}
_STARTS = "::CreateProvider("  # in errors of a plugin that could not start
_SHORT_OF_MEMORY = ("Failed to allocate memory", "out of memory", "bad_alloc")
_FATAL_ONLY, _WARNINGS = 4, 2  # severities; onnxruntime starts with warnings


def installed_wheels() -> dict[str, str]:
    """Return the versions of all installed distributions that contain the package ``onnxruntime``."""
    folders = {wheel: distribution_folder(wheel) for wheel in _WHEELS}
    # onnxruntime-qnn 2 is a plugin beside onnxruntime; its versions 1 replaced it.
    return {
        wheel: distribution_version(folder)
        for wheel, folder in folders.items()
        if folder is not None and _holds_onnxruntime(folder)
    }


def _holds_onnxruntime(distribution: Path) -> bool:
    """Whether a distribution's record (PEP 376) lists the package; it does without a record."""
    try:
        record = (distribution / "RECORD").read_text(encoding="utf-8")
    except OSError:
        return True
    return any(line.startswith("onnxruntime/__init__.py,") for line in record.splitlines())


def wheel_conflict(wheels: Mapping[str, str]) -> str | None:
    """Return a message about conflicting wheels with the remedy, None if at most one is installed."""
    if len(wheels) < 2:
        return None
    extras = " or ".join(f"'carryall[{_WHEELS[name]}]'" for name in wheels if _WHEELS.get(name))
    return (
        f"several onnxruntime wheels overwrite each other's files: {_listed(wheels)}. "
        f"Keep one: pip uninstall -y {' '.join(wheels)} && pip install {extras or 'carryall[cpu]'}"
    )


def _listed(wheels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in wheels.items())


@functools.cache
def _conflict() -> str | None:
    return wheel_conflict(installed_wheels())


@functools.cache
def load_onnxruntime(what: str, extra: str = "cpu") -> ModuleType:
    """Import onnxruntime.

    Args:
        what: the feature that needs it, for the error message.
        extra: the extra of carryall that installs the right wheel.

    Raises:
        MissingExtraError: no onnxruntime wheel is installed.
        ProviderUnavailableError: several wheels are installed, or its libraries cannot be loaded.
    """
    conflict = _conflict()
    if conflict is not None:
        raise ProviderUnavailableError(conflict)
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise MissingExtraError(what, "onnxruntime", extra) from error
    except ImportError as error:
        raise ProviderUnavailableError(f"{what}: onnxruntime cannot be loaded: {error}") from error
    return onnxruntime  # type: ignore[no-any-return]


@functools.cache
def runtime_errors() -> tuple[type[BaseException], ...]:
    """Return all exception types that onnxruntime calls raise; its own types share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (RuntimeError, ValueError, MemoryError, *own)


def session_options(
    num_threads: int = 0,
    entries: Mapping[str, str] | None = None,
    *,
    fixed_shapes: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """Return ``onnxruntime.SessionOptions`` that log fatal errors only; other errors are raised.

    Args:
        num_threads: threads of one operator; 0 is onnxruntime's default.
        entries: ``session.*`` configuration entries.
        fixed_shapes: plan memory for each input shape; the plans grow with every new shape.
        sizes: values of named free dimensions of the graph's inputs.
    """
    options = load_onnxruntime("a session").SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = fixed_shapes
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    for name, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    return options


@contextlib.contextmanager
def quiet_logger() -> Iterator[None]:
    """Silence the process-wide logger of onnxruntime, which writes warnings about providers to stderr.

    Errors are raised, and the logger of a session is set by ``session_options``.
    """
    onnxruntime = load_onnxruntime("a session")
    onnxruntime.set_default_logger_severity(_FATAL_ONLY)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNINGS)


def check_available(execution_provider: str) -> None:
    """Raise ProviderUnavailableError unless this build of onnxruntime contains the execution provider."""
    onnxruntime = load_onnxruntime(execution_provider)
    built_in = onnxruntime.get_available_providers()
    if execution_provider in built_in:
        return
    wheels = installed_wheels()
    extra = _EXTRAS.get(execution_provider)
    remedy = f"pip uninstall -y {' '.join(wheels)} && pip install 'carryall[{extra}]'" if extra else ""
    raise ProviderUnavailableError(
        f"{execution_provider} is not part of {_listed(wheels) or 'this onnxruntime'}, which has "
        f"{', '.join(built_in)}. Install a wheel that has it{f': {remedy}' if remedy else ''}"
    )


def check_registered(asked: list[str], registered: list[str], model: str) -> None:
    """Raise ProviderUnavailableError if the open session lacks a requested execution provider."""
    dropped = [name for name in asked if name not in registered]
    if dropped:
        raise ProviderUnavailableError(
            f"{', '.join(dropped)} could not start for {model}; onnxruntime fell back to "
            f"{', '.join(registered)}. Usually a library of the device is missing: run `carryall doctor`."
        )


def open_session(
    model: Path | bytes,
    execution_provider: str,
    options: Any = None,
    provider_options: Mapping[str, str] | None = None,
    *,
    devices: Sequence[Any] = (),
    on_fallback: Callable[[Placement], None] | None = None,
) -> Any:
    """Open an ``onnxruntime.InferenceSession`` on one execution provider only.

    Args:
        model: a file, or serialized ONNX.
        execution_provider: onnxruntime's name of the execution provider.
        options: ``onnxruntime.SessionOptions``.
        provider_options: options of the execution provider.
        devices: ``onnxruntime.OrtEpDevice`` of the provider, if it comes from a plugin library.
        on_fallback: allows nodes on the CPU, and is called with the placement if there are any.

    Raises:
        ModelNotFoundError: there is no such file.
        GraphError: the file is not a valid ONNX model, or has operators that the provider lacks.
        ProviderUnavailableError: the provider is missing, could not start, or nodes would run on the CPU.
    """
    onnxruntime = load_onnxruntime(execution_provider)
    if isinstance(model, Path) and not model.is_file():
        raise ModelNotFoundError(f"there is no model file {model}")
    if isinstance(model, Path):
        check_utf8(model)
    options = options if options is not None else session_options()
    asked: dict[str, Any] = {}
    if devices:
        options.add_provider_for_devices(list(devices), dict(provider_options or {}))
    else:
        check_available(execution_provider)
        asked["providers"] = [(execution_provider, dict(provider_options or {}))]
    strictness = _strictness(onnxruntime)
    if execution_provider != CPU and (on_fallback is None or strictness[0] == RECORD):
        options.add_session_config_entry(*strictness)
    source = prepare_session(model, options)
    try:
        with quiet_logger(), no_capture():
            session = onnxruntime.InferenceSession(source, sess_options=options, enable_fallback=0, **asked)
    except runtime_errors() as error:
        raise load_error(error, model_name(model), [execution_provider]) from error
    session.disable_fallback()
    check_registered([execution_provider], session.get_providers(), model_name(model))
    if execution_provider != CPU:
        _check_or_tell(session, execution_provider, model, on_fallback)
    return session


def _check_or_tell(
    session: Any, asked: str, model: Path | bytes, on_fallback: Callable[[Placement], None] | None
) -> None:
    def heavy() -> set[str]:
        return heavy_nodes(model)

    if on_fallback is None:
        check_placed(session, [asked], model_name(model), heavy)
        return
    placed = placed_nodes(session)
    if placed is not None and stray_nodes(placed, [asked], heavy):
        on_fallback(summarise(placed, [asked], weight_bytes_by_node(read_model(model)), heavy))


def _strictness(onnxruntime: ModuleType) -> tuple[str, str]:
    """Return the session entry for strict placement; before 1.24 it refuses shape arithmetic too."""
    if hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        return RECORD, "1"
    return "session.disable_cpu_ep_fallback", "1"


def check_placed(
    session: Any, asked: Sequence[str], model: str, heavy: Callable[[], Collection[str]]
) -> None:
    """Raise ProviderUnavailableError if nodes other than shape arithmetic run elsewhere than requested.

    Args:
        session: a session opened with ``placement.RECORD``.
        asked: the requested execution providers.
        model: the name of the model in error messages.
        heavy: returns names of nodes that are not shape arithmetic.
    """
    placed = placed_nodes(session)
    strays = stray_nodes(placed, asked, heavy) if placed is not None else []
    if strays:
        named = ", ".join(str(node) for node in strays[:3])
        raise ProviderUnavailableError(
            f"{len(strays)} nodes of {model} cannot run on {', '.join(asked)} and would fall back to another "
            f"provider: {named}. Lower the model for this provider, or allow the fallback."
        )


def model_name(model: object) -> str:
    """Return the name of a model, given as path or content, for error messages."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else "the given model"


def load_error(error: BaseException, model: str, providers: list[str]) -> CarryallError:
    """Return the CarryallError for a failure to open a session."""
    text = one_line(error)
    if _is_short_of_memory(error, text):
        return ProviderRuntimeError(f"not enough memory to load {model} on {', '.join(providers)}: {text}")
    if "fallback to CPU EP has been explicitly disabled" in text:
        return ProviderUnavailableError(
            f"some nodes of {model} cannot run on {', '.join(providers)} and would fall back to the CPU. "
            "Lower the model for this provider, or allow the fallback."
        )
    if "cannot use the graph capture feature" in text:
        return ProviderUnavailableError(
            f"runs of {model} cannot be captured, because some of its nodes run on the CPU beside "
            f"{', '.join(providers)}; switch the option that captures runs off"
        )
    if type(error).__name__ == "EPFail" or _STARTS in text:
        return ProviderUnavailableError(f"{', '.join(providers)} failed while loading {model}: {text}")
    too_new = "official support for domain ai.onnx is till opset" in text
    hint = " `carryall optimize` lowers the opset where it can" if too_new else ""
    return GraphError(f"onnxruntime cannot load {model}: {text}{hint}")


def run_error(rows: int, error: BaseException) -> ProviderRuntimeError:
    """Return the error for a run of so many rows that failed."""
    text = str(error) if isinstance(error, CarryallError) else one_line(error)
    kind = OutOfMemoryError if _is_short_of_memory(error, text) else ProviderRuntimeError
    return kind(f"a run of {rows} rows failed: {text}")


def _is_short_of_memory(error: BaseException, text: str) -> bool:
    known = isinstance(error, MemoryError | OutOfMemoryError)
    return known or any(words in text for words in _SHORT_OF_MEMORY)


def one_line(error: BaseException) -> str:
    """Return the message of an onnxruntime error without line breaks and without its prefix."""
    text = " ".join(str(error).split())
    return text.removeprefix("[ONNXRuntimeError] : ") or type(error).__name__
