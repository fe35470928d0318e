"""The real CUDA provider of onnxruntime-gpu without a GPU, over a stub of the CUDA runtime.

Kernels compute nothing, so only the values of copies are compared.
"""

from __future__ import annotations

import re

import cuda_stub
import lowered_forms
import pytest
from lowered_forms import FAMILIES

from carryall.providers.cuda.paged_agreement import STEPS
from carryall.providers.placement import _SHAPE_OPERATORS

pytestmark = pytest.mark.slow

CUDA = "CUDAExecutionProvider"
FORMS = [
    *lowered_forms.FORMS,
    "float,compute=bf16",
    "int4,compute=bf16",
    "float,kv_memory=paged",
    "int4,kv_memory=paged",
    "int8-kv,kv_memory=paged",
    "int8-kv-tensor,kv_memory=paged,kv_cache=fp8",
    "float,kv_memory=paged,kernels=carryall",
    "int4-minima,kv_memory=paged,kernels=carryall",
    "int8-kv,kv_memory=paged,kernels=carryall",
    "int8-kv-tensor,kv_memory=paged,kv_cache=fp8,kernels=carryall",
    "float,cuda_graphs=false",
    "float,kv_memory=paged,cuda_graphs=false",
]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_form_loads_is_placed_runs_and_is_captured(family: str) -> None:
    """A read of device memory by the host would end the process, and an illegal call be in the log."""
    outcome = cuda_stub.run("forms", family, *FORMS)
    captured = 0
    for form, found in zip(FORMS, outcome.result, strict=True):
        placed, paged = found["placed"], "paged" in form
        assert placed.keys() <= {CUDA, "CPUExecutionProvider"}, form
        operators = {node.split()[0] for node in placed.get("CPUExecutionProvider", [])}
        assert operators <= _SHAPE_OPERATORS, form
        assert not any("Memcpy" in node for nodes in placed.values() for node in nodes), form
        attention = ("PagedAttention", "PagedDecode") if paged else ("GroupQueryAttention",)
        assert any(name in node for node in placed[CUDA] for name in attention), form
        # Runs of 2, 3 rows padded to 4, and 1: each is captured once, and replayed; so are paged prompts.
        captures = found["driven"] and "cuda_graphs" not in form
        assert found["replays"] >= 3 * captures, form
        assert captures or not found["replays"], form
        captured += captures
    assert outcome.illegal() == []
    assert outcome.count("begin") == outcome.count("end") >= 2 * captured


def test_one_thread_captures_while_others_open_run_copy_and_close() -> None:
    """CUDA refuses a step with error 901 if another thread's call spoils its capture.

    How many runs are captured depends on time: none is while another thread opens or frees a session.
    """
    outcome = cuda_stub.run("threads", CUDA_STUB_CAPTURE_MS="20")
    assert outcome.illegal() == []
    assert outcome.count("begin") == outcome.count("end") > 0


def test_callers_of_several_threads_capture_each_run_once() -> None:
    """onnxruntime keeps captured runs by thread, so another thread would capture them again."""
    outcome = cuda_stub.run("callers_by_turns")
    texts, captures = outcome.result
    assert len(texts) == 12
    assert 0 < captures[0] <= captures[1]
    assert captures[1:] == captures[1:2] * 3
    assert outcome.illegal() == []


def test_a_step_is_given_to_the_device_before_the_one_before_it_is_waited_for() -> None:
    """Nothing but the event of a step is waited for: the run, and copies from and to the host, are not."""
    outcome = cuda_stub.run("ahead")
    calls: list[str] = outcome.result
    assert calls.count("replay 0") == 10
    assert calls.count("wait event") == 10
    assert "wait stream" not in calls
    assert calls[: calls.index("wait event")].count("replay 0") == 1  # and one is in flight
    step = ["copy upload", "replay 0", "copy download", "copy download", "copy on-device", "wait event"]
    assert calls == step * 10
    assert outcome.illegal() == []


OWN_PRODUCTS = {  # of a step of one row, of a paged prompt that is padded to 32 tokens, of 3 prompts of 50
    "float": ([], [], []),
    "int4": ([], ["int4_product_32"], []),
    "int4-minima": (["int4_product_16"], ["int4_product_32"], ["int4_weights"]),
}


