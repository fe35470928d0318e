"""transformers.js of the npm registry, downloaded on demand, and the tokens that it is compared with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import zoo

from carryall import LLM, SamplingParams

VERSION = "4.3.1"
PROMPTS = ["# Copyright 2006 Google, Inc. All Rights Reserved.", 'top.geometry("+%d+']
_TIMEOUT = 500  # seconds for a download
# Two engines round the activations of quantized products differently: their log-probabilities differ by
# 0.21 at most (int4, int8; 29 positions, 20 tokens each). Tokens nearer than twice that prove nothing.
_CLEAR = 0.5


def library() -> Path:
    """Return a folder whose ``node_modules`` holds transformers.js, or skip the test."""
    npm, folder = shutil.which("npm"), zoo.folder() / f"transformers-js-{VERSION}"
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js and npm are not installed")
    if not (folder / "node_modules" / "@huggingface").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
        command = [npm, "install", *options, f"@huggingface/transformers@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode:
            pytest.skip(f"transformers.js cannot be installed: {done.stderr[-200:]}")
    return folder


def clear_tokens(package: Path, count: int) -> list[list[int]]:
    """Return carryall's ``count`` greedy tokens of each prompt; each is the clear first choice."""
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=2)
    with LLM(package, provider="cpu", max_slots=1, context_length=64) as llm:
        answers = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    for answer in answers:
        for likely in answer.logprobs or ():
            second, first = sorted(token.logprob for token in likely.values())[-2:]
            assert first - second > _CLEAR, f"choose another prompt: a near tie before {answer.text!r}"
    return [list(answer.token_ids) for answer in answers]
