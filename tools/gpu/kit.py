"""Measure carryall on an NVIDIA device, in sections with a time box each, the most telling first.

    python tools/gpu/kit.py --parts .kit --out results   # on a machine with the parts of make_kit.py
    python tools/gpu/kit.py --out results --only decode prompts
    python tools/gpu/kit.py --out results --tiny         # small shapes: a rehearsal

Each section is a process of its own that writes ``results/NAME.json`` as soon as it has a figure, so that a
section that fails, hangs or loses the device costs the others nothing. The last lines are a table of what
`docs/cuda.md` predicts beside what was measured; it is in ``results/table.txt`` too.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = os.environ.get("GPU_KIT_TINY") == "1"
OUT = Path(os.environ.get("GPU_KIT_OUT", "results"))
Figures = dict[str, Any]
INT4, MINIMA = " int4", " int4 with zero points"  # weights in the names of rows; float16 has no name

# Seconds of each section, in order.
BOXES = {
    "smoke": 40,
    "correct": 80,
    "decode": 130,
    "prompts": 100,
    "serve": 75,
    "values": 60,
    "ceilings": 30,
    "options": 60,
    "genai": 100,
    "transformers": 60,
    "big": 50,
    "count": 900,  # only over the stub of CUDA
}
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
BIG = SHAPE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
# Launches do not depend on these sizes, and the weights are written in a tenth of the time.
NARROW = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
SMALL = SHAPE | {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CONTEXT = 512 if TINY else int(os.environ.get("GPU_KIT_CONTEXT", "40960"))
TOKENS = 4 if TINY else 64  # per request of a decoding row
REPEATS = 2 if TINY else 5

# Milliseconds on an H200: onnxruntime-genai's default as measured, and the audit's arithmetic for paged runs
# that are captured, without and with one step in flight. See "Predictions" in docs/cuda.md.
PREDICTED: dict[str, tuple[float, float, float]] = {
    "step b1": (2.97, 2.3, 1.70),
    "step b8": (3.22, 2.5, 1.80),
    "step b32": (3.1, 2.9, 1.95),
    "step b32 int4": (5.5, 3.3, 2.35),
    "prompt 256": (3.4, 2.4, 2.3),
    "prompt 1024": (5.4, 3.9, 3.8),
    "prompt 4096": (18.0, 15.3, 15.2),
    "prompts 8x256": (8.0, 5.2, 5.1),
    "prompts 32x256": (26.0, 18.7, 18.5),
}
KINDS: dict[str, dict[str, Any]] = {
    "slots": {"kv_memory": "slots"},
    "paged": {"kv_memory": "paged"},
    "paged, one step": {"kv_memory": "paged", "steps_ahead": 0},
    "paged, not captured": {"kv_memory": "paged", "cuda_graphs": False},
    "paged, onnxruntime's kernels": {"kv_memory": "paged", "kernels": "onnxruntime"},
}


def note(section: str, figures: Figures) -> None:
    """Add figures to a section's file."""
    path = OUT / f"{section}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | figures, indent=1) + "\n")


def lowered(shape: dict[str, Any], weights: str, options: dict[str, Any], slots: int) -> tuple[Path, Any]:
    """Return a lowered model with random weights, written once, and the options of its runner."""
    from carryall.graph_opt.graph.saving import save_model
    from carryall.graph_opt.pipeline.pipeline import run
    from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
    from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass
    from carryall.providers import get_provider
    from carryall.providers.base import RunnerConfig
    from carryall.runtime.tasks.random_model import random_model

    config = RunnerConfig(max_slots=slots, context_length=CONTEXT, options=options)
    config = get_provider("cuda").resolve_options(config)
    lowering = {name: value for name, value in options.items() if name != "cuda_graphs"}  # the same graph
    key = json.dumps([SMALL if TINY else shape, weights, lowering], sort_keys=True)
    folder = OUT / "models" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not (folder / "model.onnx").is_file():
        model = random_model(SMALL if TINY else shape)
        if weights:
            form = BlockFormat(bits=4, block_size=32, symmetric=weights == INT4)
            model, _ = run(model, [WeightOnlyQuantizationPass(form)])
        model, _ = run(model, get_provider("cuda").passes(config))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, folder / "model.onnx")
    return folder / "model.onnx", config


