"""Does onnxruntime's PagedAttention compute what its GroupQueryAttention computes, on the device at hand?

Three texts go through PagedAttention in steps, over caches in blocks. GroupQueryAttention has each text as
one prompt without a cache, behind operators of their own for the norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...errors import ProviderUnavailableError
from ...records import dataclass
from ..ort.device_memory import Device
from ..ort.slot_memory import element_type, shared_value

Array = npt.NDArray[Any]

# FlashAttention has a kernel for each of these, and takes the next larger one for other sizes.
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
_HEADS, _KV_HEADS, _ROWS = 4, 2, 3
_PARTS = ("keys", "values")
_SCALE = 0.04  # of a cache of 8 bits; the largest element of a normalised key is about 5
# Rounding of the type, and of a cache of 8 bits, which the other operator does not have. Results are below 2.
_TOLERANCES = {"float": 1e-4, "float16": 1e-2, "bfloat16": 6e-2, "int8": 0.1, "float8e4m3fn": 0.25}
_LEAST = 0.5  # of the largest result of right kernels, which is about 2
_DTYPES = {"float": np.float32, "float16": np.float16, "int8": np.int8}
_DTYPES |= {"bfloat16": ml_dtypes.bfloat16, "float8e4m3fn": ml_dtypes.float8_e4m3fn}
_ATTRIBUTES = f"num_heads = {_HEADS}, kv_num_heads = {_KV_HEADS}, do_rotary = 1, rotary_interleaved = 0"


@dataclass(frozen=True, slots=True)
class _Step:
    """New tokens of each row, and whether the longest row is known to be as long as it is.

    Beyond 512 tokens, FlashAttention then computes single tokens in parts, which it joins.
    """

    counts: Sequence[int]
    known: bool = True


STEPS: Mapping[str, _Step] = {
    "new prompts": _Step((200, 9, 33)),
    "pieces beside a single token": _Step((200, 1, 70)),
    "longer pieces": _Step((170, 60, 1)),
    "single tokens": _Step((1, 1, 1), known=False),
    "single tokens in parts": _Step((1, 1, 1)),
}
_LENGTH = max(sum(step.counts[row] for step in STEPS.values()) for row in range(_ROWS))


@dataclass(frozen=True, slots=True)
class PagedAgreement:
    """The check for some types.

    Args:
        compute: ONNX's name of the type of activations, and of a cache that is not quantized: ``float16``.
        quantized: types of further caches: ``int8``, ``float8e4m3fn``.
        block_size: returns the positions of a block for a head size.
    """

    compute: str
    quantized: Sequence[str]
    block_size: Callable[[int], int]

    @property
    def identity(self) -> str:
        """A hash of what is compared."""
        facts = (self.graphs(), STEPS, _TOLERANCES)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @property
    def layers(self) -> list[tuple[str, int, str]]:
        """Name, head size and type of the cache of each PagedAttention."""
        kinds = (self.compute, *self.quantized)
        return [(f"{size}_{kind}", size, kind) for size in HEAD_SIZES for kind in kinds]

    def graphs(self) -> tuple[bytes, bytes]:
        """Return the graph with PagedAttention, and the one with GroupQueryAttention."""
        inputs = [
            "int32[ends] begins, int32[rows] past, int32[3] bounds, float[1] scale",
            *(f"int32[{_ROWS}, blocks_{block}] table_{block}" for block in self._blocks),
        ]
        outputs, nodes = [], []
        for name, size, kind in self.layers:
            caches = [f"{kind}{self._shape(size)} {part}_{name}" for part in _PARTS]
            inputs += caches
            outputs += [cache.replace("] ", "] new_") for cache in caches]
            nodes.append(self._paged(name, size, quantized=kind in self.quantized))
        paged = _graph("tokens", [name for name, _, _ in self.layers], inputs, outputs, nodes)
        names = [str(size) for size in HEAD_SIZES]
        lengths, dims = [f"int32[{_ROWS}] lengths, int32 total"], f"{_ROWS}, {_LENGTH}"
        return paged, _graph(dims, names, lengths, [], [self._slots(size) for size in HEAD_SIZES])

    def complaint(self, open_session: Callable[[bytes], Any], device: Device) -> str | None:
        """Return where PagedAttention is wrong, None if all of its results agree.

        Args:
            open_session: opens a session on the device of serialized ONNX.
            device: the device.
        """
        paged, slots = map(open_session, self.graphs())
        expected = self.whole_prompts(slots)
        for size, texts in expected.items():
            if not np.abs(texts).max() > _LEAST:
                return f"GroupQueryAttention with heads of {size} computes nothing"
        for step, past, results in self.steps(paged, device):
            for (_, size, kind), result in zip(self.layers, results, strict=True):
                difference = np.abs(result - _rows(expected[size], past, STEPS[step])).max()
                if not difference <= max(_TOLERANCES[self.compute], _TOLERANCES[kind]):  # NaN is wrong too
                    return (
                        f"PagedAttention, {step} with heads of {size} and a cache of {kind}, has other "
                        f"results than GroupQueryAttention, by up to {difference:.3g}"
                    )
        return None

    def whole_prompts(self, session: Any) -> dict[int, Array]:
        """Return the results of GroupQueryAttention for each head size, [rows, length, heads * size]."""
        rest = {"lengths": np.full(_ROWS, _LENGTH - 1, np.int32), "total": np.array(_LENGTH, np.int32)}
        return dict(zip(HEAD_SIZES, session.run(None, _texts() | rest), strict=True))

    def steps(self, session: Any, device: Device) -> Iterator[tuple[str, list[int], list[Array]]]:
        """Yield each step, the tokens before it in each row, and the results of each PagedAttention."""
        texts, past = _texts(), [0] * _ROWS
        buffers = {name: self._buffers(size, kind, device) for name, size, kind in self.layers}
        for name, step in STEPS.items():
            yield name, past, self._run(session, self._feeds(texts, past, step), buffers, device)
            past = [before + count for before, count in zip(past, step.counts, strict=True)]

    def _feeds(self, texts: Mapping[str, Array], past: Sequence[int], step: _Step) -> dict[str, Array]:
        longest = max(before + count for before, count in zip(past, step.counts, strict=True))
        return {
            **{name: _rows(array, past, step) if name[0] == "x" else array for name, array in texts.items()},
            "begins": np.cumsum([0, *step.counts]).astype(np.int32),
            "past": np.array(past, np.int32),
            "bounds": np.array([max(step.counts), _LENGTH, longest if step.known else 0], np.int32),
            "scale": np.array([_SCALE], np.float32),
            **{f"table_{block}": _table(block) for block in self._blocks},
        }

    def _run(
        self, session: Any, feeds: Mapping[str, Array], buffers: Mapping[str, Sequence[Any]], device: Device
    ) -> list[Array]:
        """Return the result of each layer, [tokens, heads * size]; the caches change in place."""
        binding, taken = session.io_binding(), {value.name for value in session.get_inputs()}
        for name in feeds.keys() & taken:
            binding.bind_ortvalue_input(name, shared_value(feeds[name]))
        for name, _, _ in self.layers:
            binding.bind_output(f"y_{name}", "cpu")
        for name, size, kind in self.layers:
            for part, buffer in zip(_PARTS, buffers[name], strict=True):
                element = element_type(np.dtype(_DTYPES[kind]))
                place = device.name, device.index, element, self._shape(size), buffer.data_ptr()
                binding.bind_input(f"{part}_{name}", *place)
                binding.bind_output(f"new_{part}_{name}", *place)
        session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[: len(self.layers)]]

    def _buffers(self, size: int, kind: str, device: Device) -> list[Any]:
        if device.buffer is None:
            raise ProviderUnavailableError(f"{device.name} has no memory for caches in blocks")
        count = int(np.prod(self._shape(size))) * np.dtype(_DTYPES[kind]).itemsize
        return [device.buffer(count) for _ in _PARTS]

    @property
    def _blocks(self) -> list[int]:
        return sorted(set(map(self.block_size, HEAD_SIZES)))

    def _shape(self, size: int) -> list[int]:
        """Return the shape of a cache, whose first block no row has."""
        block = self.block_size(size)
        return [1 + _table(block).size, block, _KV_HEADS, size]

    def _paged(self, name: str, size: int, *, quantized: bool) -> str:
        attributes = f"{_ATTRIBUTES}, local_window_size = -1, scale = {size**-0.5}, softcap = 0.0"
        attributes += ", qk_norm_epsilon = 1e-6"
        if quantized:
            attributes += ', k_quant_type = "PER_TENSOR", v_quant_type = "PER_TENSOR"'
        scales = "scale, scale" if quantized else ", "
        return (
            f"{self._rounded(name, size)} t_{name}, new_keys_{name}, new_values_{name} = "
            f"com.microsoft.PagedAttention<{attributes}>(packed_{name}, , , keys_{name}, values_{name}, "
            f"begins, past, table_{self.block_size(size)}, c_{name}, s_{name}, , , n_{name}, n_{name}, "
            f"{scales}, bounds) y_{name} = Cast<to = 1>(t_{name}) "
        )

    def _slots(self, size: int) -> str:
        """Return the nodes of a head size, without a cache."""
        nodes, widths = self._rounded(str(size), size), [_HEADS * size, _KV_HEADS * size, _KV_HEADS * size]
        widths_text = ", ".join(map(str, widths))
        nodes += (
            f"w_{size} = Constant<value_ints = [{widths_text}]>() "
            f"h_{size} = Constant<value_ints = [0, 0, -1, {size}]>() "
            f"f_{size} = Constant<value_ints = [0, 0, -1]>() "
            f"q_{size}, k_{size}, v_{size} = Split<axis = -1>(packed_{size}, w_{size}) "
        )
        for part in "qk":
            nodes += (
                f"{part}h_{size} = Reshape({part}_{size}, h_{size}) "
                f"{part}n_{size} = RMSNormalization<axis = -1, epsilon = 1e-6>({part}h_{size}, n_{size}) "
                f"{part}f_{size} = Reshape({part}n_{size}, f_{size}) "
            )
        return (
            f"{nodes} t_{size}, keys_{size}, values_{size} = "
            f"com.microsoft.GroupQueryAttention<{_ATTRIBUTES}, scale = {size**-0.5}>"
            f"(qf_{size}, kf_{size}, v_{size}, , , lengths, total, c_{size}, s_{size}) "
            f"y_{size} = Cast<to = 1>(t_{size}) "
        )

    def _rounded(self, name: str, size: int) -> str:
        """Return the nodes that give a layer its inputs in the type of activations."""
        of = {"packed": "x", "c": "cosines", "s": "sines", "n": "norm"}
        to = int(ir.DataType[self.compute.upper()])
        return " ".join(f"{short}_{name} = Cast<to = {to}>({long}_{size})" for short, long in of.items())


def _graph(
    dims: str, layers: Iterable[str], inputs: Iterable[str], outputs: Iterable[str], nodes: Iterable[str]
) -> bytes:
    """Return a model of ``nodes``: packed heads [``dims``, ...] of each size to the results of layers."""
    both = _HEADS + 2 * _KV_HEADS
    texts = [
        f"float[{dims}, {both * size}] x_{size}, float[{_LENGTH}, {size // 2}] cosines_{size}, "
        f"float[{_LENGTH}, {size // 2}] sines_{size}, float[{size}] norm_{size}"
        for size in HEAD_SIZES
    ]
    results = [f"float[{dims}, {_HEADS * int(name.partition('_')[0])}] y_{name}" for name in layers]
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]> g
        ({", ".join([*texts, *inputs])}) => ({", ".join([*results, *outputs])}) {{ {" ".join(nodes)} }}"""
    )
    return ir.to_proto(model).SerializeToString()


