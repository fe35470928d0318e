"""Run a decoder graph token by token; the graph may come from any exporter or optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

Array = npt.NDArray[np.generic]
_SLOT_LENGTH = 512
_BLOCKS, _WARM_UP, _ROUNDS = 16, 1, 4
_STEPS, _TURN_MS = 3, 5.0


class Decoder:
    """Run one sequence on a graph with explicit caches, which the graph extends or writes in place.

    Args:
        path: the model.
        head_size: for graphs that do not state it.
    """

    def __init__(self, path: Path, head_size: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.in_place = "seqlens_k" in self.inputs
        self.caches = {
            name: (value.shape[1], value.shape[3] if isinstance(value.shape[3], int) else head_size)
            for name, value in self.inputs.items()
            if len(value.shape) == 4
        }

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], Array]:
        """Return the greedy continuation of a prompt, and the logits after the prompt's last token."""
        caches = self._empty(0)
        logits, caches = self._step(prompt, 0, caches)
        first, tokens, past = logits, [int(logits.argmax())], len(prompt)
        while len(tokens) < count:
            logits, caches = self._step(tokens[-1:], past, caches)
            past += 1
            tokens.append(int(logits.argmax()))
        return tokens, first

    def bind_step(self, past: int) -> ort.IOBinding:
        """Return the binding of one decode step on a cache of ``past`` tokens."""
        binding = self.session.io_binding()
        for name, array in self._feed([7], past).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        shared = {}
        for name, array in self._empty(past).items():
            shared[self._present(name)] = value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            if self.in_place and name in shared:
                binding.bind_ortvalue_output(name, shared[name])
            else:
                binding.bind_output(name)
        return binding

    def _empty(self, past: int) -> dict[str, Array]:
        length = max(_SLOT_LENGTH, 2 * past) if self.in_place else past
        return {
            name: np.zeros((1, heads, length, size), np.float32)
            for name, (heads, size) in self.caches.items()
        }

    def _feed(self, tokens: list[int], past: int) -> dict[str, Array]:
        total, new = past + len(tokens), len(tokens)
        feed: dict[str, Array] = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total, dtype=np.int64)[None],
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logits_positions": np.array([[new - 1]], np.int64),
        }
        return {name: array for name, array in feed.items() if name in self.inputs}

    def _step(self, tokens: list[int], past: int, caches: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        found = dict(
            zip(self.outputs, self.session.run(None, self._feed(tokens, past) | caches), strict=True)
        )
        return found["logits"][0, -1], {name: found[self._present(name)] for name in caches}

    def _present(self, past: str) -> str:
        return past.replace("past_key_values", "present")


def head_size(path: Path) -> int:
    """Return twice the width of a model's cos table: the head size where the cache's last axis is dynamic."""
    initializers = onnx.load(path, load_external_data=False).graph.initializer
    return next((2 * value.dims[-1] for value in initializers if value.name.startswith("cos_cache")), 0)


def steps_ms(
    models: Mapping[str, Path], reference: str, head_size: int, past: int
) -> dict[str, list[tuple[float, float]]]:
    """Return processor times of decode steps: each model's, and the reference's directly before or after it.

    Compare within such pairs, because other load on the machine affects both equally. The fastest of a few
    steps counts. Sessions are reopened for each block, because the memory addresses of weights change the
    time by percents.

    Args:
        models: name -> file.
        reference: one of them.
        head_size: for graphs that do not state it.
        past: number of cached tokens.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for block in range(_BLOCKS):
        names = _rotated(list(models), block)
        running = {name: _open_step(models[name], head_size, past) for name in names}
        for round_ in range(_WARM_UP + _ROUNDS):
            for name in _rotated(names, round_):
                order = (reference, name) if (block + round_) % 2 else (name, reference)
                found = {one: _fastest(running[one]) for one in order}
                if round_ >= _WARM_UP:
                    times[name].append((found[name], found[reference]))
    return times


def _fastest(step: Callable[[], float]) -> float:
    """Return the shortest of several steps; short ones are repeated more, as CPU caches are cold at first."""
    found = [step()]
    while len(found) < _STEPS or sum(found) < _TURN_MS:
        found.append(step())
    return min(found)


def _open_step(model: Path, head_size: int, past: int) -> Callable[[], float]:
    """Open a session and return a function that measures one step in milliseconds."""
    decoder = Decoder(model, head_size)
    binding = decoder.bind_step(past)

    def step() -> float:
        start = time.process_time()
        decoder.session.run_with_iobinding(binding)
        return 1e3 * (time.process_time() - start)

    return step


def _rotated(names: list[str], start: int) -> list[str]:
    first = start % max(1, len(names))
    return names[first:] + names[:first]
