"""What runs over the stub of CUDA, in a process of its own: ``python cuda_scenarios.py NAME ARGUMENTS``.

The last line of the output is JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from device_stand_ins import threaded
from engine_kit import make_request
from engine_kit import run as run_engine
from lowered_forms import CONTEXT, decoder
from tiny_models import write_tiny
from tiny_vlms import write_vlm

import carryall
from carryall import LLM, SamplingParams
from carryall.errors import CarryallError
from carryall.graph_opt.graph.load import read_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline import pipeline
from carryall.providers import placement
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.cuda.paged_agreement import PagedAgreement
from carryall.providers.host import libraries, nvidia, selftest_checks
from carryall.providers.host.nvidia_provider import NvidiaProvider
from carryall.providers.ort import ort
from carryall.providers.targets import cpu, cuda
from carryall.providers.targets.cuda import CudaProvider, uncapturable
from carryall.runtime.engine.engine import Engine
from carryall.runtime.models import fastest
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.lowering import image_inputs
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.tasks.random_model import random_model
from carryall.runtime.tasks.selftest_models import LARGE, in_form, tower
from carryall.runtime.tasks.selftest_models import decoder as portable

SLOTS = 4


def tokens(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(1, 250, count)


def lowered(
    folder: Path, family: str, form: str, *, context: int = CONTEXT, **options: Any
) -> tuple[Path, RunnerConfig]:
    """Write a model lowered for CUDA."""
    config = RunnerConfig(max_slots=SLOTS, context_length=context, options=options)
    model, _ = pipeline.run(decoder(family, form, folder), CudaProvider().passes(config))
    place = folder / "-".join([family, form, *map(str, options.values())])
    place.mkdir()
    save_model(model, place / "model.onnx")
    return place / "model.onnx", config


def drive(runner: Any) -> None:
    """Run prompts, captured and replayed decode steps, copies of slots, the best logits, joint prompts."""
    runner.forward([Row(0, tokens(9), 0)])
    runner.forward([Row(1, tokens(17), 0, num_logits=2)])
    for step in range(4):
        runner.forward([Row(0, tokens(1), 9 + step), Row(1, tokens(1), 17 + step)])
    runner.forward([Row(0, tokens(4), 13)])
    runner.copy_prefix(0, 2, 6)
    runner.forward([Row(2, tokens(1), 6)])
    runner.forward([Row(2, tokens(1), 7), Row(3, tokens(40), 0)])
    for step in range(4):
        starts = (17, 21, 8, 40)
        runner.forward([Row(slot, tokens(1), start + step) for slot, start in enumerate(starts)])
    if runner.info.top_logits:
        (best,) = runner.forward_best([Row(0, tokens(1), 21, best_suffice=True)])
        best.whole()
    runner.release(0)
    runner.release(1)
    runner.forward([Row(0, tokens(5), 0), Row(1, tokens(7), 0)])  # one run for both


def forms(folder: Path, family: str, *chosen: str) -> list[dict[str, Any]]:
    """Open and drive one family in some forms; return where its nodes were placed, and how it ran.

    Mixtures that are not fused split by numbers that a kernel computed. The stub computes none, so they are
    opened only.
    """
    found = []
    for entry in chosen:
        form, *pairs = entry.split(",")
        options: dict[str, Any] = {
            name: json.loads(value) if value in ("true", "false") else value
            for name, value in (pair.split("=") for pair in pairs)
        }
        model, config = lowered(folder, family, form, **options)
        sessions: list[Any] = []
        with _spied(sessions):
            runner = CudaProvider().runner(model, config)
        driven = uncapturable(read_model(model).graph) is None
        before = _replays()
        if driven:
            drive(runner)
        placed = placement.placed_nodes(sessions[0]) or {}
        nodes = {name: [str(node) for node in nodes] for name, nodes in placed.items()}
        found.append({"placed": nodes, "driven": driven, "replays": _replays() - before})
        runner.close()
    return found


def threads(folder: Path) -> None:
    """Let one thread open models and capture their steps, while others do the same and run prompts."""
    model, config = lowered(folder, "llama", "float")
    other, other_config = lowered(folder, "qwen3", "int4")
    ended, faults = threading.Event(), []

    def prompts() -> None:
        try:
            while not ended.is_set():
                runner = CudaProvider().runner(other, other_config)
                for size in range(1, CONTEXT, 5):
                    runner.forward([Row(0, tokens(size), 0)])
                runner.close()
        except Exception as error:  # noqa: BLE001 - the parent judges it
            faults.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=prompts) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(6):
            runner = CudaProvider().runner(model, config)
            drive(runner)
            runner.close()
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    if faults:
        raise RuntimeError("; ".join(faults))


def foreign_thread(folder: Path) -> list[Any]:
    """Let another library's thread allocate while a step is captured; return what became of requests."""
    model, config = lowered(folder, "llama", "float")
    engine = Engine(CudaProvider().runner(model, config))
    ended = threading.Event()

    def allocate() -> None:
        address = ctypes.c_void_p()
        while not ended.is_set():
            if _stub().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(64)) == 0:
                _stub().cudaFree(address)

    worker = threading.Thread(target=allocate)
    worker.start()
    spoiled = make_request("spoiled", [1, 2, 3])
    run_engine(engine, [spoiled])
    ended.set()
    worker.join()
    later = make_request("later", [1, 2, 3])
    run_engine(engine, [later])
    engine.close()
    return [spoiled.finish_reason, str(spoiled.error), later.finish_reason]


