"""`poss compare`: a table and a verdict of what was measured; all tables with `--all`, a page with `--html`."""

import textwrap

import pandas as pd

from poss_lightning.files import check_file
from poss_lightning.reports.results import Findings, find
from poss_lightning.reports.tables import LEGEND, all_tables, overview, reference_of, verdict
from poss_lightning.terminal import printable

COUNTS = ("prompts", "trainings")
MAX_WIDTH = 80  # characters of a line of prose


def compare(
    records: list[str] | str,
    *,
    baseline: str = "plain",
    reference: str | None = None,
    all: bool = False,
    html: str | None = None,
    runs: list[str] | str | None = None,
) -> None:
    """Compare the methods of benchmark records: speed and acceptance, each with its 95 % interval.

    Methods are compared on the same prompts, prompt by prompt. If each was trained once, intervals are for other
    prompts. If a method was trained several times, in folders choice=NAME/seed=N, trainings are paired by their seed,
    and intervals are for other trainings and other prompts.

    Args:
        records: folders with rounds in them or below, or files of engines; several as [a,b].
        baseline: the method whose speed is 1; the others should give its tokens.
        reference: the method that acceptance lengths and speeds are compared with, for example the single-layer draft.
        all: print every table: by position and suite, with p and minimum detectable effects.
        html: page to write: tables, curves, decoded text, and how the runs were made.
        runs: for the page, folders of training runs, whose TensorBoard files give drift and loss by depth; a sweep's
            own by default.
    """
    if html is not None:
        check_file(html, ".html")
    findings = find(records, baseline=baseline, reference=reference)
    if html is not None:
        from poss_lightning.reports.page import write_page  # imports matplotlib, which is slow

        write_page(findings, html, baseline, runs)
    print_findings(findings, all, baseline)
    if html is not None:
        print(f"The page: {html}")


def print_findings(findings: Findings, all: bool = False, baseline: str = "plain") -> None:
    """Print the short table and its verdict, and with `all` every other table."""
    counts = {what: [*map(int, own)] for what, own in findings.overall.groupby("measure")["value"] if what in COUNTS}
    fewest, most = min(counts["trainings"]), max(counts["trainings"])
    trainings = f", {f'{fewest} to ' * (fewest < most)}{most} trainings of each" * (most > 1)
    title = f"{findings.title}: {len(counts['prompts'])} methods{trainings}, {counts['prompts'][0]} prompts"
    print(f"\n{printable(title)}\n\n{show(overview(findings.results))}\n")
    corrected = "* is p < 0.05, by Holm's correction. " * bool(reference_of(findings.results))
    for text in filter(
        None,
        (verdict(findings.results, baseline), *findings.notes, LEGEND if all else f"{corrected}Other tables: --all."),
    ):
        print(textwrap.fill(_plain(text), MAX_WIDTH, break_on_hyphens=False))
    for title, table in all_tables(findings.results, baseline).items() if all else ():
        print(f"\n{printable(title)}\n{show(table)}")


def show(table: pd.DataFrame) -> str:
    """Return a table of texts for a terminal, the first column aligned left."""
    table = table.map(_plain).rename(columns=_plain)
    first = table.columns[0]
    width = max(map(len, [first, *table[first]]))
    table = table.assign(**{first: table[first].str.ljust(width)}).rename(columns={first: first.ljust(width)})
    return table.to_string(index=False)


def _plain(text: str) -> str:
    return printable(" ".join(str(text).split()))
