"""`poss compare`: the tables of a benchmark in the terminal."""

import math
from collections.abc import Iterable
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from poss_lightning.evaluation.records import BASELINES, depths, read_cells, read_records, read_runs, timed
from poss_lightning.reports.seeds import RATIOS, SeedSummary, over_seeds
from poss_lightning.reports.statistics import Comparison, Estimate
from poss_lightning.reports.summary import ALL, MethodSummary, summarise

LEGEND = (
    "Of a comparison also its p, Holm-corrected for the methods held against the same one, and as ± the smallest true "
    "effect that it would find with 80 % power at 5 %.\n"
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
        return show_seeds(over_seeds(cells, reference, baseline, known), reference, Console())
    answers = read_records(records)
    over = baseline if timed(answers) else None
    show(summarise(answers, over, reference, known, resamples, seed), over, reference, Console())


def show(summaries: list[MethodSummary], baseline: str | None, reference: str | None, console: Console) -> None:
    """Print every table of methods trained once."""
    overall = [summary for summary in summaries if summary.suite == ALL]
    drafted = [summary for summary in overall if summary.rounds]
    by_suite = [summary for summary in summaries if summary.suite != ALL and summary.method not in BASELINES]
    console.print(f"\n{overall[0].prompts} prompts; under each value its 95 % interval, prompts drawn anew.\n{LEGEND}")
    if drafted:
        console.print(acceptance_table(drafted, reference))
        console.print(position_table(drafted))
        if any(summary.pos_acc_gain for summary in drafted):
            console.print(position_gain_table(drafted, reference))
    if baseline is not None:
        console.print(speed_table(overall, baseline, reference))
    if by_suite:
        console.print(suite_table(by_suite, baseline))


def show_seeds(summaries: list[SeedSummary], reference: str | None, console: Console) -> None:
    """Print every table of choices trained with several seeds."""
    console.print(
        "\nUnder each mean over seeds its 95 % interval on these prompts; of a comparison first for other seeds and "
        f"prompts, then for other seeds on these prompts alone.\n{LEGEND}"
    )
    overall = [summary for summary in summaries if summary.suite in (ALL, "")]
    by_measure = {summary.measure: [row for row in overall if row.measure == summary.measure] for summary in overall}
    shares = {name: rows for name, rows in by_measure.items() if name.startswith("pos_acc_")}
    for measure, rows in by_measure.items():
        if measure not in shares:
            console.print(seed_table(measure, rows, reference))
    if shares:
        console.print(seed_position_table(shares, reference))
    if by_suite := [row for row in summaries if row.suite not in (ALL, "") and row.measure == "tau_macro"]:
        console.print(seed_suite_table(by_suite, reference))


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


def position_gain_table(summaries: list[MethodSummary], reference: str | None) -> Table:
    """pos-acc by position less that of the reference, in per cent points."""
    most = max(len(summary.pos_acc_gain) for summary in summaries)
    table = _table(f"pos-acc by position, % − {reference}", ["method"], map(str, range(1, most + 1)))
    for summary in summaries:
        if summary.pos_acc_gain:
            table.add_row(Text(summary.method), *(_cell(gain.percent(), "+.1f") for gain in summary.pos_acc_gain))
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


def suite_table(summaries: list[MethodSummary], baseline: str | None) -> Table:
    """Acceptance and speed-up of each method on each suite."""
    columns = ["prompts", "τ micro", "τ macro"] + ([f"× {baseline}"] if baseline else [])
    table = _table("By suite", ["suite", "method"], columns)
    for suite, own in groupby(summaries, key=lambda summary: summary.suite):
        for summary in own:
            speed_ups = [summary.speed_up.get(baseline)] if baseline else []
            values = [summary.tau_micro, summary.tau_macro, *speed_ups]
            cells = [_cell(value, between="  ") for value in values]
            table.add_row(Text(suite), Text(summary.method), str(summary.prompts), *cells)
        table.add_section()
    return table


def seed_table(measure: str, rows: list[SeedSummary], reference: str | None) -> Table:
    """One measure of every choice: mean and standard deviation over seeds, and the two comparisons."""
    apart = "×" if measure in RATIOS else "−"
    gains = [f"{apart} {reference}", f"{apart} {reference}, these prompts"] if reference else []
    table = _table(f"{measure}, over seeds", ["choice"], ["seeds", "mean", "standard deviation", *gains])
    for row in rows:
        mean = [_cell(row.mean), Text("–" if math.isnan(row.deviation) else f"{row.deviation:.3f}")]
        signed = [_cell(gain, ".3f" if measure in RATIOS else "+.3f") for gain in (row.gain, row.gain_these_prompts)]
        table.add_row(Text(row.choice), str(len(row.values)), *mean, *(signed if reference else []))
    return table


def seed_position_table(shares: dict[str, list[SeedSummary]], reference: str | None) -> Table:
    """pos-acc by position in per cent, and under it the difference to the reference in per cent points."""
    table = _table("pos-acc by position, %, over seeds", ["choice"], [name.rpartition("_")[2] for name in shares])
    choices = dict.fromkeys(row.choice for rows in shares.values() for row in rows)
    for choice in choices:
        own = [next((row for row in rows if row.choice == choice), None) for rows in shares.values()]
        table.add_row(Text(choice), *(_cell(row and row.mean.percent(), ".1f") for row in own))
        if any(row and row.gain for row in own):
            gains = [_cell(row.gain.percent() if row and row.gain else None, "+.1f") for row in own]
            table.add_row(Text(f"  − {reference}", "dim"), *gains)
    return table


def seed_suite_table(rows: list[SeedSummary], reference: str | None) -> Table:
    """Macro τ of each choice on each suite."""
    gains = [f"− {reference}"] if reference else []
    table = _table("tau_macro by suite, over seeds", ["suite", "choice"], ["mean", *gains])
    for suite, own in groupby(rows, key=lambda row: row.suite):
        for row in own:
            signed = [_cell(row.gain, "+.2f", between="  ")] if reference else []
            table.add_row(Text(suite), Text(row.choice), _cell(row.mean, between="  "), *signed)
        table.add_section()
    return table


def _cell(value: Estimate | None, form: str = ".2f", between: str = "\n") -> Text:
    """The value, and its interval dimmed; of a comparison also the p and the smallest effect it would find."""
    if value is None:
        return Text("")
    notes = [value.interval(form)]
    if isinstance(value, Comparison):
        notes += [value.significance(), value.smallest(form.lstrip("+"))]
    return Text.assemble((value.text(form), "bold"), *((between + note, "dim") for note in notes if note))


def _table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(Text(number), justify="right", overflow="fold")
    return table