def copies(folder: Path) -> list[bool]:
    """Write numbers into a slot's memory; return whether its copy has them, and whether others lack them."""
    model, config = lowered(folder, "llama", "float")
    runner = CudaProvider().runner(model, config)
    runner.forward([Row(0, tokens(6), 0)])
    memory, buffers = threaded(runner)._kv, []
    for name, spec in memory._specs.items():
        size = memory.length * spec.bytes_per_token
        address = _stub().stub_reachable(ctypes.c_void_p(memory._caches[name][0].data_ptr()))
        buffers.append(np.ctypeslib.as_array((ctypes.c_uint8 * (size * SLOTS)).from_address(address)))
    for index, buffer in enumerate(buffers):
        slots = buffer.reshape(SLOTS, -1)
        slots[0] = np.random.default_rng(index).integers(1, 255, slots.shape[1])
    runner.copy_prefix(0, 2, 6)
    found = [buffer.reshape(SLOTS, -1) for buffer in buffers]
    same = all(np.array_equal(slots[0], slots[2]) for slots in found)
    return [same, not any(slots[[1, 3]].any() for slots in found)]


def memory_at_load(folder: Path) -> dict[str, Any]:
    """Open models with ever less memory; return the slots or the error of each. Then drive one."""
    model, config = lowered(folder, "llama", "float")
    many = dataclasses.replace(config, max_slots=2000)
    found: dict[str, Any] = {}
    for kilobytes in (200_000, 120_000, 90_000, 60_000, 1000):
        _stub().stub_memory(ctypes.c_size_t(kilobytes << 10))
        try:
            runner = CudaProvider().runner(model, many)
        except CarryallError as error:
            found[str(kilobytes)] = f"{type(error).__name__}: {error}"
        else:
            found[str(kilobytes)] = runner.info.max_slots
            runner.close()
    _stub().stub_memory(ctypes.c_size_t(1 << 30))
    runner = CudaProvider().runner(model, config)
    drive(runner)
    runner.close()
    return found


def memory_of_caches(folder: Path) -> list[int]:
    """Use and close a model with slots of many tokens; return bytes of its KV, held more while open, left."""
    model, config = lowered(folder, "llama", "float")
    CudaProvider().runner(model, config).close()  # what a first use allocates for good
    before = _used(0)
    runner: Any = CudaProvider().runner(model, dataclasses.replace(config, max_slots=2000))
    size = runner.info.max_slots * runner.info.context_length * runner.info.kv_bytes_per_token
    runner.forward([Row(0, tokens(6), 0)])
    held = _used(0) - before
    runner.close()
    return [size, held, _used(0) - before]