@contextmanager
def engine(shape: dict[str, Any], kind: str, *, slots: int, weights: str = "", **more: Any) -> Iterator[Any]:
    """Open an engine on a model of random weights."""
    from carryall.providers import get_provider
    from carryall.runtime.engine.engine import Engine, EngineConfig

    model, config = lowered(shape, weights, KINDS[kind] | more, slots)
    opened = Engine(get_provider("cuda").runner(model, config), EngineConfig(prefix_cache=False))
    try:
        yield opened
    finally:
        opened.close()


def request(name: str, length: int, count: int, text: int, **sampling: Any) -> Any:
    """Return a request with a random prompt and a number of tokens."""
    import numpy as np

    from carryall import SamplingParams
    from carryall.runtime.engine.requests.request import Request

    vocabulary = SMALL["vocab_size"] if TINY else SHAPE["vocab_size"]
    tokens = np.random.default_rng(text).integers(2, vocabulary, length).tolist()
    params = SamplingParams(max_tokens=count, ignore_eos=True, **({"temperature": 0.0} | sampling))
    return Request(name, tokens, params)


def generate(
    opened: Any, rows: int, length: int, count: int, turn: int, **sampling: Any
) -> tuple[float, float]:
    """Run requests of equal sizes; return ms until all have a token, and ms of each step after it."""
    requests = [request(f"{turn}.{i}", length, count, 1000 * turn + i, **sampling) for i in range(rows)]
    begun = time.perf_counter()
    for one in requests:
        opened.add(one)
    first, steps = None, 0
    while opened.has_work:
        opened.step()
        if first is not None:
            steps += 1
        elif all(one.output_token_ids for one in requests):
            first = time.perf_counter()
    ended = time.perf_counter()
    failed = [str(one.error) for one in requests if one.error is not None]
    if failed or first is None:
        raise RuntimeError(f"{len(failed)} of {rows} requests failed: {failed[:1]}")
    return (first - begun) * 1e3, (ended - first) * 1e3 / max(1, steps)


def medians(opened: Any, rows: int, length: int, count: int, **sampling: Any) -> dict[str, Figures]:
    """Return median and minimum of some runs, of the ms to the first tokens and of those of a step."""
    pairs = [generate(opened, rows, length, count, 1 + turn, **sampling) for turn in range(REPEATS)]
    columns = zip(("prompt", "step"), zip(*pairs, strict=True), strict=True)
    return {name: {"median": statistics.median(times), "least": min(times)} for name, times in columns}


def smoke() -> None:
    """Is there a provider, does a model run on it, and which KV memory is the default?"""
    from carryall import LLM, SamplingParams
    from carryall.providers import get_provider
    from carryall.providers.ort import ort

    provider = get_provider("cuda")
    note("smoke", {"unavailable": provider.available(), "wheels": ort.installed_wheels()})
    begun = time.perf_counter()
    complaint = provider.paged_complaint(provider.checked_options({}))
    seconds = round(time.perf_counter() - begun, 3)
    note("smoke", {"PagedAttention": complaint or "agrees", "seconds of the check": seconds})
    with LLM("demo", provider="cuda", max_slots=2, context_length=256) as llm:
        (found,) = llm.generate("def add(a, b):", SamplingParams(max_tokens=8, temperature=0.0))
    note(
        "smoke",
        {"text": found.outputs[0].text, "error": found.error, "memory": str(provider.device_memory({}))},
    )