@pytest.mark.parametrize("form", OWN_PRODUCTS)
def test_own_kernels_are_launched_and_captured_in_place_of_many(form: str) -> None:
    """A layer's gate is one launch in place of three; the largest logits and the draw are one of all.

    With int4 weights, the paged prompt, padded to 32 tokens, has carryall's products; few and many rows have
    them only with zero points.
    """
    outcome = cuda_stub.run("own_kernels", "qwen3", form)
    launches, names, later = (
        {name: found[index] for name, found in outcome.result.items()} for index in range(3)
    )
    print(launches)
    gate, (few, prompt, many) = "silu_and_mul_half", OWN_PRODUCTS[form]
    assert names["carryall slots"] == ["draw_tokens", *few, gate]
    assert names["carryall paged"] == sorted(
        ["draw_tokens", "paged_decode_half_2", "paged_join_half", *few, *prompt, gate]
    )
    assert set(many) <= set(later["carryall paged"]) <= {"draw_tokens", *few, *many, gate}
    assert launches["onnxruntime slots"] - launches["carryall slots"] >= 2 * 2 + 6
    assert launches["onnxruntime paged"] - launches["carryall paged"] >= 2 * 2 + 6 + 25 + 2 * 3
    assert outcome.illegal() == []


@pytest.mark.parametrize(
    ("form", "kv_cache", "each"), [("float", "float32", 2), ("int8-kv", "int8", 1), ("int8-kv", "fp8", 1)]
)
def test_kv_leaves_blocks_of_the_device_and_comes_back(form: str, kv_cache: str, each: int) -> None:
    """A chunk of 64 positions is one copy for keys and one for values of a layer, and one wait."""
    outcome = cuda_stub.run("moves", form, kv_cache)
    found = outcome.result
    assert found["equal"]
    for way, direction in (("read", "download"), ("written", "upload")):
        copies = [int(words[2]) for words in found[way] if words[:2] == ["copy", direction]]
        assert len(copies) == 2 * 2
        assert sum(copies) == found["bytes"] == 64 * 4 * 2 * 64 * each  # positions, caches, heads, width
        assert [words for words in found[way] if words[0] == "wait"] == [["wait", "event"]]
    assert outcome.illegal() == []


def test_a_tower_lies_on_the_device_without_copies_between_its_nodes() -> None:
    outcome = cuda_stub.run("tower_of_a_model_that_sees")
    placed = outcome.result
    assert set(placed.get("CPUExecutionProvider", [])) <= _SHAPE_OPERATORS
    assert {"com.microsoft.MultiHeadAttention", "MatMul", "Gather"} <= set(placed[CUDA])
    assert not any("Memcpy" in name for names in placed.values() for name in names)
    assert outcome.illegal() == []


def test_a_model_with_states_lies_on_the_device_and_its_states_stay_there() -> None:
    """The host gives a step the token, its position, the mask and which logits are wanted."""
    outcome = cuda_stub.run("hybrid")
    placed, copies = outcome.result["placed"], outcome.result["copies"]
    assert set(placed.get("CPUExecutionProvider", [])) <= _SHAPE_OPERATORS
    assert {"com.microsoft.CausalConvWithState", "Attention", "MatMul"} <= set(placed[CUDA])
    assert not any("Memcpy" in name for names in placed.values() for name in names)
    assert sum(int(size) for way, size in copies if way == "upload") < 256
    assert [size for way, size in copies if way == "download"] == [str(4 * 512)]  # the logits
    assert 0 < outcome.result["launches"] < 80
    assert outcome.illegal() == []


def test_a_prompt_with_a_picture_runs_and_the_steps_after_it_are_replayed() -> None:
    outcome = cuda_stub.run("pictures")
    found = outcome.result
    assert (found["prompt"], found["steps"]) == (0, 3)
    assert set(found["placed"].get("CPUExecutionProvider", [])) <= _SHAPE_OPERATORS
    assert not any("Memcpy" in name for names in found["placed"].values() for name in names)
    assert outcome.illegal() == []