def memory_in_a_step(folder: Path) -> list[Any]:
    """Let the memory end before a prompt; return what became of requests during and after the shortage."""
    model, config = lowered(folder, "llama", "float")
    engine = Engine(CudaProvider().runner(model, config))
    _stub().stub_memory(ctypes.c_size_t(1))
    short = make_request("short", [1, 2, 3] * 12)
    run_engine(engine, [short])
    _stub().stub_memory(ctypes.c_size_t(1 << 30))
    later = make_request("later", [1, 2, 3] * 12)
    run_engine(engine, [later])
    engine.close()
    return [short.finish_reason, str(short.error), later.finish_reason]


def lost(folder: Path) -> list[Any]:
    """Lose the device in the middle of a step; return the reasons of the requests, and of a later one."""
    model, config = lowered(folder, "llama", "int4")
    engine = Engine(CudaProvider().runner(model, config))
    requests = [make_request(f"r{index}", [1, 2, 3 + index]) for index in range(3)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    _stub().stub_lose_after(ctypes.c_long(20))
    run_engine(engine, [])
    later = make_request("later", [4, 5])
    run_engine(engine, [later])
    engine.close()
    return [[request.finish_reason, str(request.error)] for request in (*requests, later)]


def two_devices(folder: Path) -> list[Any]:
    """Drive a runner on each of two devices in turns; return the memory that each device holds meanwhile."""
    model, _ = lowered(folder, "llama", "int4")
    runners = []
    for device in (0, 1):
        mine = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, options={"device": device})
        runners.append(CudaProvider().runner(model, mine))
    for step in range(6):
        for runner in runners:
            runner.forward([Row(0, tokens(1), step)])
    held = [_used(0), _used(1)]
    for runner in runners:
        drive(runner)
        runner.close()
    try:
        CudaProvider().runner(model, RunnerConfig(max_slots=1, context_length=8, options={"device": 2}))
    except CarryallError as error:
        return [held, str(error)]
    return [held, "opened"]


def callers_by_turns(folder: Path) -> list[Any]:
    """Let four threads step one LLM in turns; return the tokens, and the captures after each thread.

    The second one is the first whose prompts are in the prefix cache, and so has forms that are new.
    """
    llm = LLM("demo", provider="cuda", max_slots=SLOTS, context_length=CONTEXT)
    texts, captures = [], []

    def ask() -> None:
        for count in (1, 2, 4):
            found = llm.generate(["Once upon a time"] * count, SamplingParams(max_tokens=6, ignore_eos=True))
            texts.append([output.outputs[0].token_ids for output in found])
        captures.append(_logged("begin"))

    for _ in range(3):
        worker = threading.Thread(target=ask)
        worker.start()
        worker.join()
    ask()
    llm.close()
    return [texts, captures]


