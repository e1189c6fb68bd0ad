"""`poss compare`: the tables of the report in the terminal."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from poss_lightning.ranges import Draws, Seed, check_numbers
from poss_lightning.reports.findings import find
from poss_lightning.reports.tables import Cell, Table
from poss_lightning.terminal import printable

WIDTH = 100  # of tables, at least: narrower ones would break numbers
LEGEND = (
    "Under a difference or a ratio also stand its p and, as ±, its minimum detectable effect: the smallest true effect "
    "that it would find with 80 % power. Both are Holm-corrected for all comparisons with the same reference."
)


@check_numbers
def compare(
    records: list[str] | str,
    *,
    baseline: str = "autoregressive",
    reference: str | None = None,
    resamples: Draws = 2000,
    seed: Seed = 0,
) -> None:
    """Compare the methods of benchmark records: acceptance, speed and positions, each with its 95 % interval.

    If each method was trained once, the intervals come from a bootstrap over prompts. It is paired: in each draw every
    method gets the same prompts. So all methods must have answered the same prompts.

    If a method was trained several times, in folders CHOICE/seed-N, the tables show means over seeds, and differences
    paired by seed. Both seeds and prompts count as random.

    Each comparison has a p and a minimum detectable effect: the smallest true effect that it would find with 80 %
    power. Both are Holm-corrected for the methods that are compared with the same one.

    Args:
        records: files of records, or folders with a records.jsonl or records.jsonl.gz in them or below; several as
            [a,b].
        baseline: the method whose speed is 1; the others should give its tokens.
        reference: the method that acceptance lengths and speeds are compared with, for example the single-layer draft.
        resamples: draws of the bootstrap over prompts, where each method was trained once.
        seed: of the bootstrap.
    """
    findings = find(records, baseline=baseline, reference=reference, resamples=resamples, seed=seed)
    print_tables(findings.tables, note=findings.note)


def print_tables(
    tables: Iterable[Table],
    console: Console | None = None,
    note: str = "Under each value stands its 95 % interval.",
    legend: str = LEGEND,
) -> None:
    """Print how to read the tables, and then the tables."""
    console = console or Console()
    console.width = max(console.width, WIDTH)
    console.print(f"\n{note} {legend}\n", markup=False)
    for table in tables:
        console.print(_grid(table))


def _grid(table: Table) -> Grid:
    grid = Grid(title=_plain(table.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in table.names:
        grid.add_column(_plain(name), no_wrap=True)
    for lines in table.columns:
        grid.add_column(_plain("\n".join(lines)), justify="right", overflow="fold")
    for names, cells in table.rows:
        grid.add_row(*map(_plain, names), *map(_text, cells))
    return grid


def _plain(text: str) -> Text:
    """No markup of rich's: a name may have brackets."""
    return Text(printable(text))


def _text(cell: Cell) -> Text:
    return Text.assemble((cell.text, "bold"), *(("\n" + note, "dim") for note in cell.notes))
