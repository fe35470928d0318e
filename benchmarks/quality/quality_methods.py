"""The quantization methods that ``quality.py`` compares, grouped by the types they store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORKERS = Path(__file__).resolve().parents[1] / "workers"


@dataclass(frozen=True)
class Method:
    """One way to quantize the model.

    Attributes:
        kind: methods of one kind store weights and activations in the same number of bits.
        name: name of the method, unique for its tool.
        tool: ``carryall``, ``onnxruntime`` or ``nncf``.
        arguments: arguments of ``carryall quantize``, or of the tool's worker.
    """

    kind: str
    name: str
    tool: str
    arguments: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return the name of the method's folder and of its results."""
        return f"{self.tool}-{self.name}".replace(" ", "_").replace("/", "-")

    def file(self, folder: Path) -> Path:
        """Return the path of the graph that the method writes."""
        return folder / self.key / ("model.xml" if self.tool == "nncf" else "model.onnx")

    def command(self, pythons: dict[str, str], folder: Path) -> list[str]:
        """Return the command that quantizes ``folder/float``."""
        python, out = pythons[self.tool], self.file(folder)
        source = folder / "float"
        if self.tool == "carryall":
            arguments = ["quantize", source, out.parent, "--quiet", *self.arguments]
            return [python, "-m", "carryall", *map(str, arguments)]
        worker = WORKERS / ("quantize_ort.py" if self.tool == "onnxruntime" else "quantize_nncf.py")
        arguments = [worker, source / "model.onnx", out, folder / "windows.npz", *self.arguments]
        return [python, *map(str, arguments)]


def _blocks(size: int) -> list[Method]:
    kind, blocks = f"int4, blocks of {size}", ("--method", "int4-fast", "--block-size", str(size))
    ours = [
        Method(kind, f"{name}/{size}", "carryall", (*blocks, "--algorithm", name))
        for name in ("hqq", "kquant", "awq", "gptq", "awq+gptq")
    ]
    ours += [  # 8,192 calibration tokens, as the other tools use; the default is twice as many
        Method(
            kind,
            f"{name}/{size}, 8k tokens",
            "carryall",
            (*blocks, "--algorithm", name, "--calibration-tokens", "8192"),
        )
        for name in ("gptq", "awq+gptq")
    ]
    nearest = (*blocks, "--algorithm", "rtn")
    theirs = [
        Method(kind, f"{name}/{size}", "onnxruntime", (name, str(size)))
        for name in ("rtn", "hqq", "kquant", "gptq")
    ]
    options = ("int4", "int4+awq", "int4+scale_estimation", "int4+gptq", "int4+awq+scale_estimation")
    compressed = [
        Method(kind, f"{name.replace('int4+', '').replace('int4', 'rtn')}/{size}", "nncf", (name, str(size)))
        for name in options
    ]
    return [Method(kind, f"rtn/{size}", "carryall", nearest), *ours, *theirs, *compressed]


def _static() -> list[Method]:
    kind = "static int8"
    ours = [
        Method(kind, f"static {name}", "carryall", ("--method", "int8-static", "--calibrator", name))
        for name in ("minmax", "percentile", "entropy", "mse")
    ]
    smooth = ("--method", "int8-static", "--smooth")
    theirs = [
        Method(kind, f"static {name.lower()}", "onnxruntime", (f"static-{name}",))
        for name in ("MinMax", "Percentile", "Entropy")
    ]
    smoothed = Method(kind, "static mse, smooth", "carryall", smooth)
    return [*ours, smoothed, *theirs, Method(kind, "ptq", "nncf", ("ptq",))]


METHODS = [
    Method("defaults", "int4", "carryall", ()),
    Method("defaults", "int8", "carryall", ("--method", "int8")),
    Method("smaller", "int4/64, promoted", "carryall", ("--block-size", "64", "--promote", "0.05")),
    *_blocks(32),
    *_blocks(128),
    Method("int8 weights", "int8/32", "carryall", ("--method", "int8-fast")),
    Method(
        "int8 weights",
        "int8/32, float embedding",
        "carryall",
        ("--method", "int8-fast", "--asymmetric", "--embedding", "float"),
    ),
    Method("int8 weights", "int8/32", "onnxruntime", ("int8", "32")),
    Method("int8 weights", "int8, columns", "nncf", ("int8",)),
    Method("dynamic int8", "dynamic", "carryall", ("--method", "int8-dynamic")),
    Method("dynamic int8", "dynamic, smooth", "carryall", ("--method", "int8-dynamic", "--smooth")),
    Method("dynamic int8", "dynamic", "onnxruntime", ("dynamic",)),
    *_static(),
    Method(
        "mixed",
        "5 bits, gptq",
        "carryall",
        ("--method", "int4-fast", "--budget", "5bits", "--algorithm", "gptq"),
    ),
    Method(
        "mixed",
        "5.5 bits, gptq",
        "carryall",
        ("--method", "int4-fast", "--budget", "5.5bits", "--algorithm", "gptq"),
    ),
    Method("KV int8", "KV int8", "carryall", ("--method", "none", "--kv", "int8")),
    Method("KV int8", "KV int8, one scale", "carryall", ("--method", "none", "--kv", "int8-tensor")),
    Method("16 bits", "fp16", "carryall", ("--method", "fp16")),
    Method("16 bits", "bf16", "carryall", ("--method", "bf16")),
]