@pytest.mark.parametrize("form", ["float", "int4"])
def test_weights_go_from_the_mapped_file_to_the_device_once(form: str) -> None:
    """The host has no second copy of them; a session without weights holds 12 MB."""
    found = cuda_stub.run("weights", form).result
    print(found)
    assert found["uploads"] == pytest.approx(found["files"], rel=0.05)
    assert found["held"] < (16 << 20) + 0.25 * found["files"]


def test_auto_splits_a_model_that_the_device_does_not_hold() -> None:
    """Copies within the device measure its bandwidth; beside a slow host it has what it holds."""
    outcome = cuda_stub.run("split_auto")
    found = outcome.result
    assert found["bandwidth"] > 0
    assert found["left"] == 0
    assert found["copies"] == [str(1 << 20)] * 24
    assert found["400"] == ["cuda", "cuda", "None", [1, 4096]]
    chosen, layers, said, logits = found["16"]
    assert (chosen, logits) == ("cuda,cpu", [1, 4096])
    assert re.fullmatch(r"cuda:0-\d,cpu:\d-7", layers)
    assert f"{layers}; the model needs 16.8 MB, cuda has " in said
    assert outcome.illegal() == []


@pytest.mark.parametrize("complaint", [None, "it differs"])
def test_kv_is_in_blocks_by_default_where_the_operator_agrees_and_computes_the_model(
    complaint: str | None,
) -> None:
    """What was found is stored: five processes check once for each of two kinds of caches."""
    outcome = cuda_stub.run("default_memory", **({"CUDA_STUB_COMPLAINT": complaint} if complaint else {}))
    *small, by_name, wide = outcome.result["found"]
    kept = ["SlotRunner", f"KV is in slots, not in blocks, on cuda:0: {complaint}"]
    assert small == 3 * [kept if complaint else ["PagedRunner"]]
    assert by_name == ["SlotRunner"]
    if complaint:
        assert wide == kept
    else:
        kind, said = wide
        assert kind == "SlotRunner"
        assert "KV is in slots, not in blocks: attention model.layers.0" in said
        assert "has heads of 320" in said
    assert outcome.result["checks"] == ["float16"] * 2
    assert outcome.illegal() == []


@pytest.mark.parametrize(
    ("capability", "options"),
    [("75", "{}"), ("80", '{"compute": "bf16"}'), ("89", '{"kv_cache": "fp8"}'), ("120", "{}")],
)
def test_the_check_of_the_operator_runs_on_devices_of_all_generations(capability: str, options: str) -> None:
    """No head size or cache is refused; what the stub computes does not pass."""
    outcome = cuda_stub.run("paged_operator", options, CUDA_STUB_CAPABILITY=capability)
    found = outcome.result
    assert [placed.keys() for placed in found["placed"]] == [{CUDA}] * 2
    assert "com.microsoft.PagedAttention" in found["placed"][0][CUDA]
    assert "com.microsoft.GroupQueryAttention" in found["placed"][1][CUDA]
    assert [(step, count) for step, _, count in found["steps"]] == [(step, 12) for step in STEPS]
    assert found["complaint"] == "GroupQueryAttention with heads of 32 computes nothing"
    assert outcome.illegal() == []


def test_kv_in_blocks_takes_the_share_of_memory_that_it_may() -> None:
    """Beside it are the inputs of steps and what onnxruntime's arena rounds up, about 20 MB."""
    outcome = cuda_stub.run("fraction_of_memory")
    print(outcome.result)
    for fraction, opened, later in outcome.result:
        assert fraction - 0.05 < opened < fraction + 0.05
        assert later == opened
    assert outcome.illegal() == []


@pytest.mark.parametrize("megabytes", ["64", "2", "0.5"])
def test_two_models_on_a_device_wait_for_its_memory_and_a_third_is_refused(megabytes: str) -> None:
    """Runs that are short of memory go on in smaller parts, whichever model holds it."""
    outcome = cuda_stub.run("two_models", megabytes)
    found = outcome.result
    assert found["ended"] == [[["length", "None"]] * 4] * 2
    assert (found["full"] > 0) is (megabytes != "64")
    assert found["later"] == ["length"] * 2
    kind, _, message = found["third"].partition(": ")
    assert kind == "ProviderRuntimeError"
    assert any(re.fullmatch(text, message) for text in REFUSALS), message
    assert outcome.illegal() == []


