"""Run a session on tensors of any library, without copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnxruntime

from ...errors import ProviderRuntimeError, UsageError
from ...providers.ort import ort
from ...providers.ort.input_memory import device_inputs

Tensors = Mapping[str, Any]


def ort_value(name: str, tensor: Any) -> onnxruntime.OrtValue:
    """Return an ``OrtValue`` that shares the memory of a tensor, on the host or a device.

    Args:
        name: the name of the tensor, for errors.
        tensor: a C-contiguous NumPy array, an ``OrtValue``, or a DLPack tensor (PyTorch, JAX, ...).

    Raises:
        UsageError: it has another type, is not contiguous, or has a dtype that cannot be shared.
    """
    if isinstance(tensor, onnxruntime.OrtValue):
        return tensor
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous:
            raise UsageError(f"'{name}' is not C-contiguous; pass np.ascontiguousarray of it")
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor)
    if not hasattr(tensor, "__dlpack__"):
        raise UsageError(
            f"'{name}' must be a NumPy array, an OrtValue or a DLPack tensor, not {type(tensor).__name__}"
        )
    try:
        return onnxruntime.OrtValue.from_dlpack(tensor)
    except (RuntimeError, BufferError, TypeError) as error:
        raise UsageError(
            f"'{name}' cannot be shared: {ort.one_line(error)}. It must be contiguous, without "
            "gradient, and of a dtype that NumPy has"
        ) from error


class BoundRun:
    """A session with bound tensors; each ``run()`` reads the inputs from their memory again.

    The caller owns inputs and given outputs, and may change them between runs, not during one. Other outputs
    are allocated in each run and outlive the session. Not thread-safe; use one per thread.

    Args:
        session: an ``onnxruntime.InferenceSession``.
        inputs: tensors by name, see ``ort_value``.
        outputs: tensors to write into, by name, with the shape and dtype of the result; others are allocated.

    Raises:
        UsageError: a name is unknown, or a tensor cannot be shared.
    """

    def __init__(self, session: Any, inputs: Tensors, outputs: Tensors | None = None) -> None:
        outputs = outputs or {}
        self._session = session
        self._names = [value.name for value in session.get_outputs()]
        _check_names("input", inputs, [value.name for value in session.get_inputs()])
        _check_names("output", outputs, self._names)
        self._kept = (dict(inputs), dict(outputs))  # the binding holds addresses only
        self._inputs = {name: ort_value(name, tensor) for name, tensor in inputs.items()}
        self._outputs = {name: ort_value(name, _writable(name, tensor)) for name, tensor in outputs.items()}
        self._binding = session.io_binding()
        self._bind_inputs(self._inputs)
        copied = device_inputs(session)  # what lies on the host is copied there when it is bound
        self._copied = [
            name for name, value in self._inputs.items() if name in copied and value.device_name() == "cpu"
        ]

    def run(self, run_options: Any = None) -> dict[str, onnxruntime.OrtValue]:
        """Run once.

        Returns:
            All outputs by name; ``.numpy()`` and ``torch.from_dlpack(value)`` share their memory.

        Raises:
            ProviderRuntimeError: the run failed.
        """
        self._bind_inputs(self._copied)
        # Bound anew, since a binding gives its allocated outputs out again otherwise.
        self._binding.clear_binding_outputs()
        for name in self._names:
            if name in self._outputs:
                self._binding.bind_ortvalue_output(name, self._outputs[name])
            else:
                self._binding.bind_output(name)
        try:
            self._session.run_with_iobinding(self._binding, run_options)
        except ort.runtime_errors() as error:
            raise ProviderRuntimeError(f"the run failed: {ort.one_line(error)}") from error
        return dict(zip(self._names, self._binding.get_outputs(), strict=True))

    def _bind_inputs(self, names: Iterable[str]) -> None:
        for name in names:
            self._binding.bind_ortvalue_input(name, self._inputs[name])


def _check_names(kind: str, tensors: Tensors, known: list[str]) -> None:
    for name in tensors:
        if name not in known:
            raise UsageError(f"the model has no {kind} '{name}'; it has: {', '.join(known)}")


def _writable(name: str, tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise UsageError(f"output '{name}' is a read-only array")
    return tensor
