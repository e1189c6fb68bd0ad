"""`poss compare`: the tables of a benchmark in the terminal."""

from collections.abc import Iterable
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from poss_lightning.evaluation.records import BASELINES, depths, read_records, read_runs
from poss_lightning.evaluation.statistics import Estimate
from poss_lightning.evaluation.summary import ALL, MethodSummary, summarise


def compare(
    records: list[str] | str,
    baseline: str = "autoregressive",
    reference: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> None:
    """Compare the methods of benchmark records: acceptance, speed and positions, each with its 95 % interval.

    The intervals come from a bootstrap over prompts, paired between methods: every method is given the same prompts
    in each draw. All methods must have answered the same prompts.

    Args:
        records: Files of records, or folders that hold a records.jsonl; several as [a,b].
        baseline: The method whose speed is 1 and whose tokens the others should give.
        reference: The method that acceptance lengths and speeds are held against, for example the single-layer draft.
        resamples: Draws of the bootstrap.
        seed: Of the bootstrap.
    """
    known = depths(read_runs(records))
    summaries = summarise(read_records(records), baseline, reference, known, resamples, seed)
    show(summaries, baseline, reference, Console())


def show(summaries: list[MethodSummary], baseline: str, reference: str | None, console: Console) -> None:
    """Print every table."""
    overall = [summary for summary in summaries if summary.suite == ALL]
    drafted = [summary for summary in overall if summary.rounds]
    by_suite = [summary for summary in summaries if summary.suite != ALL and summary.method not in BASELINES]
    console.print(f"\n{overall[0].prompts} prompts; under each value its 95 % interval, prompts drawn anew\n")
    if drafted:
        console.print(acceptance_table(drafted, reference))
        console.print(position_table(drafted))
    console.print(speed_table(overall, baseline, reference))
    if by_suite:
        console.print(suite_table(by_suite, baseline))


def acceptance_table(summaries: list[MethodSummary], reference: str | None) -> Table:
    """Acceptance lengths of the methods that draft; against the reference, if one is named."""
    gains = [f"τ micro − {reference}", f"τ macro − {reference}"] if reference else []
    table = _table("Tokens a round", ["method"], ["rounds", "τ micro", "τ macro", *gains])
    for summary in summaries:
        lengths = [_cell(summary.tau_micro), _cell(summary.tau_macro)]
        signed = [_cell(gain, "+.2f") for gain in (summary.tau_micro_gain, summary.tau_macro_gain)]
        table.add_row(Text(summary.method), str(summary.rounds), *lengths, *(signed if reference else []))
    return table


def position_table(summaries: list[MethodSummary]) -> Table:
    """pos-acc by position, in per cent: of the rounds that accept k-1, how many accept k."""
    most = max(len(summary.pos_acc) for summary in summaries)
    table = _table("pos-acc by position, %", ["method"], map(str, range(1, most + 1)))
    for summary in summaries:
        table.add_row(Text(summary.method), *(_cell(share.percent(), ".0f") for share in summary.pos_acc))
    return table


def speed_table(summaries: list[MethodSummary], baseline: str, reference: str | None) -> Table:
    """Tokens a second, its ratios to baselines and reference, and how many prompts were answered like the baseline."""
    present = {name for summary in summaries for name in summary.speed_up}
    baselines = sorted(present, key=lambda name: (name != baseline, name))
    apart = [reference] if reference and reference not in baselines else []
    ratios = [f"× {name}" for name in (*baselines, *apart)]
    table = _table("Speed", ["method"], ["tokens/s", *ratios, f"same tokens as {baseline}, %"])
    for summary in summaries:
        speed_ups = [_cell(summary.speed_up.get(name)) for name in baselines]
        speed_ups += [_cell(summary.speed_gain) for _ in apart]
        same = Text("") if summary.method == baseline else _cell(summary.identical.percent(), ".0f")
        table.add_row(Text(summary.method), _cell(summary.tokens_per_second, ".1f"), *speed_ups, same)
    return table


def suite_table(summaries: list[MethodSummary], baseline: str) -> Table:
    """Acceptance and speed-up of each method on each suite."""
    table = _table("By suite", ["suite", "method"], ["prompts", "τ micro", "τ macro", f"× {baseline}"])
    for suite, own in groupby(summaries, key=lambda summary: summary.suite):
        for summary in own:
            values = [summary.tau_micro, summary.tau_macro, summary.speed_up.get(baseline)]
            cells = [_cell(value, between="  ") for value in values]
            table.add_row(Text(suite), Text(summary.method), str(summary.prompts), *cells)
        table.add_section()
    return table


def _cell(value: Estimate | None, form: str = ".2f", between: str = "\n") -> Text:
    """The value, and its interval dimmed."""
    if value is None:
        return Text("")
    return Text.assemble((value.text(form), "bold"), between, (value.interval(form), "dim"))


def _table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(Text(number), justify="right", overflow="fold")
    return table
