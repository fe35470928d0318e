"""Is one graph as good as another? Both run on the same tokens, and their logits are compared.

The two input contracts of ``docs/architecture.md`` (portable, and slots of a shared KV buffer) are driven
behind one face, so that any two stages of a pipeline can be compared.
"""

from __future__ import annotations

import abc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..runtime.errors import MissingExtraError, VerificationError
from .lazy import Array

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
_CACHE_TYPES: dict[str, Any] = {"tensor(float)": np.float32, "tensor(int8)": np.int8}


class GraphRunner(abc.ABC):
    """Runs a decoder graph on the CPU, for checking and not for speed.

    Args:
        model: the ``model.onnx`` of a portable graph or of one lowered to slots.
    """

    def __init__(self, model: Path) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingExtraError("comparing graphs", "onnxruntime", "cpu") from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Quantized weights in the portable form are to mean what the standard says, with fp32 activations.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        self.session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.cache_names = [
            value.name for value in self.session.get_inputs() if value.name.startswith("past_key_values.")
        ]

    @abc.abstractmethod
    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """Append tokens [n] to each sequence's cache. Returns logits [n, vocab] per sequence."""

    def _zero_cache(self, batch: int, length: int) -> dict[str, Array]:
        shapes = {value.name: value.shape for value in self.session.get_inputs()}
        types = {value.name: value.type for value in self.session.get_inputs()}
        return {
            name: np.zeros((batch, shapes[name][1], length, shapes[name][3]), _CACHE_TYPES[types[name]])
            for name in self.cache_names
        }


class PortableRunner(GraphRunner):
    """Explicit past and present, one sequence a run."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._caches: dict[int, dict[str, Array]] = {}

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """See ``GraphRunner``."""
        return {row: self._run(row, tokens) for row, tokens in rows.items()}

    def _run(self, row: int, tokens: Tokens) -> Logits:
        past = self._caches.setdefault(row, self._zero_cache(1, 0))
        start = past[self.cache_names[0]].shape[2]
        total = start + len(tokens)
        feed = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(start, total)[None],
        }
        known = {value.name for value in self.session.get_inputs()}
        feed = {name: value for name, value in feed.items() if name in known} | past
        results = dict(zip(self.outputs, self.session.run(None, feed), strict=True))
        self._caches[row] = {name: results[_present(name)] for name in self.cache_names}
        logits: Logits = results["logits"][0]
        return logits


class SlotRunner(GraphRunner):
    """Slots of one shared buffer: one batched run where the kernel allows it, else a run per sequence."""

    def __init__(self, model: Path, *, slots: int = 4, max_length: int = 256) -> None:
        super().__init__(model)
        self._cache = self._zero_cache(slots, max_length)
        self._lengths = np.zeros(slots, np.int64)

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """See ``GraphRunner``."""
        fresh = all(self._lengths[row] == 0 for row in rows)
        if fresh or all(len(tokens) == 1 for tokens in rows.values()):
            return self._run(rows)
        return {row: self._run({row: tokens})[row] for row, tokens in rows.items()}

    def _run(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        first, last = min(rows), max(rows)
        window = slice(first, last + 1)
        widest = max(len(tokens) for tokens in rows.values())
        ids = np.zeros((last + 1 - first, widest), np.int64)
        counts = np.ones(len(ids), np.int64)
        for row, tokens in rows.items():
            ids[row - first, : len(tokens)], counts[row - first] = tokens, len(tokens)
        ends = self._lengths[window] + counts
        feed: dict[str, Array] = {
            "input_ids": ids,
            "seqlens_k": (ends - 1).astype(np.int32),
            "total_sequence_length": np.array(ends.max(), np.int32),
            "logits_positions": np.broadcast_to(np.arange(widest), ids.shape).copy(),
        }
        logits = self._bind_and_run(feed, window)
        for row, tokens in rows.items():
            self._lengths[row] += len(tokens)
        return {row: logits[row - first, : len(tokens)] for row, tokens in rows.items()}

    def _bind_and_run(self, feed: dict[str, Array], window: slice) -> Logits:
        """Run with inputs and outputs of the cache on the same memory."""
        import onnxruntime

        binding = self.session.io_binding()
        for name, value in feed.items():
            binding.bind_cpu_input(name, value)
        for name in self.cache_names:
            buffer = onnxruntime.OrtValue.ortvalue_from_numpy(self._cache[name][window])
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(_present(name), buffer)
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        logits: Logits = binding.get_outputs()[-1].numpy()  # in the order they were bound
        return logits


def runner(model: Path, *, slots: int = 4, max_length: int = 256) -> GraphRunner:
    """Open a graph by whichever of the two contracts its inputs follow."""
    names = {value.name for value in ir.load(model).graph.inputs}
    if "seqlens_k" in names:
        return SlotRunner(model, slots=slots, max_length=max_length)
    return PortableRunner(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far logits of ``b`` are from those of ``a``.

    Attributes:
        max_abs: largest difference of a logit.
        max_rel: the same, relative to the largest logit.
        kl: largest Kullback-Leibler divergence of b's next-token distribution from a's, in nats.
        mean_kl: its mean.
        greedy_equal: leading greedy tokens, of ``steps``, that are the same.
    """

    max_abs: float
    max_rel: float
    kl: float
    mean_kl: float
    greedy_equal: int
    steps: int


def compare(a: Path, b: Path, prompt: Sequence[int], *, steps: int = 16) -> Comparison:
    """Run two graphs on a prompt, then on the greedy tokens of ``a``, and compare all logits."""
    length = len(prompt) + steps + 1
    first, second = (runner(model, slots=1, max_length=length) for model in (a, b))
    tokens = np.array(prompt, np.int64)
    pairs: list[tuple[Logits, Logits]] = []
    agree: list[bool] = []
    for _ in range(steps + 1):
        left, right = first.forward({0: tokens})[0], second.forward({0: tokens})[0]
        pairs.append((left, right))
        agree.append(bool(left[-1].argmax() == right[-1].argmax()))
        tokens = left[-1:].argmax(-1)
    left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
    divergence = _kl(left, right)
    difference = float(np.abs(left - right).max())
    return Comparison(
        max_abs=difference,
        max_rel=difference / float(np.abs(left).max()),
        kl=float(divergence.max()),
        mean_kl=float(divergence.mean()),
        greedy_equal=[*agree, False].index(False),
        steps=len(agree),
    )


def verify(a: Path, b: Path, prompt: Sequence[int], *, max_kl: float, steps: int = 16) -> Comparison:
    """Compare two graphs and insist on a bar.

    Raises:
        VerificationError: the divergence is above ``max_kl``.
    """
    result = compare(a, b, prompt, steps=steps)
    if not result.kl <= max_kl:
        raise VerificationError(
            f"{b} differs from {a}: KL {result.kl:.3g} is above {max_kl:.3g} (max abs {result.max_abs:.3g}, "
            f"{result.greedy_equal} of {result.steps} greedy tokens equal)"
        )
    return result


def compare_models(a: ir.Model, b: ir.Model, prompt: Sequence[int], *, steps: int = 16) -> Comparison:
    """``compare`` for graphs in memory; they are written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("a.onnx", "b.onnx")]
        for model, path in zip((a, b), paths, strict=True):
            ir.save(model, path, external_data=f"{path.name}.data")
        return compare(paths[0], paths[1], prompt, steps=steps)


def _present(name: str) -> str:
    return name.replace("past_key_values", "present")


def _kl(left: Logits, right: Logits) -> npt.NDArray[np.float64]:
    p, q = (_log_softmax(side.astype(np.float64)) for side in (left, right))
    divergence: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return divergence


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
