"""Print the first token of a GGUF file: ``python first_token.py ENGINE MODEL PROMPT``, with few imports."""

from __future__ import annotations

import sys


def llamacpp(path: str, prompt: str) -> str:
    """llama.cpp with the settings of llama-cpp-python."""
    from llama_cpp import Llama

    model = Llama(path, verbose=False)
    return str(model.create_completion(prompt, max_tokens=1, temperature=0)["choices"][0]["text"])


def openvino(path: str, prompt: str) -> str:
    """OpenVINO GenAI's pipeline of one sequence."""
    import openvino_genai as og

    return str(og.LLMPipeline(path, "CPU").generate(prompt, max_new_tokens=1, do_sample=False))


if __name__ == "__main__":
    engine, path, prompt = sys.argv[1:]
    print({"llamacpp": llamacpp, "openvino": openvino}[engine](path, prompt))
