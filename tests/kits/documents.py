"""The code that README.md, CONTRIBUTING.md and docs/*.md show, taken from the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Fence:
    """A block of code of a page."""

    page: str
    language: str
    content: str

    @property
    def key(self) -> str:
        """The page and the first line that says something."""
        lines = [line.strip() for line in self.content.splitlines()]
        return f"{self.page}: {next(line for line in lines if line)}"


def fences() -> list[Fence]:
    """All blocks of all pages."""
    return [
        Fence(page.relative_to(ROOT).as_posix(), found[2], found[3])
        for page in PAGES
        for found in _FENCE.finditer(page.read_text(encoding="utf-8"))
    ]


def commands(fence: Fence) -> Iterator[list[str]]:
    """The words of each command line of a block of shell: of a console, the lines behind ``$``."""
    content = fence.content.replace("\\\n", " ")
    for line in content.splitlines():
        if fence.language == "console" and not line.startswith("$ "):
            continue
        for part in line.removeprefix("$ ").split(" && "):
            words = shlex.split(part, comments=True)
            if words:
                yield words


def mentioned() -> Iterator[tuple[str, list[str]]]:
    """Each command of carryall that a page names, in a block or within a sentence, with the page."""
    for fence in fences():
        if fence.language in ("sh", "console"):
            yield from ((fence.page, words) for words in commands(fence) if words[0] == "carryall")
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for span in _SPAN.findall(text):
            if span.startswith("carryall "):
                yield page.relative_to(ROOT).as_posix(), shlex.split(span, comments=True)
