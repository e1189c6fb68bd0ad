"""Tables of the page and the terminal: values with intervals, comparisons with p and the minimum detectable effect."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from poss_lightning.evaluation.records import BASELINES
from poss_lightning.reports.seeds import SeedSummary
from poss_lightning.reports.statistics import Comparison, Estimate
from poss_lightning.reports.summary import ALL, MethodSummary

GAIN, RATIO, PERCENT = "+z.3f", ".3f", "+z.1f"  # how comparisons are written; z: no sign before a zero but +
Measured = dict[str, SeedSummary]  # one choice's summaries, by measure


@dataclass(frozen=True)
class Cell:
    """A value with the small lines below it; a comparison's `direction` is `larger` or `smaller` where it shows one."""

    text: str
    notes: tuple[str, ...] = ()
    direction: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of one or more names and their cells; a column's name may have several lines. `folded`: hidden at first."""

    title: str
    names: Sequence[str]
    columns: Sequence[Sequence[str]]
    rows: Sequence[tuple[Sequence[str], Sequence[Cell]]]
    folded: bool = False


def drop_empty_columns(table: Table) -> Table:
    """The table without empty columns, such as the speeds of replayed rounds."""
    kept = [
        i
        for i in range(len(table.columns))
        if any(cells[i].text.strip("–") for _, cells in table.rows if i < len(cells))
    ]
    rows = [(names, [cells[i] for i in kept if i < len(cells)]) for names, cells in table.rows]
    return replace(table, columns=[table.columns[i] for i in kept], rows=rows)


def stack_tables(title: str, by: str, tables: dict[str, Table]) -> Table:
    """Tables of one kind as one, in which a row also has the name of its table, in a column called `by`."""
    first, *_ = tables.values()
    columns = list(dict.fromkeys(tuple(column) for table in tables.values() for column in table.columns))
    named = list(dict.fromkeys(tuple(names) for table in tables.values() for names, _ in table.rows))
    rows = []
    for names in named:
        for name, table in tables.items():
            cells = next((cells for own, cells in table.rows if tuple(own) == names), None)
            if cells is not None:
                known = dict(zip(map(tuple, table.columns), cells, strict=False))  # a row may end early
                rows.append(([*names, name], [known.get(column, Cell("")) for column in columns]))
    return Table(title, [*first.names, by], columns, rows)


def make_cell(value: Estimate | None, form: str = ".2f") -> Cell:
    """The value and its interval; of a comparison also the corrected p and the minimum detectable effect."""
    if value is None:
        return Cell("")
    if not isinstance(value, Comparison):
        return Cell(value.text(form), tuple(filter(None, [value.interval(form)])))
    if value.identical:
        return Cell("identical")
    notes = [value.interval(form), value.significance(), value.detectable_text(form.replace("+", ""))]
    return Cell(value.text(form), tuple(filter(None, notes)), value.direction)


# --- over prompts: one training of each method ---


def method_tables(summaries: list[MethodSummary], baseline: str | None, reference: str | None) -> list[Table]:
    """Speed and acceptance, against the reference, by position, by suite; those that have no rows are left out."""
    overall = [row for row in summaries if row.suite == ALL]
    drafted = [row for row in overall if row.rounds]
    tables = [_methods(overall, baseline)]
    others = [row for row in drafted if row.method != reference]
    if reference in {row.method for row in drafted} and others:  # of a baseline the table above tells
        tables.append(_against(others, reference))
    by_suite = [row for row in summaries if row.suite != ALL and row.method not in BASELINES]
    if by_suite:
        tables.append(_by_suite(by_suite, baseline, reference))
    deepest = max(len(row.pos_acc) for row in overall)
    places = [[str(place)] for place in range(1, deepest + 1)]
    if drafted:
        shares = [([row.method], [make_cell(share.percent(), ".0f") for share in row.pos_acc]) for row in drafted]
        tables.append(Table("pos-acc by position, %", ["method"], places, shares, folded=True))
    gains = [([row.method], [make_cell(gain.percent(), PERCENT) for gain in row.pos_acc_gain]) for row in drafted]
    if any(cells for _, cells in gains):
        tables.append(
            Table(
                f"pos-acc by position, % − {reference}",
                ["method"],
                places,
                [row for row in gains if row[1]],
                folded=True,
            )
        )
    return [drop_empty_columns(table) for table in tables]


def _methods(rows: list[MethodSummary], baseline: str | None) -> Table:
    present = {row.method for row in rows}
    others = [name for name in dict.fromkeys((baseline, *BASELINES)) if name in present]
    columns = [("speed-up over", name) for name in others]
    columns += [("tokens/s",), ("tokens a round", "τ micro"), ("by prompt", "τ macro")]
    columns += [("same tokens as", f"{baseline}, %"), ("rounds",)]
    cells = [
        [_plain(row.speed_up.get(name)) for name in others]
        + [make_cell(row.tokens_per_second if baseline else None, ".1f")]
        + [make_cell(row.tau_micro if row.rounds else None), make_cell(row.tau_macro if row.rounds else None)]
        + [make_cell(row.identical.percent() if baseline not in (None, row.method) else None, ".0f")]
        + [Cell(str(row.rounds or ""))]
        for row in rows
    ]
    return Table("Speed and acceptance" if baseline else "Acceptance", ["method"], columns, _named(rows, cells))


def _against(rows: list[MethodSummary], reference: str) -> Table:
    columns = [("τ micro −", reference), ("τ macro −", reference), ("speed ×", reference)]
    cells = [
        [make_cell(row.tau_micro_gain, GAIN), make_cell(row.tau_macro_gain, GAIN), make_cell(row.speed_gain, RATIO)]
        for row in rows
    ]
    return Table(f"Against {reference}", ["method"], columns, _named(rows, cells), folded=True)