def correct() -> None:
    """Do all ways of running give the same tokens, greedy and by seeds, also from two threads?"""
    from carryall import LLM, SamplingParams

    prompts = ["def add(a, b):", "import os", "class Node:", "for i in range("] * (2 if TINY else 8)
    greedy = [SamplingParams(max_tokens=12 + i, temperature=0.0) for i in range(len(prompts))]
    seeded = [SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=i) for i in range(len(prompts))]
    expected: dict[str, list[list[int]]] = {}
    ways = {"cpu": ("cpu", {})} | {
        kind: ("cuda", options) for kind, options in {"default": {}, **KINDS}.items()
    }
    for way, (provider, options) in ways.items():
        fields: Figures = {"provider": provider, "max_slots": 8, "context_length": 256}
        with LLM("demo", **fields, provider_options=options) as llm:
            for name, params in (("greedy", greedy), ("seeded", seeded)):
                found = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
                base = expected.setdefault(name, found)
                equal = sum(one == other for one, other in zip(found, base, strict=True))
                note("correct", {f"{name}, {way}": f"{equal} of {len(found)} equal to the CPU's"})
            note("correct", {f"a second thread, {way}": _same_in_a_thread(llm, prompts, greedy)})


def _same_in_a_thread(llm: Any, prompts: list[str], params: list[Any]) -> bool:
    """Return whether another thread gets the same tokens as this one."""
    found: list[Any] = []

    def ask() -> None:
        found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])

    caller = threading.Thread(target=ask)
    caller.start()
    caller.join()
    ask()
    return bool(found[0] == found[1])


def decode() -> None:
    """Milliseconds of a decoding step."""
    rows = [
        (1, 256, ""),
        (8, 256, ""),
        (32, 256, ""),
        (32, 256, INT4),
        (32, 256, MINIMA),
        (1, 256, MINIMA),
        (128, 256, ""),
        (1, 4096, ""),
        (32, 4096, ""),
    ]
    if TINY:
        rows = [(1, 16, ""), (4, 16, ""), (4, 16, INT4), (4, 16, MINIMA)]
    for batch, length, weights in rows:
        kinds = ["paged", "paged, one step", "slots"]
        if (length == 256 and batch in (1, 32)) or (batch, length) == (1, 4096) or TINY:
            # What carryall's kernels gain; at 4,096 tokens that is PagedDecode's gain beside PagedAttention.
            kinds.append("paged, onnxruntime's kernels")
        for kind in kinds:
            size = "" if length == 256 else f" at {length}"
            name = f"step b{batch}{size}{weights}, {kind}"
            try:
                with engine(SHAPE, kind, slots=batch, weights=weights) as opened:
                    generate(opened, batch, length, TOKENS, 0)
                    greedy = medians(opened, batch, length, TOKENS)["step"]
                    hot: Figures = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
                    drawn = medians(opened, batch, length, TOKENS, **hot)["step"]
                note("decode", {name: greedy, f"{name}, drawn": drawn})
            except Exception as error:  # noqa: BLE001 -- the other rows are measured
                note("decode", {name: f"{type(error).__name__}: {error}"})


def prompts() -> None:
    """Milliseconds to the first token; each length for the first time, then again."""
    sizes = [(1, 256), (1, 1024), (1, 4096), (8, 256), (32, 256)]
    if TINY:
        sizes = [(1, 16), (3, 16)]
    for kind in ("paged", "slots", "paged, not captured"):
        with engine(SHAPE, kind, slots=max(rows for rows, _ in sizes)) as opened:
            for rows, length in sizes:
                name = f"prompt {length}" if rows == 1 else f"prompts {rows}x{length}"
                first, _ = generate(opened, rows, length, 1, 0)
                later = medians(opened, rows, length, 1)["prompt"]
                other, _ = generate(opened, rows, length + 3, 1, 99)
                note(
                    "prompts", {f"{name}, {kind}": later | {"first": first, "first of another length": other}}
                )