REFUSALS = [
    r"the device has no memory for KV: two blocks of 256 tokens take 2\.1 MB; memory_fraction allows .*, of "
    r"which captured runs, logits and adapters take .*B\. Close other models, .*",
    r"not enough memory to load \S+: its weights take 14\.8 MB, and cuda:0 has .*B left of .*B\. Close .*",
]


def test_paged_runs_beyond_the_most_forms_are_not_captured() -> None:
    """onnxruntime 1.31 frees nothing that it captured before the session ends."""
    outcome = cuda_stub.run("few_forms")
    assert outcome.result == [4, 0, 4]
    assert outcome.illegal() == []


@pytest.mark.parametrize("capability", ["90", "100", "103"])
def test_a_device_without_code_is_refused(capability: str) -> None:
    reason, outcome = cuda_stub.run("no_code", CUDA_STUB_CAPABILITY=capability).result
    if capability == "90":
        assert (reason, outcome) == (None, "opened")
    else:
        assert "neither code nor PTX" in reason
        assert outcome.startswith("ProviderUnavailableError: provider 'cuda' is not available: device 0")


def test_a_capture_that_another_library_spoils_fails_its_requests_only() -> None:
    """Threads of carryall ignore captures; those of other libraries in the process do not."""
    outcome = cuda_stub.run("foreign_thread", CUDA_STUB_CAPTURE_MS="200")
    reason, message, later = outcome.result
    assert (reason, later) == ("error", "length")
    assert "901" in message  # cudaErrorStreamCaptureInvalidated
    assert {line.split()[1] for line in outcome.illegal()} <= {"cudaMalloc", "cudaFree"}
    assert outcome.count("replay") > 0


def test_a_copied_slot_has_the_bytes_of_its_source_and_others_keep_theirs() -> None:
    outcome = cuda_stub.run("copies")
    assert outcome.result == [True, True]
    assert outcome.illegal() == []


def test_less_memory_gives_fewer_slots_then_a_typed_error() -> None:
    outcome = cuda_stub.run("memory_at_load")
    most, *fewer, last = outcome.result.values()
    assert most == 2000
    assert sorted(fewer, reverse=True) == fewer
    assert 0 < fewer[-1] < most
    assert last.startswith("ProviderRuntimeError: not enough memory to load")
    assert outcome.illegal() == []


def test_caches_take_what_they_need_and_give_it_back() -> None:
    """onnxruntime's arena for values grows to a power of two, and keeps it until the process ends."""
    outcome = cuda_stub.run("memory_of_caches")
    size, held, left = outcome.result
    assert size > 2**25
    assert size <= held < 1.1 * size
    assert left < 0.05 * size
    assert outcome.illegal() == []


def test_a_request_for_which_there_is_no_memory_at_all_fails_and_later_ones_run() -> None:
    outcome = cuda_stub.run("memory_in_a_step")
    reason, message, later = outcome.result
    assert reason == "error"
    assert "Failed to allocate memory" in message
    assert later == "length"
    assert outcome.count("full") > 0


def test_a_device_lost_in_a_step_fails_its_requests_and_the_process_lives() -> None:
    outcome = cuda_stub.run("lost")
    assert outcome.count("lost") == 1
    assert len(outcome.result) == 4
    for reason, message in outcome.result:
        assert reason == "error"
        assert "719" in message  # cudaErrorLaunchFailure


def test_two_devices_in_one_thread() -> None:
    outcome = cuda_stub.run("two_devices", CUDA_STUB_DEVICES="2")
    held, error = outcome.result
    assert min(held) > 100_000
    assert "cudaSetDevice(2) failed" in error
    assert outcome.illegal() == []
    replayed = {line.split()[1] for line in outcome.log if line.startswith("replay")}
    assert replayed == {"0", "1"}