def ahead(folder: Path) -> list[str]:
    """Run one request on a paged runner; return the replays, copies and waits of its last steps."""
    model, config = lowered(folder, "qwen3", "float", kv_memory="paged")
    runner = CudaProvider().runner(model, config)
    inner = threaded(runner)
    inner.info = dataclasses.replace(inner.info, num_tokens=None)  # the stub's kernels draw no tokens
    engine = Engine(runner)
    request = make_request("r", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    engine.add(request)
    while len(request.output_token_ids) < 15:
        engine.step()
    place = os.stat(os.environ["CUDA_STUB_LOG"]).st_size
    while len(request.output_token_ids) < 25:
        engine.step()
    with open(os.environ["CUDA_STUB_LOG"]) as log:
        log.seek(place)
        found = [" ".join(line.split()[:2]) for line in log]
    run_engine(engine, [])
    engine.close()
    return found


def moves(folder: Path, form: str, kv_cache: str) -> dict[str, Any]:
    """Write random KV into slots of a paged runner, and read it; return what the calls were."""
    model, config = lowered(folder, "qwen3", form, context=192, kv_memory="paged", kv_cache=kv_cache)
    runner, rng = CudaProvider().runner(model, config), np.random.default_rng(1)
    runner.forward([Row(0, tokens(128), 0)])
    chunks = [
        [rng.integers(0, 256, part.shape, np.uint8) for part in runner.read_kv(0, start, 64)]
        for start in (0, 64)
    ]
    for slot in (1, 2):
        for start, parts in ((0, chunks[slot - 1]), (64, chunks[2 - slot])):
            runner.write_kv(slot, start, 64, parts)
    runner.copy_prefix(1, 3, 64)
    runner.write_kv(3, 64, 64, chunks[0])  # into a copy of the block of slot 1
    found: dict[str, Any] = {"bytes": sum(part.nbytes for part in chunks[0])}
    expected = {1: (0, 1), 2: (1, 0), 3: (0, 0)}
    found["equal"] = all(
        np.array_equal(part, other)
        for slot, order in expected.items()
        for start, number in zip((0, 64), order, strict=True)
        for part, other in zip(runner.read_kv(slot, start, 64), chunks[number], strict=True)
    )
    for name, call in (
        ("read", lambda: runner.read_kv(1, 64, 64)),
        ("written", lambda: runner.write_kv(1, 64, 64, chunks[1])),
    ):
        place = os.stat(os.environ["CUDA_STUB_LOG"]).st_size
        call()
        with open(os.environ["CUDA_STUB_LOG"]) as log:
            log.seek(place)
            found[name] = [line.split() for line in log]
    runner.close()
    return found


def tower_of_a_model_that_sees(folder: Path) -> dict[str, list[str]]:
    """Open the tower of the self-test; return its operators by execution provider.

    It does not run: MultiHeadAttention in float32 asks for a handle of cuDNN, which the stub lacks.
    """
    provider = CudaProvider()
    graph = tower()
    lowered_tower, _ = pipeline.run(graph, provider.tower_passes(RunnerConfig(), graph))
    save_model(lowered_tower, folder / "model.onnx")
    return _operators(provider.session(folder / "model.onnx", RunnerConfig()))


def hybrid(folder: Path) -> dict[str, Any]:
    """Drive a model with recurrent states; return where its nodes lie, and a step's copies and launches."""
    provider, config = CudaProvider(), RunnerConfig(max_slots=SLOTS, context_length=CONTEXT)
    passes = provider.explicit_passes(config)
    assert passes is not None
    save_model(pipeline.run(portable("lfm2", "float"), passes)[0], folder / "model.onnx")
    sessions: list[Any] = []
    with _spied(sessions):
        runner = provider.runner(folder / "model.onnx", config)
    selftest_checks.drive(runner)
    runner.forward([Row(2, tokens(9), 0)])
    with _logged_lines() as lines:
        runner.forward([Row(2, tokens(1), 9)])
    runner.close()
    return {
        "placed": _operators(sessions[0]),
        "copies": [words[1:3] for words in lines if words[0] == "copy"],
        "launches": sum(words[0] == "kernel" for words in lines),
    }


def pictures(folder: Path) -> dict[str, Any]:
    """Run a prompt with a picture and steps on a paged runner; return where nodes lie, and the replays."""
    carryall.export(write_vlm(folder / "checkpoint", "qwen3_vl"), folder / "package")
    config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, options={"kv_memory": "paged"})
    source = resolve_model(folder / "package")
    save_model(lower(source, CudaProvider(), config, [image_inputs()]), folder / "model.onnx")
    sessions: list[Any] = []
    with _spied(sessions):
        runner = CudaProvider().runner(folder / "model.onnx", config)
    states = np.ones((4, runner.info.image_width), np.float32)
    rows = np.array([-1, 0, 1, 2, 3])
    before = _replays()
    runner.forward([Row(0, tokens(9), 0, image_states=states, image_rows=rows)])
    found: dict[str, Any] = {"prompt": _replays() - before}
    for step in range(3):
        runner.forward([Row(0, tokens(1), 9 + step)])
    found["steps"] = _replays() - before
    placed = placement.placed_nodes(sessions[0]) or {}
    found["placed"] = {
        name: sorted({str(node).split()[0] for node in nodes}) for name, nodes in placed.items()
    }
    runner.close()
    return found