def serve() -> None:
    """Load `carryall serve` for a minute; every stream must end with its tokens."""
    seconds, streams, port = (5, 2, 18423) if TINY else (60, 32, 18423)
    command = [
        sys.executable,
        "-m",
        "carryall",
        "serve",
        "demo",
        "--provider",
        "cuda",
        "--http-port",
        str(port),
    ]
    with subprocess.Popen([*command, "--max-slots", str(streams)], stdout=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/v1/completions", server)
            until, done, faults = time.monotonic() + seconds, list[float](), list[str]()

            def client(number: int) -> None:
                body = {"model": "demo", "prompt": "def f(x):", "max_tokens": 32, "temperature": 0.8}
                while time.monotonic() < until:
                    begun = time.monotonic()
                    try:
                        found = _post(
                            f"{address}/v1/completions", body | {"seed": number, "ignore_eos": True}
                        )
                        if found["usage"]["completion_tokens"] != 32:
                            faults.append(f"{found['usage']}")
                        done.append(time.monotonic() - begun)
                    except urllib.error.HTTPError as error:
                        faults.append(f"{error}: {error.read().decode()[:300]}")
                    except Exception as error:  # noqa: BLE001 -- counted
                        faults.append(f"{type(error).__name__}: {error}")

            clients = [threading.Thread(target=client, args=(number,)) for number in range(streams)]
            for one in clients:
                one.start()
            for one in clients:
                one.join()
            figures: Figures = {"requests": len(done), "faults": len(faults), "first fault": faults[:1]}
            if done:
                figures |= {"tokens/s": 32 * len(done) / seconds, "median seconds": statistics.median(done)}
            note("serve", figures)
        finally:
            server.terminate()


def values() -> None:
    """The checks of `doctor --selftest`: families and forms, one with states, a tower, each option."""
    from carryall.runtime.tasks.selftest import selftest_provider

    found = selftest_provider("cuda", time_limit=8 if TINY else 45)
    states: Figures = {}
    for check in found.checks:
        states.setdefault(check.status, []).append(f"{check.area} {check.name}")
        if check.status in ("failed", "refused"):
            note("values", {f"{check.area} {check.name}": f"{check.status}: {check.detail} {check.figures}"})
    note("values", {status: len(names) for status, names in states.items()})


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(400):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            _post(address, {"model": "demo", "prompt": "x", "max_tokens": 1})
            return
        except OSError:  # it loads the model
            time.sleep(0.1)
    raise RuntimeError("the server does not answer")


def _post(address: str, body: Figures) -> Any:
    content, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(address, content, kind)  # noqa: S310 -- our own server
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def ceilings() -> None:
    """What the device can do at most: copies, products, launches. Needs torch."""
    import torch

    device = torch.device("cuda")
    note("ceilings", {"device": torch.cuda.get_device_name(), "torch": torch.__version__})

    def timed(work: Callable[[], Any], count: int) -> float:
        work()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    big = torch.empty(2**30, dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    note("ceilings", {"copy TB/s": 2 * big.numel() / timed(lambda: other.copy_(big), 10) / 1e12})
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    note("ceilings", {"bf16 TFLOP/s": 2 * 8192**3 / timed(lambda: left @ left, 10) / 1e12})
    target = torch.empty(65536, dtype=torch.uint8, device=device)
    for name, host in (("pageable", torch.empty(65536, dtype=torch.uint8)),):
        pinned = host.pin_memory()
        for kind, source in ((name, host), ("pinned", pinned)):
            note("ceilings", {f"64 KB {kind} us": 1e6 * timed(lambda s=source: target.copy_(s), 200)})
    one = torch.zeros(1, device=device)
    note("ceilings", {"launch us": 1e6 * timed(lambda: one.add_(1), 2000)})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_(1)
    note("ceilings", {"graph launch us": 1e6 * timed(graph.replay, 500)})


def options() -> None:
    """Settings of onnxruntime beside the defaults: cuDNN, tuned products, int4 products of CUTLASS."""
    from carryall.providers.targets.cuda import CudaProvider

    defaults, entries = CudaProvider.provider_options, CudaProvider.session_entries
    changes: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
        "defaults": ({}, {}, ""),
        "without cuDNN": ({"enable_cudnn": "0"}, {}, ""),
        "gemm_auto_tune": ({}, {"ep.cuda.enable_gemm_auto_tune": "1"}, ""),
        "int4": ({}, {}, INT4),
        "int4, fpa_intb_gemm": ({}, {"ep.cuda.fpa_intb_gemm": "1"}, INT4),
    }
    batches, length = ((1, 2), 16) if TINY else ((1, 32), 256)
    for name, (own, keys, weights) in changes.items():
        CudaProvider.provider_options = lambda self, o, own=own, **g: defaults(self, o, **g) | own  # type: ignore[method-assign]
        CudaProvider.session_entries = lambda self, o, keys=keys: entries(self, o) | keys  # type: ignore[method-assign]
        for batch in batches:
            try:
                with engine(SHAPE, "paged", slots=batch, weights=weights) as opened:
                    generate(opened, batch, length, TOKENS, 0)
                    found: Any = medians(opened, batch, length, TOKENS)["step"]
            except Exception as error:  # noqa: BLE001 -- the other settings are measured
                found = f"{type(error).__name__}: {error}"
            note("options", {f"b{batch}, {name}": found})


def genai() -> None:
    """The same shape in onnxruntime-genai, by default and with CUDA graphs. Needs onnxruntime-genai-cuda."""
    import onnxruntime_genai as og

    folder = OUT / "genai"
    if not folder.is_dir():
        checkpoint = OUT / "checkpoint"
        write_checkpoint(checkpoint)
        build = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(checkpoint),
            "-o",
            str(folder),
        ]
        subprocess.run([*build, "-p", "fp16", "-e", "cuda"], check=True)
    for graphs in ("0", "1"):
        config = og.Config(str(folder))
        config.set_provider_option("cuda", "enable_cuda_graph", graphs)
        model = og.Model(config)
        for rows, length in ((1, 256), (8, 256), (32, 256), (1, 1024), (1, 4096)):
            _genai_run(og, model, rows, length)
            pairs = [_genai_run(og, model, rows, length) for _ in range(REPEATS)]
            name = f"{rows}x{length}, graphs {graphs}"
            note("genai", {f"prompt {name}": statistics.median(pair[0] for pair in pairs)})
            note("genai", {f"step {name}": statistics.median(pair[1] for pair in pairs)})


