"""Read a folder of scanned forms to a Parquet table, and write a page that shows each beside its result.

python examples/scanned_forms.py examples/forms

Started again after an interruption, it goes on where it was stopped. The forms of ``examples/forms`` are
drawn, not scanned: ``tools/reader_pages.py`` made them and ``written.json``, which tells what is on them.
"""

import argparse
import base64
import json
from pathlib import Path

import jinja2
import pyarrow as pa
from pyarrow import parquet

import carryall

FIELDS = ("patient", "date", "order", "total")
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 24} for name in FIELDS},
    "required": [*FIELDS],
    "additionalProperties": False,
}
REPORT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Forms</title>
<style>
:root { color-scheme: light dark; --line: #8886; --right: #1a7f37; --wrong: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
section { display: grid; grid-template-columns: minmax(0, 20rem) 1fr; gap: 1.5rem; padding: 1rem 0;
  border-top: 1px solid var(--line); }
figure { margin: 0; } img { width: 100%; border: 1px solid var(--line); border-radius: 4px; }
dl { display: grid; grid-template-columns: 4rem 1fr; gap: .2rem 1rem; margin: 0; align-content: start; }
figcaption, dt, small { opacity: .65; } dd { margin: 0; font-family: ui-monospace, monospace; }
.right { color: var(--right); } .wrong { color: var(--wrong); }
</style>
<h1>Forms</h1>
<p>{{ forms|length }} forms{% if exact is not none %}; {{ exact }} of {{ forms|length * fields|length }}
fields are read as they are written, the others are red{% endif %}.</p>
{% for form in forms %}
<section>
<figure><img alt="{{ form.page }}" src="data:;base64,{{ form.picture }}">
<figcaption>{{ form.page }}</figcaption></figure>
<dl>
{% for name in fields %}
{% set wrong = form.written and form.read[name] != form.written[name] %}
<dt>{{ name }}</dt>
<dd class="{{ 'wrong' if wrong else 'right' if form.written }}">{{ form.read[name] or "" }}
{% if wrong %}<small>is {{ form.written[name] }}</small>{% endif %}</dd>
{% endfor %}
</dl>
</section>
{% endfor %}
</html>
"""


def write_pages(folder: Path) -> Path:
    """Write the names and the bytes of a folder's pictures as ``pages.parquet``, and return its path."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".jpg", ".png"))
    columns = {"page": [file.name for file in files], "picture": [file.read_bytes() for file in files]}
    parquet.write_table(pa.table(columns), "pages.parquet")
    return Path("pages.parquet")


def write_report(table: pa.Table, folder: Path) -> int | None:
    """Write ``forms.html``; return how many fields were read as they are written, None if that is unknown."""
    known = folder / "written.json"
    written = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
    forms = [
        {
            "page": row["page"],
            "picture": base64.b64encode((folder / row["page"]).read_bytes()).decode(),
            "read": {name: row[f"output.{name}"] for name in FIELDS},
            "written": written.get(row["page"]),
        }
        for row in table.to_pylist()
    ]
    exact = None
    if written:
        exact = sum(form["read"][name] == form["written"][name] for form in forms for name in FIELDS)
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(REPORT)
    Path("forms.html").write_text(template.render(forms=forms, fields=FIELDS, exact=exact), encoding="utf-8")
    return exact


def main() -> None:
    """Read the forms, and write ``forms.parquet`` and ``forms.html`` into the working folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of pictures")
    parser.add_argument(
        "--model", default="reader", help="that reads forms (default: the embedded %(default)s)"
    )
    args = parser.parse_args()
    job = carryall.batch.run(
        write_pages(args.folder),
        "forms.parquet",
        model=args.model,
        template="Extract as JSON.",
        kind="chat",
        image_columns=["picture"],
        keep=["page"],
        sampling={"structured_output": {"json_schema": SCHEMA}, "temperature": 0, "max_tokens": 200},
    )
    outcome = job.wait()
    table = parquet.read_table("forms.parquet")
    exact = write_report(table, args.folder)
    print(f"{outcome.totals.completed} of {len(table)} forms answered")
    if exact is not None:
        print(f"{exact} of {len(FIELDS) * len(table)} fields exact")


if __name__ == "__main__":
    main()