def own_kernels(folder: Path, family: str, form: str) -> dict[str, Any]:
    """Decode with onnxruntime's and with carryall's kernels.

    Returns:
        For each: launches of a step's replay, and carryall's kernels by name of steps and a prompt, and of a
        3 prompts of 50 tokens.
    """
    found: dict[str, Any] = {}
    for chosen in ("onnxruntime", "carryall"):
        for memory in ("slots", "paged"):
            options = {"kernels": chosen, "kv_memory": memory}
            provider = CudaProvider()
            config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, options=options)
            config = provider.resolve_options(config)
            model, _ = lowered(folder, family, form, **config.options)
            with _logged_lines() as lines:
                runner = provider.runner(model, config)  # captures paged steps
                runner.forward_best([Row(0, tokens(9), 0, best_suffice=True)])
                for step in range(3):
                    runner.forward_best([Row(0, tokens(1), 9 + step, best_suffice=True)])
            replays = [int(words[2]) for words in lines if words[0] == "replay"]
            with _logged_lines() as later:
                runner.forward([Row(slot, tokens(50), 0) for slot in range(1, SLOTS)])
            found[f"{chosen} {memory}"] = [replays[-1], _own(lines), _own(later)]
            runner.close()
    return found


@contextlib.contextmanager
def _logged_lines() -> Iterator[list[list[str]]]:
    """Yield a list that has the words of the log's new lines afterwards."""
    place = os.stat(os.environ["CUDA_STUB_LOG"]).st_size
    lines: list[list[str]] = []
    yield lines
    with open(os.environ["CUDA_STUB_LOG"]) as log:
        log.seek(place)
        lines += [line.split() for line in log]


def _own(lines: list[list[str]]) -> list[str]:
    """Return the names of carryall's kernels among the lines of a log."""
    return sorted({words[2] for words in lines if words[0] == "kernel" and words[2].islower()})


def few_forms(folder: Path) -> list[int]:
    """Let a paged runner run more forms than it may capture; return captures, those freed, freed after it."""
    cuda._MOST_FORMS = 4
    model, config = lowered(folder, "qwen3", "float", kv_memory="paged")
    runner = CudaProvider().runner(model, config)
    for turn in range(2):
        for size in (5, 30, 40):
            runner.forward([Row(0, tokens(size), 0)])
            runner.forward([Row(0, tokens(1), size), Row(1, tokens(1), turn)])
    found = [_logged("begin"), _logged("forget")]
    runner.close()
    return [*found, _logged("forget")]


def paged_operator(folder: Path, options: str) -> dict[str, Any]:
    """Run all steps of the check of PagedAttention; return where its operators lie, and what it says here."""
    provider, sessions = CudaProvider(), list[Any]()
    check, device = (
        provider._paged_agreement(provider.checked_options(json.loads(options))),
        provider.device(0),
    )
    opened = functools.partial(provider._small_session, 0, kernels="onnxruntime")
    with _spied(sessions):
        complaint = check.on_device(opened, device)  # type: ignore[attr-defined]
    steps = [[step, past, len(results)] for step, past, results in check.steps(sessions[0], device)]
    return {"placed": list(map(_operators, sessions)), "steps": steps, "complaint": complaint}