def _genai_run(og: Any, model: Any, rows: int, length: int) -> tuple[float, float]:
    """Generate for equal prompts; return ms until they have a token, and ms of each step after it."""
    import numpy as np

    params = og.GeneratorParams(model)
    total = length + TOKENS
    params.set_search_options(do_sample=False, max_length=total, min_length=total, batch_size=rows)
    generator = og.Generator(model, params)
    ids = np.random.default_rng(0).integers(2, 150000, (rows, length)).astype(np.int32)
    begun = time.perf_counter()
    generator.append_tokens(ids if rows > 1 else ids[0])
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(TOKENS - 1):
        generator.generate_next_token()
    return (first - begun) * 1e3, (time.perf_counter() - first) * 1e3 / (TOKENS - 1)


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint of random weights with the tokenizer of the demo model, for other engines."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from carryall.exporter.demo import demo_path

    rope = {name: value for name, value in SHAPE.items() if name != "rope_parameters"}
    config = Qwen3Config(**rope, torch_dtype="float16")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_path() / name).read_bytes())


def transformers() -> None:
    """The same shape in transformers with torch.compile and a static cache. Needs torch and transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {name: value for name, value in SHAPE.items() if name != "rope_parameters"}
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).half().cuda().eval()
    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    for rows, length in ((1, 256), (32, 256)):
        ids = torch.randint(2, SHAPE["vocab_size"], (rows, length), device="cuda")
        named: Figures = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
        times = {}
        for count in (1, TOKENS + 1):
            for _ in range(3):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                model.generate(ids, min_new_tokens=count, max_new_tokens=count, **named)
                torch.cuda.synchronize()
                times[count] = (time.perf_counter() - begun) * 1e3
        note("transformers", {f"step {rows}x{length}": (times[TOKENS + 1] - times[1]) / TOKENS})
        note("transformers", {f"prompt {rows}x{length}": times[1]})


def big() -> None:
    """Four layers of an 8 B shape: times of a step and of a long prompt, to scale by the layers."""
    length = 16 if TINY else 256
    with engine(BIG, "paged", slots=1) as opened:
        generate(opened, 1, length, TOKENS, 0)
        step = medians(opened, 1, length, TOKENS)["step"]
        prompt = medians(opened, 1, 16 if TINY else 4096, 1)["prompt"]
    note("big", {"step b1": step, "prompt 4096": prompt})


def count() -> None:
    """Launches, copies and bytes of a step, and the host's time for it, over the stub of CUDA in tests/kits.

    The stub's kernels take no time, so the time is the host's: carryall's, onnxruntime's and the stub's own
    for its log, which it writes line by line.
    """
    log = Path(os.environ["CUDA_STUB_LOG"])
    rows = [(1, 256, ""), (8, 256, ""), (32, 256, ""), (32, 256, INT4), (32, 256, MINIMA)]
    sizes = [(1, 256), (1, 1024), (1, 4096), (8, 256), (32, 256)]
    if TINY:
        rows, sizes = [(1, 16, ""), (3, 16, ""), (3, 16, MINIMA)], [(1, 16), (3, 16)]
    sizes = [(batch, length) for batch, length in sizes if length < CONTEXT]
    for weights in dict.fromkeys(weights for _, _, weights in rows):
        for kind in ("slots", "paged, one step", "paged", "paged, onnxruntime's kernels"):
            slots = max(batch for batch, _, _ in rows)
            with engine(NARROW, kind, slots=slots, weights=weights) as opened:
                # The stub's kernels draw no tokens, so these are any numbers.
                runner = opened.runner.runner
                runner.info = dataclasses.replace(runner.info, num_tokens=None)
                for batch, length, own in rows:
                    if own == weights:
                        name = f"step b{batch}{weights}, {kind}"
                        note("count", {name: _counted(opened, batch, length, log, steps=4)})
                for batch, length in [] if weights else sizes:
                    name = f"prompt {length}" if batch == 1 else f"prompts {batch}x{length}"
                    note("count", {f"{name}, {kind}": _counted(opened, batch, length, log, steps=0)})


def _counted(opened: Any, batch: int, length: int, log: Path, *, steps: int) -> Figures:
    """Return what the log says of the prompts of a batch, or of one step after them."""
    for seed in (0, 1):  # what is captured and allocated once
        generate(opened, batch, length, steps + 2, seed)
    requests = [request(f"c{i}", length, steps + 2, 500 + i) for i in range(batch)]
    for one in requests:
        opened.add(one)
    while steps and not all(one.output_token_ids for one in requests):
        opened.step()
    place, begun, taken = log.stat().st_size, time.perf_counter(), 0
    while taken < steps or (not steps and not all(one.output_token_ids for one in requests)):
        opened.step()
        taken += 1
    seconds = time.perf_counter() - begun
    with log.open() as file:
        file.seek(place)
        lines = [line.split() for line in file.read().splitlines()]
    while opened.has_work:
        opened.step()
    share = max(1, steps)
    copies = [line for line in lines if line[0] == "copy" and line[-1] != "captured"]
    found: Figures = {
        "steps": taken,
        "launches": sum(line[0] == "kernel" and line[-1] != "captured" for line in lines) / share,
        "replays": sum(line[0] == "replay" for line in lines) / share,
        "kernels of replays": sum(int(line[2]) for line in lines if line[0] == "replay") / share,
        "host ms": round(1e3 * seconds / share, 3),
    }
    for way in ("upload", "download", "on-device"):
        sizes = [int(line[2]) for line in copies if line[1] == way]
        found |= {f"{way}s": len(sizes) / share, f"{way} bytes": sum(sizes) / share}
    return found


SECTIONS: dict[str, Callable[[], None]] = {
    "smoke": smoke,
    "correct": correct,
    "decode": decode,
    "prompts": prompts,
    "serve": serve,
    "values": values,
    "ceilings": ceilings,
    "options": options,
    "genai": genai,
    "transformers": transformers,
    "big": big,
    "count": count,
}


def assemble(parts: Path) -> Path:
    """Check and unpack the parts; return the folder for PYTHONPATH.

    Raises:
        ValueError: a part is missing or damaged.
    """
    manifest = json.loads((parts / "manifest.json").read_text())
    content = bytearray()
    for part in manifest["parts"]:
        path = parts / part["name"]
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise ValueError(f"{path} is {'damaged' if data else 'missing'}; copy it again")
        content += data
    with tarfile.open(fileobj=io.BytesIO(bytes(content)), mode="r:gz") as archive:
        archive.extractall(parts, filter="data")
    return parts / "site"


def run_section(name: str, environment: dict[str, str], box: float) -> str:
    """Run a section in a process within its time box; return how it ended."""
    begun = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name]
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=box,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        ended = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            note(name, {"ended": ended, "output": lines[-8:]})
            ended += f": {lines[-1] if lines else ''}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after {box:.0f} s"
        note(name, {"ended": ended})
    return f"{ended} ({time.monotonic() - begun:.1f} s)"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table: milliseconds."""

    name: str
    figures: tuple[float | None, ...]

    def __str__(self) -> str:
        """Return the columns."""
        return f"{self.name:24s}" + "".join("       -  " if x is None else f"{x:10.2f}" for x in self.figures)


