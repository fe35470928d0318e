"""Random tiny GGUF files with odd metadata, and what llama.cpp computes with them.

``draw`` chooses a file by its seed: a family, sizes, the type of each kind of matrix, and keys of metadata
that are changed, added or left out. ``LlamaCpp`` runs in a process of its own, since some metadata ends it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from fuzzing import CORPORA
from tiny_gguf import rewrite, write_gguf

Floats = npt.NDArray[np.float32]
LENGTH = 40  # tokens of the prompt: longer than every window and original context
_CONTEXT = 64
FAMILIES = (
    *("llama", "llama", "llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma3_text"),
    *("smollm3", "lfm2", "qwen3_5_text"),
)
# Files of ``converted_ggufs`` that llama.cpp reads, and gives the logits of transformers.
CONVERTED = (
    *(
        "apertus",
        "bitnet-silu-tied",
        "cohere2-four",
        "stablelm",
        "deepseek_v2-groups-yarn",
        "deepseek_v3",
        "falcon_h1",
        "falcon_h1-norm",
        "gemma",
        "glm4",
        "glm4_moe",
    ),
    *(
        "glm4_moe-plain",
        "glm4_moe_lite",
        "granite",
        "granite_swa-one-base",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
    ),
    *(
        "hunyuan_v1_dense",
        "lfm2_moe",
        "ministral3",
        "muse_glimmer-published",
        "olmo2",
        "starcoder2-no-window",
        "youtu",
    ),
)
# Types of matrices by the multiple that their rows need.
_OF_32 = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
_OF_256 = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
    *("IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"),
)
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed", "lm_head")


@dataclass
class RandomFile:
    """A file that ``write`` writes.

    Args:
        family: as for ``write_gguf``, like ``overrides`` and ``types``; or the name of a converted file, of
            which only keys are changed.
        metadata: changed keys.
        freqs: whether a tensor holds factors of the rope by frequency.
    """

    family: str
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    freqs: bool = False

    def write(self, path: Path) -> None:
        converted = CORPORA / "converted_ggufs" / f"{self.family}.gguf"
        if converted.exists():
            rewrite(converted, path, self.metadata)
            return
        overrides = {**self.overrides, "seed": self.seed}
        extra = {}
        if self.freqs:
            dims = int(self.overrides.get("head_dim") or 8) // 2
            extra["rope_freqs.weight"] = np.linspace(1, 3, dims, dtype=np.float32)
        write_gguf(
            self.family, path, types=self.types or "F32", metadata=self.metadata, extra=extra, **overrides
        )

    def text(self) -> str:
        return json.dumps(asdict(self))


def _keys() -> list[str]:
    """Return the keys of an architecture that the gguf package knows, and one that nobody does."""
    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM)
    names = [value for group in groups for name, value in vars(group).items() if name.isupper()]
    more = ["rope.scale_linear", "attention.recurrent_layers", "unknown"]
    return sorted({name.removeprefix("{arch}.") for name in names if "{dense}" not in name} | set(more))


KEYS = _keys()
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    {"rope.scaling.factor": 2.5},
    {"rope.scale_linear": 3.0},
    {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 16},
    {"rope.scaling.type": "yarn"},
    {"rope.freq_base": 500_000.0},
    {"rope.freq_base": None},
    {"rope.dimension_count": None},
    {"rope.dimension_count": 4},
)
_STATED = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"),
    *("rope.dimension_count", "attention.sliding_window", "attn_logit_softcapping", "context_length"),
    *("final_logit_softcapping", "feed_forward_length", "expert_feed_forward_length", "expert_used_count"),
)
_NUMBERS = (0, 1, 2, 3, 4, 8, 16, 64, 0.0, 0.1, 0.25, 0.5, 1.0, 1.3, 2.0, 5.0, 30.0)


def _changes(rng: random.Random) -> dict[str, Any]:
    """Draw changes of the metadata: some of the rope, some of any key."""
    changed: dict[str, Any] = {}
    if rng.random() < 0.4:
        changed |= rng.choice(_ROPES)
        if rng.random() < 0.5:
            name = rng.choice(("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"))
            changed[f"rope.scaling.{name}"] = rng.choice((0.5, 1.0, 2.0, 16.0))
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        if rng.random() < 0.3:
            changed[rng.choice(_STATED)] = None
            continue
        key = rng.choice(KEYS)
        changed[key] = rng.choice((*_NUMBERS, True, False, "none", [1, 0], [True, False], None))
    return changed


def draw(seed: int) -> RandomFile:
    """Draw a file."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return _draw_converted(rng)
    family = rng.choice(FAMILIES)
    drawn = RandomFile(family, seed % 1000)
    hybrid = family in ("lfm2", "qwen3_5_text")
    if not hybrid and rng.random() < 0.7:
        heads = rng.choice((1, 2, 3, 4))
        head_dim = rng.choice((8, 16, 32))
        drawn.overrides |= {
            "num_attention_heads": heads * rng.choice((1, 2)),
            "num_key_value_heads": heads,
            "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-2)),
        }
        if family in ("qwen2", "smollm3"):
            drawn.overrides["hidden_size"] = drawn.overrides["num_attention_heads"] * head_dim
        else:
            drawn.overrides["head_dim"] = head_dim
    if family in ("llama", "qwen2", "qwen3", "smollm3"):
        drawn.overrides["tie_word_embeddings"] = rng.random() < 0.5
    if family == "qwen3_moe":
        drawn.overrides["mlp_only_layers"] = []
    if family == "llama":
        drawn.overrides["attention_bias"] = rng.random() < 0.2
        drawn.freqs = rng.random() < 0.2
    if family in ("llama", "qwen3", "qwen2") and rng.random() < 0.5:
        wide = rng.random() < 0.5
        drawn.overrides |= {"hidden_size": 256 if wide else 64, "intermediate_size": 256 if wide else 64}
        heads = int(drawn.overrides.get("num_attention_heads", 4))
        if wide and family != "qwen2":
            drawn.overrides |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
        elif wide or family == "qwen2":
            drawn.overrides |= {"num_attention_heads": 4, "num_key_value_heads": rng.choice((1, 2, 4))}
        else:
            drawn.overrides["head_dim"] = 32 if heads % 2 else 64
        kinds = (*_OF_32, *_OF_256) if wide else _OF_32
        drawn.types = {name: rng.choice(kinds) for name in _MATRICES if rng.random() < 0.7}
    if rng.random() < 0.8:
        drawn.metadata = _changes(rng)
    return drawn


