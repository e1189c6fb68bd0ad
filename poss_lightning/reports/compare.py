"""`poss compare`: the tables of records in the terminal, those of the page."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from poss_lightning.evaluation.records import depths, read_cells, read_records, read_runs, timed
from poss_lightning.reports.seeds import over_seeds
from poss_lightning.reports.summary import summarise
from poss_lightning.reports.tables import Cell, Table, method_tables, seed_tables

LEGEND = (
    "Under each value its 95 % interval; under a difference or a ratio also its p, Holm-corrected for all that are "
    "held against the same one, and as ± the smallest true effect that it would find with 80 % power at 5 %."
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

    Several trainings, in folders CHOICE/seed-N: means over seeds, and differences paired by seed, with seeds and
    prompts both taken as random.

    Beside each comparison stand its p, Holm-corrected for the methods held against the same one, and the smallest true
    effect that it would find with 80 % power.

    Args:
        records: Files of records, or folders that hold a records.jsonl or records.jsonl.gz, or have such below them;
            several as [a,b].
        baseline: The method whose speed is 1 and whose tokens the others should give.
        reference: The method that acceptance lengths and speeds are held against, for example the single-layer draft.
        resamples: Draws of the bootstrap.
        seed: Of the bootstrap.
    """
    known = depths(read_runs(records))
    if cells := read_cells(records):
        return show(seed_tables(over_seeds(cells, reference, baseline, known), reference))
    answers = read_records(records)
    over = baseline if timed(answers) else None
    summaries = summarise(answers, over, reference, known, resamples, seed)
    print(f"{summaries[0].prompts} prompts, each method trained once")
    show(method_tables(summaries, over, reference))


def show(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables, after how to read them."""
    console = console or Console()
    console.print(f"\n{LEGEND}\n")
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