def default_memory(folder: Path) -> dict[str, Any]:
    """Load models with default options, also as new processes would; return their KV, and what was said.

    The first one has heads of 64, the last one of 320.
    """
    checks, said, found = list[str](), list[str](), list[list[str]]()
    patched = PagedAgreement.complaint

    def counted(check: PagedAgreement, open_session: Any, device: Any) -> str | None:
        checks.append(check.compute)
        return patched(check, open_session, device)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("carryall").addHandler(handler)
    PagedAgreement.complaint = counted  # type: ignore[method-assign, assignment]
    sizes: dict[str, Any] = {"max_position_embeddings": CONTEXT, "num_hidden_layers": 2}
    for name, head in (("small", 64), ("wide", 320)):
        write_tiny("llama", folder / name, head_dim=head, **sizes)
    loads: list[tuple[str, dict[str, Any]]] = [
        ("small", {}),
        ("small", {}),
        ("small", {"kv_cache": "float32"}),
    ]
    for name, options in [*loads, ("small", {"kv_memory": "slots"}), ("wide", {})]:
        said.clear()
        loaded = load_model(folder / name, provider="cuda", max_slots=2, provider_options=options)
        runner = loaded.runner
        runner.forward([Row(0, tokens(9), 0)])
        runner.forward([Row(0, tokens(1), 9)])
        found.append([type(threaded(runner)).__name__, *said])
        loaded.close()
        CudaProvider._paged_complaints.clear()  # as in a new process
    return {"found": found, "checks": checks}


def fraction_of_memory(folder: Path) -> list[list[float]]:
    """Open default models that want more KV than there is; return the share asked for, and what they take.

    Of the memory that is free when the weights are loaded: when the model is open, and after some steps.
    """
    shares, free_memory, seen = list[list[float]](), CudaProvider.free_memory, list[int]()

    def spied(provider: NvidiaProvider, options: Mapping[str, Any]) -> int:
        seen.append(free_memory(provider, options))
        return seen[-1]

    CudaProvider.free_memory = spied  # type: ignore[method-assign, assignment]
    for fraction in (0.9, 0.5, 0.25):
        _stub().stub_memory(ctypes.c_size_t(_used(0) + (400 << 20)))
        options = {"memory_fraction": fraction}
        loaded = load_model("demo", provider="cuda", max_slots=200, provider_options=options)
        taken = [seen[-1] - nvidia.memory(0)[0]]
        loaded.runner.forward([Row(slot, tokens(9), 0) for slot in range(4)])
        loaded.runner.forward([Row(slot, tokens(1), 9) for slot in range(4)])
        taken.append(seen[-1] - nvidia.memory(0)[0])
        shares.append([fraction, *(size / seen[-1] for size in taken)])
        loaded.close()
    return shares


