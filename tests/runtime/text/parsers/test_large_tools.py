"""Tool sets of the size that coding agents send: how long their grammar takes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from large_tools import large_tool
from mcp_servers import mcp_tools
from own_environment import gemma3_gguf, smollm2_gguf
from text_kit import byte_level_with
from tokenizers import AddedToken

from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.text.grammars import GrammarCompiler, GrammarMatcher
from carryall.runtime.text.parsers.answer_grammar import answer_frame
from carryall.runtime.text.parsers.formats import HERMES, QWEN_XML, AnswerFormat, CallFormat, Thought
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.structured_output import StructuredOutput

OBJECT = """<tool_call>
{"name": "tool_7", "arguments": {"path_7": "/tmp", "mode": "read"}}
</tool_call>"""
PAIRS = """<tool_call>
<function=tool_7>
<parameter=path_7>
/tmp
</parameter>
<parameter=mode>
read
</parameter>
</function>
</tool_call>"""
CALLS = {"object": (HERMES, OBJECT), "pairs": (QWEN_XML, PAIRS)}


@pytest.mark.long
@pytest.mark.parametrize("style", CALLS)
def test_the_grammar_of_60_tools_of_100_kb_compiles_in_a_second(style: str, tmp_path: Path) -> None:
    form: CallFormat
    form, text = CALLS[style]
    tools = [large_tool(number) for number in range(60)]
    assert len(json.dumps(tools)) > 100_000
    tags = [AddedToken(tag, special=True) for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    tokenizer = byte_level_with(tmp_path / "tokenizer", tags)
    end = tokenizer.encode("</s>", add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, end, tokenizer.vocab_size)
    answer = AnswerFormat("test", Thought("<think>", "</think>"), form)
    names = [each["function"]["name"] for each in tools]
    begin = time.process_time()  # other processes of the machine do not count
    state = compiler.compile(None, answer_frame(answer, "", tools, names, parallel=True)).result()
    assert time.process_time() - begin < 1.5
    for token in [*tokenizer.encode(text, add_special_tokens=False), *end]:
        logits = np.zeros(tokenizer.vocab_size, np.float32)
        state.apply(logits)
        assert logits[token] == 0
        state.observe(token)


# The file of a real model, its token behind an answer, and the most that a mask takes on average in ms: some
# CPUs are twice as slow as others.
VOCABULARIES = {"smollm2": (smollm2_gguf, "<|im_end|>", 1.0), "gemma3": (gemma3_gguf, "<end_of_turn>", 1.5)}


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("style", CALLS)
def test_tools_of_public_servers_compile_in_a_second_with_a_real_vocabulary(
    style: str, vocabulary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over 60 tools of MCP servers, and 49,152 or 262,144 tokens."""
    file, last, most = VOCABULARIES[vocabulary]
    tools = mcp_tools()
    assert len(tools) >= 60
    name = "create_pull_request"
    arguments = {"owner": "a", "repo": "b", "title": "Fix the parser of numbers", "head": "x", "base": "y"}
    told = json.dumps({"name": name, "arguments": arguments})
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    text = {
        "object": f"<tool_call>\n{told}\n</tool_call>",
        "pairs": f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>",
    }[style]
    tokenizer = Tokenizer(resolve_model(file()).folder)
    end = tokenizer.encode(last, add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, end, tokenizer.vocab_size)
    compiler.compile(StructuredOutput(json_object=True)).result()  # reads the vocabulary, as a warm-up does
    answer = AnswerFormat("test", None, CALLS[style][0])
    names = [each["function"]["name"] for each in tools]
    begin = time.process_time()
    state = compiler.compile(None, answer_frame(answer, "", tools, names, parallel=True)).result()
    compiled = time.process_time() - begin
    masks = seconds_of_masks(tokenizer, state, text, end)
    with capsys.disabled():
        size = len(json.dumps(tools)) // 1000
        known = f"{style}, {tokenizer.vocab_size} tokens: {len(tools)} tools, {size} kB"
        print(f"{known}: {compiled:.2f} s, masks {masks * 1e3:.2f} ms")
    assert compiled < 1
    assert masks * 1e3 < most


@pytest.mark.slow
@pytest.mark.parametrize("style", CALLS)
def test_masks_of_262144_tokens_take_less_than_a_millisecond(
    style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a call of 60 tools with 100 kB of schemas, on average."""
    tools = [large_tool(number) for number in range(60)]
    tokenizer = Tokenizer(resolve_model(gemma3_gguf()).folder)
    end = tokenizer.encode("<end_of_turn>", add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, end, tokenizer.vocab_size)
    form, text = CALLS[style]
    names = [each["function"]["name"] for each in tools]
    frame = answer_frame(AnswerFormat("test", None, form), "", tools, names, parallel=True)
    masks = seconds_of_masks(tokenizer, compiler.compile(None, frame).result(), text, end)
    with capsys.disabled():
        print(f"{style}: {tokenizer.vocab_size} tokens, masks {masks * 1e3:.2f} ms")
    assert masks < 0.001


def seconds_of_masks(tokenizer: Tokenizer, state: GrammarMatcher, text: str, end: list[int]) -> float:
    """The processor time of a mask that is applied, the mean over a text that the grammar allows.

    Each mask counts with the least time of 3 passes, since a busy machine makes some of them slower. The
    threads that fill masks count, other processes do not.
    """
    passes: list[list[float]] = []
    for _ in range(3):
        passes.append([])
        copied = state.copy()
        for token in [*tokenizer.encode(text, add_special_tokens=False), *end]:
            logits = np.full(tokenizer.vocab_size, 0.5, np.float32)
            begin = time.process_time()
            copied.apply(logits)
            passes[-1].append(time.process_time() - begin)
            assert logits[token] == 0.5
            copied.observe(token)
    return float(np.mean(np.min(passes, axis=0)))
