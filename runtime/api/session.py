"""``InferenceSession``: onnxruntime's class for any ONNX model, with strict placement.

All methods of onnxruntime's class are inherited; only opening a model differs. A provider that is missing,
cannot start, or leaves nodes to the CPU is an error, unless ``allow_fallback`` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ...errors import ModelNotFoundError, UsageError
from ...graph_opt.graph.exact_session import prepare_session
from ...graph_opt.graph.saving import save_model
from ...options import shown
from ...providers import get_provider, has_argument
from ...providers.captures import no_capture
from ...providers.ort import ort
from ...providers.placement import (
    RECORD,
    Placement,
    heavy_nodes,
    placed_nodes,
    read_model,
    summarise,
    weight_bytes_by_node,
)
from ...storage.paths import check_name, check_utf8
from ...storage.scratch import scratch_folder
from ..types.arguments import fits
from ..types.providers import Providers

ort.load_onnxruntime("InferenceSession")  # reports a missing or duplicate wheel with the remedy
import onnxruntime  # noqa: E402

from .bound_run import BoundRun, Tensors  # noqa: E402


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime is untyped
    """Run an ONNX model, with the arguments, methods and results of ``onnxruntime.InferenceSession``.

    It adds ``bind`` and ``run_tensors`` (tensors of any library, without copies), ``run_awaited`` (asyncio)
    and ``placement``. Several threads may run one session at once.

    Args:
        path_or_bytes: a file, serialized ONNX, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        sess_options: ``onnxruntime.SessionOptions``.
        providers: names of carryall ("cpu") or of onnxruntime ("CPUExecutionProvider"), in order of priority,
            each alone or with a dict of its options; None takes onnxruntime's default. A plugin library
            ("ep:PATH") must be the only one.
        provider_options: one dict per provider, if ``providers`` are plain names.
        allow_fallback: let onnxruntime replace a provider that fails, and run unsupported nodes on the CPU.
        **kwargs: passed to onnxruntime.

    Raises:
        ModelNotFoundError: there is no such file.
        GraphError: the model is invalid, or has operators that no given provider supports.
        ProviderUnavailableError: a given provider is missing, cannot start, or would leave nodes to the CPU.
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str] | onnx.ModelProto | ir.Model,
        sess_options: Any = None,
        providers: Providers | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        allow_fallback: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(providers, str) and not fits(providers, Providers | None):
            raise UsageError(f"providers must be names, each alone or with a dict, not {shown(providers)}")
        if not isinstance(path_or_bytes, str | bytes | os.PathLike | onnx.ModelProto | ir.Model):
            raise UsageError(f"a model is a file, bytes or a model object, not {shown(path_or_bytes)}")
        self._allow_fallback = allow_fallback
        self._source = ort.model_name(path_or_bytes)
        if isinstance(path_or_bytes, str | os.PathLike):
            check_name(Path(path_or_bytes))
            check_utf8(Path(path_or_bytes))
        if isinstance(path_or_bytes, str | os.PathLike) and not Path(path_or_bytes).is_file():
            raise ModelNotFoundError(f"there is no model file {self._source}")
        if not allow_fallback:
            kwargs["enable_fallback"] = 0
        options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
        if not isinstance(options, onnxruntime.SessionOptions):
            raise UsageError(f"sess_options must be onnxruntime.SessionOptions, not {shown(options)}")
        options.add_session_config_entry(RECORD, "1")
        plugin, devices = _plugin(providers)
        if devices:
            options.add_provider_for_devices(devices, plugin)
            providers = None
        asked = _names(providers)
        self._weights, self._heavy_nodes = _facts(path_or_bytes)
        with _readable(path_or_bytes) as model, self._strictly(asked):
            super().__init__(
                prepare_session(model, options), options, _translated(providers), provider_options, **kwargs
            )
        self._check(asked or [device.ep_name for device in devices])

    def set_providers(
        self, providers: Providers | None = None, provider_options: Sequence[dict[Any, Any]] | None = None
    ) -> None:
        """Open the model again on other providers, with the checks of the constructor."""
        asked = _names(providers)
        with self._strictly(asked):
            super().set_providers(_translated(providers), provider_options)
        self._check(asked)

    def bind(self, inputs: Tensors, outputs: Tensors | None = None) -> BoundRun:
        """Bind tensors once for many runs; see ``BoundRun``."""
        return BoundRun(self, inputs, outputs)

    def run_tensors(
        self, inputs: Tensors, outputs: Tensors | None = None, run_options: Any = None
    ) -> dict[str, onnxruntime.OrtValue]:
        """Run once on NumPy arrays, ``OrtValue`` or DLPack tensors, without copies; see ``BoundRun``."""
        return BoundRun(self, inputs, outputs).run(run_options)

    async def run_awaited(self, output_names: Sequence[str] | None, input_feed: dict[str, Any]) -> list[Any]:
        """Run from asyncio without blocking the event loop; cancelling the task terminates the run."""
        run_options = onnxruntime.RunOptions()
        run = asyncio.create_task(asyncio.to_thread(self.run, output_names, input_feed, run_options))
        try:
            return list(await asyncio.shield(run))
        except asyncio.CancelledError:
            run_options.terminate = True
            await asyncio.wait([run])  # the run reads the inputs until it ends
            run.exception()
            raise

    def placement(self) -> Placement:
        """Return nodes and weight bytes by provider, and why nodes are not on the first provider."""
        placed = placed_nodes(self) or {}
        return summarise(placed, self._asked or self.get_providers(), self._weights(), self._heavy_nodes)

    @contextlib.contextmanager
    def _strictly(self, asked: list[str]) -> Iterator[None]:
        """Check the providers, and translate onnxruntime's errors while a session opens."""
        if self._allow_fallback:
            with no_capture():
                yield
            return
        for name in asked:
            ort.check_available(name)
        try:
            with no_capture():
                yield
        except ort.runtime_errors() as error:
            raise ort.load_error(error, self._source, asked) from error

    def _check(self, asked: list[str]) -> None:
        self._asked = asked
        if self._allow_fallback:
            return
        ort.check_registered(asked, self.get_providers(), self._source)
        if asked:
            ort.check_placed(self, asked, self._source, self._heavy_nodes)