def _texts() -> dict[str, Array]:
    """Return the inputs that both graphs have: of texts [rows, length, ...]."""
    rng, feeds = np.random.default_rng(0), dict[str, Array]()
    for size in HEAD_SIZES:
        angles = np.arange(_LENGTH)[:, None] * 1e4 ** -np.linspace(0, 1, size // 2)
        feeds |= {
            f"x_{size}": rng.uniform(-2, 2, (_ROWS, _LENGTH, (_HEADS + 2 * _KV_HEADS) * size)),
            f"cosines_{size}": np.cos(angles),
            f"sines_{size}": np.sin(angles),
            f"norm_{size}": rng.uniform(0.5, 1.5, size),
        }
    return {name: values.astype(np.float32) for name, values in feeds.items()}


def _rows(texts: Array, past: Sequence[int], step: _Step) -> Array:
    """Return a step's part of [rows, length, ...], flat: [tokens, ...]."""
    parts = zip(texts, past, step.counts, strict=True)
    return np.concatenate([text[first : first + count] for text, first, count in parts])


def _table(block: int) -> npt.NDArray[np.int32]:
    """Return the blocks of each row, in no order; block 0 is not among them."""
    width = -(-_LENGTH // block)
    blocks = 1 + np.random.default_rng(block).permutation(_ROWS * width)
    return blocks.reshape(_ROWS, width).astype(np.int32)
