"""Pages for the demo model that reads: short lines and small forms, drawn with the fonts of a folder.

A page is 256 pixels wide and has a line of text in each band of 32 pixels that is not empty. The words come
from CPython's standard library (PSF licence); one in ten is held out, and so are five families of fonts.
As a script it draws forms with held-out words, and what is on each:

python tools/reader_pages.py examples/forms --fonts fonts --count 24 --seed 43
"""

import argparse
import io
import json
import random
import re
import string
import sysconfig
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WIDTH, BAND = 256, 32
TOKEN = 16  # pixels of an edge of a token
SLOTS = 4  # characters of a token that are told to the tower
CHARACTERS = string.printable[:95]
BLANK = 0  # class of a slot without a character; a character is its index + 1
READ, EXTRACT = "Read the text.", "Extract as JSON."
# Carlito was made from Lato, so both are held out.
HELD_OUT_FONTS = ("Cantarell", "Carlito", "Inconsolata", "Lato", "LinBiolinum")
_WANTED = re.compile(
    r"(Cantarell|Carlito|Lato|Caladea|Roboto|OpenSans|Liberation(Sans|Serif|Mono))-Regular|DejaVuS(ans|erif|ansMono)"
    r"|(LiberationSans|DejaVuSans)-Bold|Free(Sans|Serif)|Inconsolata|LinBiolinum_R"
)
# fmt: off
LABELS = (
    "Name", "First name", "Surname", "Date", "Date of birth", "Patient", "Doctor", "Ward", "Room", "Dose",
    "Drug", "Weight", "Height", "Pulse", "Street", "City", "Country", "Phone", "Email", "Insurance", "Policy",
    "Number", "Total", "Amount", "Tax", "Price", "Invoice", "Order", "Item", "Quantity", "Due", "Account",
    "Bank", "Sample", "Result", "Unit", "Status", "Note", "Sex", "Age",
)
# fmt: on
_UNITS = ("mg", "ml", "kg", "cm", "EUR", "USD", "%", "mmol/l", "h", "days")
_KINDS = (*2 * ("words", "words", "name", "name", "date", "amount", "code", "digits"), "chance")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Page:
    """A drawn page.

    Args:
        pixels: uint8 [height, width], gray.
        lines: its text.
        fields: what a form holds by key; None for text that is no form.
        characters: int64 [height / 16, width / 16, SLOTS], the characters whose middle lies in a token of
            16 x 16 pixels, as index + 1 in CHARACTERS, from left to right; BLANK elsewhere.
    """

    pixels: npt.NDArray[np.uint8]
    lines: tuple[str, ...]
    fields: dict[str, str] | None
    characters: npt.NDArray[np.int64]

    @property
    def text(self) -> str:
        """The answer to READ."""
        return "\n".join(self.lines)

    @property
    def json(self) -> str:
        """The answer to EXTRACT."""
        return json.dumps(self.fields)


