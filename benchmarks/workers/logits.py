"""Write an engine's logits of a text, computed token by token as in decoding.

    python logits.py ENGINE MODEL TOKENS.npy LOGITS.npy

ENGINE is a name of ``ENGINES``. TOKENS are int64 [tokens]; LOGITS are float32 [tokens, vocabulary]. Each
engine runs in its own environment; this file imports only numpy and the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np


def carryall(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Carryall's runner of the CPU provider, with its defaults."""
    from carryall.providers.base import Row
    from carryall.runtime.models.loading import load_model

    runner = load_model(path, max_slots=1).runner
    for position, token in enumerate(tokens):
        (row,) = runner.forward([Row(0, np.array([token]), position)])
        yield row[0]
    runner.close()


def carryall_on_openvino(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Carryall's runner of the OpenVINO provider, with its defaults."""
    from carryall.providers.base import Row
    from carryall.runtime.models.loading import load_model

    runner = load_model(path, max_slots=1, provider="openvino").runner
    for position, token in enumerate(tokens):
        (row,) = runner.forward([Row(0, np.array([token]), position)])
        yield row[0]
    runner.close()


def openvino(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """OpenVINO's stateful model, compiled with the CPU plugin's defaults."""
    import openvino as ov

    request = ov.Core().compile_model(f"{path}/openvino_model.xml", "CPU").create_infer_request()
    for position, token in enumerate(tokens):
        feed = {
            "input_ids": np.array([[token]]),
            "attention_mask": np.ones((1, position + 1), np.int64),
            "position_ids": np.array([[position]]),
            "beam_idx": np.zeros(1, np.int32),
        }
        yield request.infer(feed)["logits"][0, -1]


def genai(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """onnxruntime-genai's Generator."""
    import onnxruntime_genai as og

    model = og.Model(og.Config(path))
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=len(tokens) + 1, batch_size=1)
    generator = og.Generator(model, params)
    for token in tokens:
        generator.append_tokens(np.array([token], np.int32))
        yield generator.get_logits()[0, -1]


def llamacpp(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """llama.cpp with the settings of llama-cpp-python."""
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=len(tokens), verbose=False)
    for token in tokens:
        model.eval([int(token)])
        yield np.ctypeslib.as_array(llama_cpp.llama_get_logits(model.ctx), (model.n_vocab(),))


def vllm(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """vLLM: a logits processor keeps the logits of a step and allows only the text's next token."""
    import torch
    from vllm_cpu import opened, prepare

    prepare()
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessor

    kept: list[np.ndarray] = []

    class Text(LogitsProcessor):
        def __init__(self, *_: object) -> None:
            kept.clear()

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, _: object) -> None:
            pass

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            kept.append(logits[0].float().numpy().copy())
            allowed = torch.full_like(logits, -torch.inf)
            allowed[0, int(tokens[len(kept) % len(tokens)])] = 0
            return allowed

    llm = opened(path, logits_processors=[Text])
    kept.clear()
    params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [int(tokens[0])]}], params, use_tqdm=False)
    yield from kept


def transformers(path: str, tokens: np.ndarray) -> Iterator[np.ndarray]:
    """The float32 model in PyTorch: the reference."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        yield from model(torch.from_numpy(tokens)[None]).logits[0].numpy()


ENGINES = {
    "carryall": carryall,
    "carryall_on_openvino": carryall_on_openvino,
    "genai": genai,
    "llamacpp": llamacpp,
    "openvino": openvino,
    "transformers": transformers,
    "vllm": vllm,
}

if __name__ == "__main__":
    engine, path, source, target = sys.argv[1:]
    np.save(target, np.stack([np.array(row, np.float32) for row in ENGINES[engine](path, np.load(source))]))
