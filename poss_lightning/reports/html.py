"""A page in one file that loads nothing else: a template, filled with text, tables and figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from poss_lightning import plots
from poss_lightning.files import atomic

# What HTML forbids: control characters but tab and ends of lines.
CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")
NO_MORE = {"circumstances": [], "notes": [], "legend": "", "tables": {}, "training": {}, "texts": []}


def write_figures(out: str, title: str, verdict: str, overview: pd.DataFrame, figures: Mapping[str, Figure]) -> None:
    """Write a page of a sentence, a table and figures."""
    write_html(out, title=title, verdict=verdict, overview=overview, figures=figures, **NO_MORE)


def write_html(out: str, **parts: Any) -> None:
    """Fill the template, atomically."""
    page = _template().render(parts)
    with atomic(out) as path:
        path.write_text(page.translate(CONTROLS), encoding="utf-8")


def _template() -> Any:
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.filters["svg"] = lambda figure, title: Markup(plots.to_svg(figure, title))
    pages.filters["table"] = lambda table: Markup(table.to_html(index=False, border=0, escape=True, justify="unset"))
    return pages.get_template("page.html.j2")