def _facts(model: object) -> tuple[Callable[[], dict[str, int]], Callable[[], set[str]]]:
    """Return functions that give weight bytes by node and the heavy nodes; files are read lazily."""
    if isinstance(model, ir.Model | onnx.ModelProto):
        seen = read_model(model)
        weights, heavy = weight_bytes_by_node(seen), heavy_nodes(seen)
        return lambda: weights, lambda: heavy
    return lambda: weight_bytes_by_node(read_model(model)), lambda: heavy_nodes(read_model(model))


def _names(providers: Providers | None) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in _translated(providers) or []]


def _translated(providers: Providers | None) -> list[str | tuple[str, dict[Any, Any]]] | None:
    """Return the providers with onnxruntime's names."""
    if providers is None:
        return None
    if isinstance(providers, str):
        raise UsageError(f"providers must be a sequence of names, such as ['{providers}']")
    return [
        _execution_provider(p) if isinstance(p, str) else (_execution_provider(p[0]), p[1]) for p in providers
    ]


def _plugin(providers: Providers | None) -> tuple[dict[Any, Any], list[Any]]:
    """Return options and devices of the plugin library in ``providers``; no devices if there is none."""
    for entry in providers or ():
        name, settings = (entry, {}) if isinstance(entry, str) else entry
        if not has_argument(name):
            continue
        target: Any = get_provider(name)
        devices = target.devices(target.checked_options({}))
        if devices and len(providers or ()) > 1:
            raise UsageError("a plugin library must be the only entry of 'providers'")
        if devices:
            return settings, devices
    return {}, []


def _execution_provider(name: str) -> str:
    if name.endswith("ExecutionProvider"):
        return name
    translated = get_provider(name).execution_provider
    if translated is None:
        raise UsageError(
            f"provider '{name}' is not an execution provider of onnxruntime; open its session with "
            f"carryall.providers.get_provider('{name}').session(path)"
        )
    return translated


@contextlib.contextmanager
def _readable(model: object) -> Iterator[Any]:
    """Yield the model as a path or bytes; models in memory are written to a temporary folder."""
    if isinstance(model, onnx.ModelProto):
        model = ir.from_proto(model)
    if not isinstance(model, ir.Model):
        yield model
        return
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        save_model(model, path)
        yield str(path)
