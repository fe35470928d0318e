"""Click commands whose help groups options in sections."""

from __future__ import annotations

from typing import Any

import click


class SectionOption(click.Option):
    """An option with the name of its section in the help."""

    def __init__(self, *args: Any, section: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a section last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for section in sorted(sections, key=lambda name: name == "Options"):
            with formatter.section(section):
                formatter.write_dl(sections[section])