def table() -> str:
    """Return predictions and measurements side by side: S1 is one step at a time, S2 one step in flight."""
    measured: Figures = {}
    for name in ("decode", "prompts"):
        path = OUT / f"{name}.json"
        measured |= json.loads(path.read_text()) if path.is_file() else {}
    path = OUT / "genai.json"
    other: Figures = json.loads(path.read_text()) if path.is_file() else {}
    heading = ("genai then", "S1", "S2", "slots", "S1 now", "S2 now", "now/S2", "genai now", "genai/S2")
    lines = [f"{'ms':24s}" + "".join(f"{word:>10s}"[-12:] for word in heading)]
    for name, predicted in PREDICTED.items():

        def found(kind: str, name: str = name) -> float | None:
            entry = measured.get(f"{name}, {kind}")
            return entry["median"] if isinstance(entry, dict) else None

        paged, peer = found("paged"), other.get(_peer(name))
        ratios = (None if paged is None else paged / predicted[2]), (peer / paged if peer and paged else None)
        figures = (*predicted, found("slots"), found("paged, one step"), paged, ratios[0], peer, ratios[1])
        lines.append(str(Line(name, figures)))
    rest = [f"{name:40s} {json.dumps(value)}" for name, value in measured.items()]
    return "\n".join([*lines, "", _default_lost(measured), *rest])


