"""Templates, grammars and tokenizer files from strangers: a result or an error of ours, soon."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import damaged, fuzz, seeds
from hostile_json import VALUES
from hypothesis import strategies as st

from carryall.errors import CarryallError, PackageError, RequestError
from carryall.exporter.demo import demo_path
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.grammars import GrammarCompiler
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.structured_output import StructuredOutput

SECONDS = 5.0  # of the processor
EXAMPLES = [30, pytest.param(None, marks=pytest.mark.slow)]
TEMPLATES, GRAMMARS = seeds("templates"), seeds("grammars")
MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
PIECES = st.sampled_from(
    [
        *("{{", "}}", "{%", "%}", "for m in messages", "endfor", "if", "else", "endif", "set x = ", "x"),
        *(
            "messages",
            "m.content",
            "['role']",
            "|",
            "join(',')",
            "tojson",
            "range(10)",
            "* 3",
            "+",
            "loop.index",
        ),
        *(
            "macro f(x)",
            "endmacro",
            "f(1)",
            "namespace(a=1)",
            "is string",
            "~",
            "%",
            "**",
            "-",
            "'a'",
            "1e9",
            " ",
        ),
    ]
)


def texts(files: list[Path]) -> st.SearchStrategy[str]:
    whole = st.sampled_from(files).map(Path.read_bytes).flatmap(damaged)
    return whole.map(lambda content: content.decode("utf-8", "replace"))


def check_soon(call: Callable[[], object], allowed: type[Exception] = RequestError) -> None:
    start = time.process_time()
    with contextlib.suppress(allowed):
        call()
    assert time.process_time() - start < SECONDS


def check_template(source: str) -> None:
    check_soon(lambda: ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(MESSAGES))


@pytest.mark.parametrize("seed", TEMPLATES, ids=lambda path: path.name)
def test_kept_templates(seed: Path) -> None:
    check_template(seed.read_text())


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_template_renders_or_is_refused(examples: int | None) -> None:
    fuzz(texts(TEMPLATES) | st.lists(PIECES, max_size=12).map(" ".join), check_template, examples)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(demo_path("draft"))
    return GrammarCompiler(tokenizer, [0], tokenizer.vocab_size)


def check_grammar(compiler: GrammarCompiler, kind: str, text: str) -> None:
    check_soon(lambda: compiler.compile(StructuredOutput.of({kind: text})).result(60).copy())


@pytest.mark.parametrize("seed", GRAMMARS, ids=lambda path: path.name)
def test_kept_grammars(seed: Path, compiler: GrammarCompiler) -> None:
    """The suffix tells the kind: .json_schema, .regex or .grammar."""
    check_grammar(compiler, seed.suffix.removeprefix("."), seed.read_text())


SCHEMAS = st.dictionaries(
    st.sampled_from(
        [
            "type",
            "properties",
            "items",
            "enum",
            "$ref",
            "anyOf",
            "pattern",
            "minLength",
            "maxItems",
            "required",
        ]
    ),
    st.sampled_from(
        ["object", "string", "array", "#", "#/properties/a", "(a+)+b", -1, 10**9, 2**63, {}, [], True]
    )
    | VALUES,
    max_size=4,
)
FORMS = st.one_of(
    st.tuples(st.just("json_schema"), SCHEMAS.map(json.dumps)),
    st.tuples(st.just("regex"), st.text("ab(){}[]|*+?\\0123,^$.-", max_size=14)),
    *(st.tuples(st.just(path.suffix.removeprefix(".")), texts([path])) for path in GRAMMARS),
)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_grammar_compiles_or_is_refused(examples: int | None, compiler: GrammarCompiler) -> None:
    fuzz(FORMS, lambda form: check_grammar(compiler, *form), examples)


CONFIGS = st.dictionaries(
    st.sampled_from(
        ["chat_template", "bos_token", "eos_token", "add_bos_token", "additional_special_tokens"]
    ),
    VALUES | st.lists(st.dictionaries(st.sampled_from(["name", "template"]), VALUES, max_size=2), max_size=2),
    max_size=3,
)


@pytest.mark.parametrize("seed", seeds("tokenizer_config"), ids=lambda path: path.name)
def test_kept_tokenizer_configurations(seed: Path, tmp_path: Path) -> None:
    shutil.copy(demo_path("draft") / "tokenizer.json", tmp_path)
    shutil.copy(seed, tmp_path / "tokenizer_config.json")
    with pytest.raises(PackageError):
        ChatTemplate.from_folder(tmp_path, Tokenizer(tmp_path).special_tokens)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_tokenizer_configuration_is_read_or_refused(examples: int | None, tmp_path: Path) -> None:
    shutil.copy(demo_path("draft") / "tokenizer.json", tmp_path)

    def check(given: tuple[str, dict[str, Any]]) -> None:
        name, content = given
        path = tmp_path / name
        path.write_text(json.dumps(content))
        try:
            check_soon(use, CarryallError)
        finally:
            path.unlink()

    def use() -> None:
        tokenizer = Tokenizer(tmp_path)
        template = ChatTemplate.from_folder(tmp_path, tokenizer.special_tokens)
        template.render(MESSAGES)

    names = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"]
    fuzz(st.tuples(st.sampled_from(names), CONFIGS), check, examples)