def two_models(folder: Path, megabytes: str) -> dict[str, Any]:
    """Let two models share a device that has little memory left for their steps, and a third be opened.

    Args:
        folder: scratch.
        megabytes: what the device has beside what both models hold after a short prompt.

    Returns:
        How requests of both ended, prompts of one token and of many, and the error of the third model.
    """
    fields: dict[str, Any] = {"provider": "cuda", "max_slots": SLOTS, "context_length": 1024}
    options = {"memory_fraction": 0.4}
    _stub().stub_memory(ctypes.c_size_t(_used(0) + (200 << 20)))
    llms = [LLM("demo", **fields, provider_options=options) for _ in range(2)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for llm in llms:
        llm.generate([[1, 2, 3]], params)
    _stub().stub_memory(ctypes.c_size_t(_used(0) + int(float(megabytes) * (1 << 20))))
    ended: list[Any] = [None, None]

    def ask(index: int) -> None:
        texts = [tokens(900, seed).tolist() for seed in range(3)] + [[5]]
        found = llms[index].generate(texts, params)
        ended[index] = [[one.outputs[0].finish_reason, str(one.error)] for one in found]

    workers = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    full = _logged("full")
    try:
        third = str(LLM("demo", **fields))
    except CarryallError as error:
        third = f"{type(error).__name__}: {error}"
    _stub().stub_memory(ctypes.c_size_t(1 << 30))
    later = [llm.generate([[7]], params)[0].outputs[0].finish_reason for llm in llms]
    for llm in llms:
        llm.close()
    return {"ended": ended, "full": full, "third": third, "later": later}


def no_code(folder: Path) -> list[Any]:
    """Return why the provider is not available, and the error of opening a model."""
    model, config = lowered(folder, "llama", "float")
    try:
        CudaProvider().runner(model, config)
    except CarryallError as error:
        return [CudaProvider().available(), f"{type(error).__name__}: {error}"]
    return [CudaProvider().available(), "opened"]


def split_auto(folder: Path) -> dict[str, Any]:
    """Load a model with ``auto`` on a device with ever less memory; return the choices and the bandwidth.

    The host is slow here, so that the device gets what it holds.
    """
    nvidia._COPIED = 1 << 20
    cpu.machine.memory_bandwidth = lambda: 1e-3  # type: ignore[attr-defined]
    fastest.provider_names = lambda: ["cuda"]  # type: ignore[attr-defined]
    used = _used(0)
    with _logged_lines() as lines:
        found: dict[str, Any] = {"bandwidth": CudaProvider().memory_bandwidth({}), "left": _used(0) - used}
    found["copies"] = [words[2] for words in lines if words[:2] == ["copy", "on-device"]]
    for megabytes in (400, 16):
        _stub().stub_memory(ctypes.c_size_t(_used(0) + (megabytes << 20)))
        loaded = load_model("demo", provider="auto", max_slots=2, context_length=CONTEXT)
        runner = loaded.runner
        runner.forward([Row(0, tokens(9), 0)])
        logits = runner.forward([Row(0, tokens(1), 9)])[0].shape
        chosen = loaded.choice.provider if loaded.choice is not None else None
        found[str(megabytes)] = [chosen, loaded.provider, str(loaded.placed), logits]
        loaded.close()
    return found


def weights(folder: Path, kind: str) -> dict[str, int]:
    """Open a model of 65 million parameters; return bytes of its files, of uploads, and held by the host.

    Of the host's memory only what no file backs counts, the most at any time, and of the stub's devices none.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096, "num_attention_heads": 16}
    config = RunnerConfig(max_slots=1, context_length=64, options={"kernels": "onnxruntime"})
    portable = in_form(
        random_model({"model_type": "llama", **LARGE, **sizes, "num_key_value_heads": 4}), kind
    )
    save_model(pipeline.run(portable, CudaProvider().passes(config))[0], folder / "model.onnx")
    del portable
    ctypes.CDLL(None).malloc_trim(0)
    place = os.stat(os.environ["CUDA_STUB_LOG"]).st_size
    before, most, opened = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not opened.wait(0.002):
            most = max(most, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    runner = CudaProvider().runner(folder / "model.onnx", config)
    opened.set()
    watcher.join()
    runner.close()
    with open(os.environ["CUDA_STUB_LOG"]) as log:
        log.seek(place)
        lines = [line.split() for line in log]
    uploads = [int(words[2]) for words in lines if words[:2] == ["copy", "upload"]]
    files = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
    return {"files": files, "uploads": sum(uploads), "held": most - before}


def _anonymous() -> int:
    """Return the bytes of this process's memory that no file backs."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return 1024 * int(line.split()[1])


def _operators(session: Any) -> dict[str, list[str]]:
    """Return the operators of a session by execution provider."""
    placed = placement.placed_nodes(session) or {}
    return {name: sorted({str(node).split()[0] for node in nodes}) for name, nodes in placed.items()}


class _spied:  # noqa: N801 - a context manager
    """Collect the sessions that are opened."""

    def __init__(self, sessions: list[Any]) -> None:
        self._sessions, self._open = sessions, ort.open_session

    def __enter__(self) -> None:
        def opened(*arguments: Any, **named: Any) -> Any:
            self._sessions.append(self._open(*arguments, **named))
            return self._sessions[-1]

        ort.open_session = opened

    def __exit__(self, *_: object) -> None:
        ort.open_session = self._open


def _stub() -> ctypes.CDLL:
    library = libraries.load(f"libcudart.so.{nvidia.cuda_version()}")
    assert library is not None
    library.stub_reachable.restype = ctypes.c_void_p
    library.stub_used.restype = ctypes.c_size_t
    return library


def _replays() -> int:
    return _logged("replay")


def _logged(word: str) -> int:
    return Path(os.environ["CUDA_STUB_LOG"]).read_text().count(f"\n{word} ")


def _used(device: int) -> int:
    return int(_stub().stub_used(device))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        result = globals()[sys.argv[1]](Path(scratch), *sys.argv[2:])
    print(json.dumps(result))