def words(*, held_out: bool) -> list[str]:
    """Return the words of the standard library of one kind: seen in training, or held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {
        word
        for path in sorted(root.glob("*.py"))
        for word in re.findall(r"[A-Za-z][a-z]{1,9}\b", path.read_text(encoding="utf-8", errors="ignore"))
    }
    return sorted(word for word in found if (zlib.crc32(word.lower().encode()) % 10 == 0) == held_out)


def font_files(folders: Sequence[Path], *, held_out: bool) -> list[Path]:
    """Return the font files in some folders of one kind: drawn with in training, or held out.

    Raises:
        FileNotFoundError: there is none.
    """
    files = {path.stem: path for folder in folders for path in sorted(folder.rglob("*.[ot]tf"))}
    kept = [
        path
        for stem, path in sorted(files.items())
        if _WANTED.fullmatch(stem) and stem.startswith(HELD_OUT_FONTS) == held_out
    ]
    if not kept:
        raise FileNotFoundError(f"no font to draw with in {', '.join(map(str, folders))}")
    return kept


class Printer:
    """Draws pages.

    Args:
        fonts: the font files to choose from.
        vocabulary: the words to choose from.
        rng: the source of chance.
    """

    def __init__(self, fonts: Sequence[Path], vocabulary: Sequence[str], rng: random.Random) -> None:
        self.fonts, self.vocabulary, self.rng = fonts, vocabulary, rng
        self._faces: dict[tuple[Path, int], Any] = {}

    def form(self, labels: Mapping[str, str]) -> Page:
        """Draw a form with a band for each label; ``labels`` gives the kind of its value, of ``_KINDS``."""
        font, size = self.rng.choice(self.fonts), self.rng.randint(17, 21)
        fields: dict[str, str] = {}
        for label, kind in labels.items():
            while not (value := self._fitted(f"{label}: ", self._value(kind), font, size)):
                pass
            fields[label] = value
        texts = [f"{label}: {value}" for label, value in fields.items()]
        keys = {_key(label): value for label, value in fields.items()}
        return self._drawn(texts, list(range(len(texts))), len(texts), self._face(font, size), keys)

    def page(self, bands: int, lines: int, *, form: bool) -> Page:
        """Draw a page of ``bands`` bands with ``lines`` lines of text, "label: value" in a form."""
        rng = self.rng
        font, size = rng.choice(self.fonts), rng.randint(17, 21)
        fields: dict[str, str] = {}
        texts: list[str] = []
        while len(texts) < lines:
            label = f"{self._label()}: " if form else ""
            value = self._fitted(label, self._value(rng.choice(_KINDS)), font, size)
            key = _key(label[:-2])
            if not value or (form and key in fields):
                continue
            fields[key] = value
            texts.append(label + value)
        if rng.random() < 0.9:
            places = list(range(start := rng.randint(0, bands - lines), start + lines))
        else:
            places = sorted(rng.sample(range(bands), lines))
        return self._drawn(texts, places, bands, self._face(font, size), fields if form else None)

    def _drawn(
        self, texts: list[str], places: list[int], bands: int, face: Any, fields: dict[str, str] | None
    ) -> Page:
        rng, height = self.rng, bands * BAND
        paper, ink = rng.randint(200, 255), rng.randint(0, 90)
        image = Image.new("L", (WIDTH, height), paper)
        draw = ImageDraw.Draw(image)
        ascent, descent = face.getmetrics()
        left = rng.uniform(2, 10)
        slots: list[tuple[float, float, str]] = []
        for text, place in zip(texts, places, strict=True):
            room = WIDTH - 3 - face.getlength(text)
            x = min(left + rng.uniform(-1, 1), max(1.0, room))
            y = place * BAND + rng.uniform(0, max(0.0, BAND - ascent - descent))
            draw.text((x, y), text, font=face, fill=ink)
            ends = [x + face.getlength(text[:count]) for count in range(len(text) + 1)]
            middle = y + 0.7 * ascent
            slots += [((a + b) / 2, middle, each) for a, b, each in zip(ends, ends[1:], text, strict=False)]
        turn = rng.uniform(-0.6, 0.6) if rng.random() < 0.15 else 0.0
        if turn:
            image = image.rotate(turn, Image.Resampling.BICUBIC, fillcolor=paper)
        return Page(self._aged(image), tuple(texts), fields, _characters(slots, bands, turn))

    def _aged(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """Return the pixels of a page that was printed, scanned and stored."""
        rng = self.rng
        if rng.random() < 0.35:
            image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.8)))
        values = np.asarray(image, np.float32)
        if rng.random() < 0.5:
            noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(values.shape, np.float32)
            values = values + noise * np.float32(rng.uniform(1, 9))
        pixels = values.clip(0, 255).astype(np.uint8)
        if rng.random() < 0.3:
            stored = io.BytesIO()
            Image.fromarray(pixels).save(stored, "JPEG", quality=rng.randint(40, 95))
            pixels = np.asarray(Image.open(stored))
        return pixels

    def _face(self, font: Path, size: int) -> Any:
        if (font, size) not in self._faces:
            engine = ImageFont.Layout.BASIC  # each character has its own place
            self._faces[font, size] = ImageFont.truetype(str(font), size, layout_engine=engine)
        return self._faces[font, size]

    def _fitted(self, label: str, value: str, font: Path, size: int) -> str:
        """Return as much of a value as fits on the line, in whole words where it has several."""
        face = self._face(font, size)
        while value and face.getlength(label + value) > WIDTH - 8:
            value = value.rpartition(" ")[0] or value[:-1]
        return value.strip()

    def _label(self) -> str:
        if self.rng.random() < 0.7:
            return self.rng.choice(LABELS)
        return self.rng.choice(self.vocabulary).capitalize()

    def _value(self, kind: str) -> str:
        rng = self.rng
        if kind == "words":
            return " ".join(rng.choice(self.vocabulary) for _ in range(rng.randint(1, 4)))
        if kind == "name":
            return " ".join(rng.choice(self.vocabulary).capitalize() for _ in range(2))
        if kind == "date":
            year, month, day = rng.randint(1930, 2030), rng.randint(1, 12), rng.randint(1, 28)
            forms = (
                f"{year}-{month:02}-{day:02}",
                f"{day:02}.{month:02}.{year}",
                f"{day} {_MONTHS[month - 1]} {year}",
            )
            return rng.choice((*forms, f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"))
        if kind == "amount":
            number = rng.choice((f"{rng.uniform(0, 2000):,.2f}", str(rng.randint(0, 999))))
            return f"{number} {rng.choice(_UNITS)}" if rng.random() < 0.6 else number
        if kind == "code":
            letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))
            return f"{letters}{rng.choice(('', '-', '/', ' '))}{rng.randint(10, 999999)}"
        if kind == "digits":
            return " ".join(str(rng.randint(10, 9999)) for _ in range(rng.randint(1, 3)))
        return "".join(
            rng.choices(string.ascii_letters + string.digits + CHARACTERS, k=rng.randint(2, 12))
        ).strip()


def _key(label: str) -> str:
    return label.lower().replace(" ", "_")


def _characters(slots: Sequence[tuple[float, float, str]], bands: int, turn: float) -> npt.NDArray[np.int64]:
    """Return the characters of each token; ``turn`` is the rotation of the page in degrees."""
    rows, columns = bands * BAND // TOKEN, WIDTH // TOKEN
    classes = np.full((rows, columns, SLOTS), BLANK, np.int64)
    used = np.zeros((rows, columns), int)
    for x, y, character in slots:
        y -= np.radians(turn) * (x - WIDTH / 2)
        row, column = int(y // TOKEN), int(x // TOKEN)
        if 0 <= row < rows and 0 <= column < columns and used[row, column] < SLOTS:
            classes[row, column, used[row, column]] = CHARACTERS.index(character) + 1
            used[row, column] += 1
    return classes


FORM = {"Patient": "name", "Date": "date", "Order": "code", "Total": "amount"}


def main() -> None:
    """Draw forms with the labels of FORM, as JPEG files, and write ``written.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--fonts", type=Path, action="append", required=True, help="folder; repeatable")
    parser.add_argument("--count", type=int, default=24, help="of forms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out-fonts", action="store_true", help="not the fonts of the training")
    args = parser.parse_args()
    fonts = font_files(args.fonts, held_out=args.held_out_fonts)
    printer = Printer(fonts, words(held_out=True), random.Random(args.seed))
    args.out.mkdir(parents=True, exist_ok=True)
    written = {}
    for number in range(args.count):
        page = printer.form(FORM)
        name = f"form-{number + 1:02}.jpg"
        Image.fromarray(page.pixels).save(args.out / name, quality=90)
        written[name] = page.fields
    text = json.dumps(written, indent=1)
    (args.out / "written.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
