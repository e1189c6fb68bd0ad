"""`poss compare`: the tables of records in the terminal, those of the page."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from poss_lightning.reports.findings import find
from poss_lightning.reports.tables import Cell, Table

WIDTH = 100  # of tables, at least: narrower ones would break numbers
LEGEND = (
    "Below a difference or a ratio also its p, Holm-corrected for all that are held against the same one, and as ± the "
    "smallest true effect that it would find with 80 % power, so corrected."
)


def compare(
    records: list[str] | str,
    baseline: str = "autoregressive",
    reference: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> None:
    """Compare the methods of benchmark records: acceptance, speed and positions, each with its 95 % interval.

    One training of each method: the intervals come from a bootstrap over prompts, paired between methods, as every
    method is given the same prompts in each draw. All methods must have answered the same prompts.

    Several trainings of a method, in folders CHOICE/seed-N: means over seeds, and differences paired by seed, with
    seeds and prompts both taken as random.

    Beside each comparison stand its p, Holm-corrected for the methods held against the same one, and the smallest true
    effect that it would find with 80 % power.

    Args:
        records: Files of records, or folders that hold a records.jsonl or records.jsonl.gz, or have such below them;
            several as [a,b].
        baseline: The method whose speed is 1 and whose tokens the others should give.
        reference: The method that acceptance lengths and speeds are held against, for example the single-layer draft.
        resamples: Draws of the bootstrap over prompts, where each method was trained once.
        seed: Of the bootstrap.
    """
    found = find(records, baseline, reference, resamples, seed)
    show(found.tables, note=found.note)


def show(
    tables: Iterable[Table], console: Console | None = None, note: str = "Under each value stands its 95 % interval."
) -> None:
    """Print tables, after how to read them."""
    console = console or Console()
    console.width = max(console.width, WIDTH)
    console.print(f"\n{note} {LEGEND}\n")
    for table in tables:
        console.print(_grid(table))


def _grid(table: Table) -> Grid:
    grid = Grid(title=table.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in table.names:
        grid.add_column(name, no_wrap=True)
    for lines in table.columns:
        grid.add_column(Text("\n".join(lines)), justify="right", overflow="fold")
    for names, cells in table.rows:
        grid.add_row(*map(Text, names), *map(_said, cells))
    return grid


def _said(cell: Cell) -> Text:
    notes = [note.removeprefix("could see ") for note in cell.notes]  # the legend says what ± is
    return Text.assemble((cell.text, "bold"), *(("\n" + note, "dim") for note in notes))