def _by_suite(rows: list[MethodSummary], baseline: str | None, reference: str | None) -> Table:
    columns = [("τ micro",), ("τ macro",), *([("τ macro −", reference)] if reference else [])]
    columns += [("speed-up over", baseline), ("prompts",)]
    return Table(
        "By suite",
        ["suite", "method"],
        columns,
        [
            (
                [row.suite, row.method],
                [make_cell(row.tau_micro), make_cell(row.tau_macro)]
                + ([make_cell(row.tau_macro_gain, GAIN)] if reference else [])
                + [_plain(row.speed_up.get(baseline or "")), Cell(str(row.prompts))],
            )
            for row in rows
        ],
        folded=True,
    )


def _plain(value: Comparison | None) -> Cell:
    """A ratio without a test: that decoding with a draft has another speed than without needs no proof."""
    return make_cell(value and Estimate(value.value, value.low, value.high))


def _named(rows: list[MethodSummary], cells: list[list[Cell]]) -> list[tuple[Sequence[str], list[Cell]]]:
    return [([row.method], values) for row, values in zip(rows, cells, strict=True)]


# --- over seeds: several trainings of each choice ---


def group_by_choice(summaries: Iterable[SeedSummary], suite: str = ALL) -> dict[str, Measured]:
    """The summaries of one suite, by choice and measure."""
    by_choice: dict[str, Measured] = {}
    for summary in summaries:
        if summary.suite == suite:
            by_choice.setdefault(summary.choice, {})[summary.measure] = summary
    return by_choice


def seed_tables(summaries: list[SeedSummary], reference: str | None) -> list[Table]:
    """Acceptance and speed over seeds, against the reference, by position, by suite."""
    overall = group_by_choice(summaries)
    rows = [([name], _means(row)) for name, row in overall.items()]
    tables = [Table("Over training seeds", ["choice"], _COLUMNS, rows)]
    others = {name: row for name, row in overall.items() if name != reference}
    if reference and others:
        tables += [_gains(reference, others, these_prompts=False), _gains(reference, others, these_prompts=True)]
    suites = dict.fromkeys(summary.suite for summary in summaries if summary.suite != ALL)
    by_suite = [([suite, name], row) for suite in suites for name, row in group_by_choice(summaries, suite).items()]
    if by_suite:
        rows = [
            (names, _means(row) + ([make_cell(row["tau_macro"].gain, GAIN)] if reference else []))
            for names, row in by_suite
        ]
        columns = [*_COLUMNS, *([("τ macro −", reference)] if reference else [])]
        tables.append(Table("By suite", ["suite", "choice"], columns, rows, folded=True))
    shares = {name: position_summaries(row) for name, row in overall.items()}
    places = [[str(place)] for place in range(1, max(map(len, shares.values())) + 1)]
    rows = [([name], [make_cell(one.mean.percent(), ".1f") for one in positions]) for name, positions in shares.items()]
    tables.append(Table("pos-acc by position, %", ["choice"], places, rows, folded=True))
    if reference and others:
        rows = [
            ([name], [make_cell(one.gain and one.gain.percent(), PERCENT) for one in positions])
            for name, positions in shares.items()
            if name != reference
        ]
        tables.append(Table(f"pos-acc by position, % − {reference}", ["choice"], places, rows, folded=True))
    return [drop_empty_columns(table) for table in tables]


def position_summaries(measured: Measured) -> list[SeedSummary]:
    """One choice's pos-acc, position by position."""
    names = (f"pos_acc_{place}" for place in range(1, len(measured) + 1))
    return [measured[name] for name in names if name in measured]


_COLUMNS = [("seeds",), ("by prompt", "τ macro"), ("tokens a round", "τ micro"), ("speed-up",), ("tokens/s",)]


def _means(measured: Measured) -> list[Cell]:
    measures = [("tau_macro", ".2f"), ("tau_micro", ".2f"), ("speed_up", ".2f"), ("tokens_per_second", ".1f")]
    return [Cell(str(len(measured["tau_macro"].values)))] + [_mean(measured.get(name), form) for name, form in measures]


def _mean(one: SeedSummary | None, form: str) -> Cell:
    """The mean over seeds, its interval, and the standard deviation of a training."""
    if one is None:
        return Cell("")
    shown = make_cell(one.mean, form)
    spread = () if one.deviation != one.deviation else (f"sd {one.deviation:{form}}",)  # nan for a single seed
    return Cell(shown.text, shown.notes + spread)


def _gains(reference: str, others: dict[str, Measured], these_prompts: bool) -> Table:
    """Against the reference, for other prompts than these as well, or for these alone."""
    measures = [("tau_macro", "τ macro −", GAIN), ("tau_micro", "τ micro −", GAIN)]
    measures += [("speed_up", "speed-up ×", RATIO), ("tokens_per_second", "tokens/s ×", RATIO)]
    title = f"Against {reference}, other seeds, " + ("these prompts" if these_prompts else "other prompts")
    gain = "gain_these_prompts" if these_prompts else "gain"
    columns = [("pairs",), *((words, reference) for _, words, _ in measures)]
    rows = []
    for name, measured in others.items():
        values = [(measured.get(measure), form) for measure, _, form in measures]
        gains = [make_cell(getattr(one, gain, None), form) for one, form in values]
        rows.append(([name], [Cell(str(len(measured["tau_macro"].pairs))), *gains]))
    return Table(title, ["choice"], columns, rows, folded=True)
