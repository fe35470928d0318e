"""What a model of ``tools/train_reader.py`` reads wrong, as it is and with quantized parts.

python benchmarks/quality/reader.py MODEL --fonts fonts --pages 200 [--provider-option tower=int8]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from carryall import LLM, SamplingParams, StructuredOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from reader_pages import EXTRACT, READ, Page, Printer, font_files, words


def edits(wanted: str, given: str) -> int:
    """Return how many characters to insert, delete or replace to make one text of another."""
    row = list(range(len(given) + 1))
    for i, a in enumerate(wanted, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(given, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def read(llm: LLM, pages: list[Page]) -> list[str]:
    """Return the answer to each page; forms are read under a schema with their fields."""
    talks, params = [], []
    for page in pages:
        question = {"type": "text", "text": READ if page.fields is None else EXTRACT}
        talks.append([{"role": "user", "content": [{"type": "image", "image": page.pixels}, question]}])
        schema: dict[str, Any] | None = None
        if page.fields is not None:
            fields = {name: {"type": "string"} for name in page.fields}
            schema = {"type": "object", "properties": fields, "required": [*fields]}
            schema["additionalProperties"] = False
        form = None if schema is None else StructuredOutput(json_schema=schema)
        params.append(SamplingParams(temperature=0, max_tokens=220, structured_output=form))
    return [output.outputs[0].text for output in llm.chat(talks, params)]


def errors(pages: list[Page], answers: list[str]) -> str:
    """Return the share of wrong characters of texts and of values of forms."""
    counts = {"text": [0, 0], "values": [0, 0]}
    exact = fields = 0
    for page, answer in zip(pages, answers, strict=True):
        if page.fields is None:
            pairs, kind = [(page.text, answer)], "text"
        else:
            try:
                found = json.loads(answer)
            except ValueError:  # cut at the limit of tokens
                found = {}
            pairs, kind = [(value, found.get(name, "")) for name, value in page.fields.items()], "values"
            exact += sum(wanted == given for wanted, given in pairs)
            fields += len(pairs)
        counts[kind][0] += sum(edits(*pair) for pair in pairs)
        counts[kind][1] += sum(len(wanted) for wanted, _ in pairs)
    shares = (f"{kind} {100 * wrong / total:.2f} % of {total}" for kind, (wrong, total) in counts.items())
    return f"wrong characters: {', '.join(shares)}; {exact} of {fields} values exact"


def main() -> None:
    """Read pages of known and of held-out fonts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--fonts", type=Path, action="append", required=True, help="folder; repeatable")
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--quantize", help="of the decoder, such as int8-fast")
    parser.add_argument("--provider-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    options = dict(each.split("=", 1) for each in args.provider_option)
    with LLM(args.model, provider="cpu", quantize=args.quantize, provider_options=options) as llm:
        for name, held in (("known", False), ("held-out", True)):
            rng = random.Random(7)
            printer = Printer(font_files(args.fonts, held_out=held), words(held_out=True), rng)
            pages = [printer.page(4, rng.randint(1, 4), form=number % 2 == 1) for number in range(args.pages)]
            print(f"{name} fonts: {errors(pages, read(llm, pages))}", flush=True)


if __name__ == "__main__":
    main()