def _draw_converted(rng: random.Random) -> RandomFile:
    """Draw a converted file with changes, most often of one of its own keys."""
    drawn = RandomFile(rng.choice(CONVERTED))
    reader = gguf.GGUFReader(CORPORA / "converted_ggufs" / f"{drawn.family}.gguf")
    prefix = f"{reader.fields['general.architecture'].contents()}."
    stated = {
        name.removeprefix(prefix): entry.contents()
        for name, entry in reader.fields.items()
        if name.startswith(prefix)
    }
    if rng.random() < 0.5:
        drawn.metadata = _changes(rng)
    for key in rng.sample(sorted(stated), rng.choice((0, 1, 1, 2))):
        value = stated[key]
        if rng.random() < 0.2 or isinstance(value, str):
            drawn.metadata[key] = None
        elif isinstance(value, list):
            drawn.metadata[key] = rng.sample(value, len(value))
        elif isinstance(value, bool):
            drawn.metadata[key] = not value
        elif isinstance(value, int):
            drawn.metadata[key] = rng.choice((0, 1, 2, value // 2, value + 1, 2 * value))
        else:
            drawn.metadata[key] = rng.choice((0.0, 0.5, 1.0, value / 4, value * 1.5))
    return drawn


def prompt() -> list[int]:
    return list(map(int, np.random.default_rng(0).integers(0, 256, LENGTH)))


_SERVER = """
import ctypes, sys
import numpy as np, llama_cpp
import gguf
from pathlib import Path
base = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so"))))

class Traits(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleave", ctypes.c_int64),
                ("size", ctypes.c_size_t), ("quantized", ctypes.c_bool), ("to_float", ctypes.c_void_p)]

base.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

def floats(tensor):
    kind = int(tensor.tensor_type)
    data = np.ascontiguousarray(tensor.data)
    if kind == 0:
        return data
    shape = tuple(int(size) for size in reversed(tensor.shape))
    out = np.zeros(shape, np.float32)
    convert = TO_FLOAT(base.ggml_get_type_traits(kind).contents.to_float)
    convert(data.ctypes.data, out.ctypes.data, out.size)
    return out

def in_floats(source, target):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub = entry.types[-1] if len(entry.types) > 1 else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, floats(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

tokens = [int(token) for token in sys.argv[1].split(",")]
for line in sys.stdin:
    source, out = line.split()
    try:
        in_floats(source, source + ".f32")
        model = llama_cpp.Llama(
            source + ".f32", n_ctx=64, n_batch=64, n_ubatch=64, logits_all=True, verbose=False, n_threads=1,
            type_k=0, type_v=0, flash_attn=False)
        model.eval(tokens)
        np.save(out, np.array(model.scores[: len(tokens)]))
        model.close()
        answer = "ok"
    except Exception as error:
        answer = "refused " + str(error)[:200].replace(chr(10), " ")
    print("ANSWER", answer, flush=True)
"""


class LlamaCpp:
    """llama.cpp in another process, which is started again where a file ends it.

    The weights are turned to floats by ggml's own functions first, so that products are those of float32.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SERVER, ",".join(map(str, prompt()))]
        return subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def logits(self, file: Path) -> Floats | None:
        """Return the logits of the prompt; None if llama.cpp refuses the file."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        out = file.with_suffix(".npy")
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{file} {out}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("ANSWER"):
                return np.array(np.load(out)) if line.split()[1] == "ok" else None
        process.wait()
        self.close()
        return None  # it ended itself

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        self._process = None


def shown(logits: Floats) -> Floats:
    """The logits that a kept file states: the first of the last two tokens."""
    return logits[-2:, :12]


def keep(file: RandomFile, name: str, folder: Path) -> None:
    """Write a file with llama.cpp's logits as ``tests/corpora/ggufs/NAME.json``, from ``folder``."""
    file.write(folder / "m.gguf")
    peer = LlamaCpp()
    logits = peer.logits(folder / "m.gguf")
    peer.close()
    assert logits is not None, name
    content = {"file": asdict(file), "logits": [[round(float(x), 6) for x in row] for row in shown(logits)]}
    path = CORPORA / "ggufs" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content) + "\n")