def _default_lost(measured: Figures) -> str:
    """Return in which rows blocks, the default, take longer than slots by more than 3 %."""
    medians = {name: value["median"] for name, value in measured.items() if isinstance(value, dict)}
    pairs = {
        name: (medians[name], medians[slots])
        for name in medians
        if (slots := name.replace(", paged", ", slots")) != name and slots in medians
    }
    lost = [f"{name} {a:.2f}, slots {b:.2f}" for name, (a, b) in pairs.items() if a > 1.03 * b]
    return f"slower with blocks than with slots: {len(lost)} of {len(pairs)} rows. {'; '.join(lost)}"


def _peer(name: str) -> str:
    """Return the name of a row of the table in the figures of onnxruntime-genai."""
    if name.startswith("step b"):
        return f"step {name.split()[1][1:]}x256, graphs 0" if "int4" not in name else ""
    size = name.split()[1]
    return f"prompt {size if 'x' in size else f'1x{size}'}, graphs 0"


def main() -> int:
    """Run the chosen sections and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", type=Path, help="folder with the parts of make_kit.py")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS)[:-1])
    parser.add_argument("--seconds", type=float, default=540, help="of all sections together")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a rehearsal")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.section:
        SECTIONS[chosen.section]()
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    site = [] if chosen.parts is None else [str(assemble(chosen.parts))]
    paths = [*site, str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "GPU_KIT_OUT": str(chosen.out.resolve())}
    own |= {"GPU_KIT_TINY": "1"} if chosen.tiny or TINY else {}
    own.setdefault("CARRYALL_CACHE", os.environ.get("CARRYALL_CACHE", str(chosen.out.resolve() / "cache")))
    environment, ends = {**os.environ, **own}, time.monotonic() + chosen.seconds
    globals()["OUT"] = chosen.out
    for name in (section for section in SECTIONS if section in chosen.only):
        left = ends - time.monotonic()
        if left < 5:
            print(f"{name}: no time left", flush=True)
            continue
        ended = run_section(name, environment, min(BOXES[name], left))
        print(f"{name}: {ended}", flush=True)
        if name == "smoke" and not ended.startswith("done"):
            print("The provider does not run here, so nothing else was measured.", flush=True)
            return 1
    text = table()
    (chosen.out / "table.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
