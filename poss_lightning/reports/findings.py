"""What records say: over training seeds where choices have several, or a folder each; else over prompts."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from poss_lightning.evaluation.records import (
    BASELINES,
    Record,
    by_cell,
    by_folder,
    check_drafts,
    find_depths,
    has_auto_trees,
    has_seconds,
    read_sources,
)
from poss_lightning.reports.costs import cost_table, read_costs
from poss_lightning.reports.seeds import Cells, summarise_seeds
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.summary import ALL, MethodSummary, summarise
from poss_lightning.reports.tables import (
    Measured,
    Table,
    group_by_choice,
    method_tables,
    position_summaries,
    seed_tables,
)
from poss_lightning.terminal import announced

AUTO = (
    " Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft and on this machine."
)


class Findings(NamedTuple):
    """What records say."""

    headline: str
    note: str  # how to read the tables
    made: str  # how the intervals were computed
    shares: Mapping[str, Sequence[Estimate]]  # pos-acc of every method that drafts
    tables: list[Table]
    answers: list[Record]  # of one training of each method
    cells: list[tuple[str, int]]  # choice and seed of these trainings, where the folders have them


@announced("reading records, and drawing what intervals need")
def find(
    records: Iterable[str | Path] | str | Path,
    *,
    baseline: str = "autoregressive",
    reference: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Findings:
    """What records say.

    Args:
        records: files, or folders that have some in them or below; those of a sweep are in folders CHOICE/seed-N.
        baseline: the method whose speed is 1; the others should give its tokens.
        reference: the method or choice that the others are compared with.
        resamples: draws of the bootstrap over prompts.
        seed: of the bootstrap.

    Raises:
        FileNotFoundError, ValueError: as `read_sources`, `check_drafts`, `summarise` and `summarise_seeds`.
    """
    sources = read_sources(records)
    runs, cells = by_folder(sources), by_cell(sources)
    known, chosen = find_depths(runs), choose_cells(cells)
    answers = select_records(cells, chosen) if cells else [record for source in sources for record in source.records]
    if not cells:  # whose folders tell the trainings of a choice apart
        check_drafts(runs)
    if len(chosen) < len(cells) or (cells and has_seconds(answers)):  # speeds compare within a folder only
        findings = _find_over_seeds(cells, baseline, reference, known)._replace(answers=answers)
    else:
        over = baseline if has_seconds(answers) else None
        summaries = summarise(answers, baseline=over, reference=reference, depths=known, resamples=resamples, seed=seed)
        findings = _find_over_prompts(summaries, over, reference)._replace(
            made=f"{resamples} draws of the bootstrap, seed {seed}", answers=answers
        )
        if costs := read_costs(runs):
            overall = [row for row in summaries if row.suite == ALL]
            speed_ups = {row.method: row.speed_up[over] for row in overall if over in row.speed_up} if over else {}
            findings.tables.insert(1, cost_table(costs, speed_ups))
    return findings._replace(cells=chosen, note=findings.note + (AUTO if has_auto_trees(runs) else ""))


def _find_over_prompts(summaries: list[MethodSummary], baseline: str | None, reference: str | None) -> Findings:
    """One training of each method: intervals are for other prompts."""
    overall = [row for row in summaries if row.suite == ALL]
    note = (
        f"{overall[0].prompts} prompts. Each method was trained once: under each value stands its 95 % interval for "
        "other prompts, which says nothing about other trainings."
    )
    shares = {row.method: row.pos_acc for row in overall if row.rounds}
    tables = method_tables(summaries, baseline, reference)
    headline = write_headline(overall, baseline)
    return Findings(headline=headline, note=note, made="", shares=shares, tables=tables, answers=[], cells=[])


def _find_over_seeds(cells: Cells, baseline: str, reference: str | None, depths: dict[str, int]) -> Findings:
    """Several trainings of each choice."""
    summaries = summarise_seeds(cells, reference=reference, baseline=baseline, depths=depths)
    overall = group_by_choice(summaries)
    note = (
        f"{len(overall)} choices, {len(cells)} trainings. Under each mean over seeds stand its 95 % interval for other "
        "seeds, and the standard deviation of one training."
    )
    return Findings(
        headline=write_seed_headline(overall, baseline, reference),
        note=note,
        made="intervals from the spread over seeds and prompts",
        shares={choice: [one.mean for one in position_summaries(measured)] for choice, measured in overall.items()},
        tables=seed_tables(summaries, reference),
        answers=[],
        cells=[],
    )


def write_headline(overall: list[MethodSummary], baseline: str | None) -> str:
    """Say in a sentence or two how fast the fastest draft is against the baseline; or only what is accepted."""
    if baseline is None:
        taus = ", ".join(f"{row.method} {row.tau_macro.text()}{_within(row.tau_macro)}" for row in overall)
        return f"Replayed rounds, without seconds. Tokens a round (τ macro): {taus}."
    drafting = [row for row in overall if row.method not in BASELINES and baseline in row.speed_up]
    if not drafting:
        speeds = ", ".join(f"{row.method} {row.tokens_per_second.text('.1f')}" for row in overall)
        return f"No method here drafts; tokens per second: {speeds}."
    best = max(drafting, key=lambda row: row.speed_up[baseline].value)
    gain = best.speed_up[baseline]
    verdict = {"larger": "faster", "smaller": "slower", "": "no difference shown"}[gain.direction]
    tied = [row.method for row in drafting if row.speed_up[baseline].text() == gain.text()]
    first = _names(tied, "decodes", "decode")
    return (
        f"{first} at {gain.text()} times the speed of {baseline}{_within(gain)}: {verdict}. "
        f"{best.method} emits {best.tau_micro.text()} tokens a round{_within(best.tau_micro)}, "
        f"and {best.identical.text('.0%')} of its {best.prompts} prompts have exactly {baseline}'s tokens."
    )


def write_seed_headline(overall: dict[str, Measured], baseline: str, reference: str | None) -> str:
    """Say which choice has the largest τ, its speed, and how it compares with the reference."""
    _, measured = max(overall.items(), key=lambda entry: entry[1]["tau_macro"].mean.value)
    tau = measured["tau_macro"]
    tied = [name for name, other in overall.items() if other["tau_macro"].mean.text() == tau.mean.text()]
    first = _names(tied, "has", "have")
    words = f"{first} the largest τ by prompt, {tau.mean.text()} over {len(tau.values)} seeds{_within(tau.mean)}"
    if "speed_up" in measured:
        speed = measured["speed_up"].mean
        words += f", at {speed.text()} times the speed of {baseline}{_within(speed)}"
    if len(tied) > 1 or tau.gain is None or not tau.gain.significance():
        return f"{words}."
    verdict = tau.gain.direction or "no difference shown"
    return (
        f"{words}. Against {reference} it is {tau.gain.text('+.2f')}{_within(tau.gain, '+.2f')}, "
        f"{tau.gain.significance()} after Holm's correction: {verdict}."
    )


def choose_cells(cells: Cells) -> list[tuple[str, int]]:
    """Choose one cell of each choice: the first seed that all choices have, or else the first of its own."""
    seeds: dict[str, set[int]] = {}
    for choice, seed in cells:
        seeds.setdefault(choice, set()).add(seed)
    shared = set.intersection(*seeds.values()) if seeds else set()
    return [(choice, min(shared or trained)) for choice, trained in seeds.items()]


def select_records(cells: Cells, chosen: list[tuple[str, int]]) -> list[Record]:
    """Each choice's own records from its chosen cell, and those of the baselines from the first chosen cell."""
    return [
        record
        for place, cell in enumerate(chosen)
        for record in cells[cell]
        if record.method == cell[0] or (place == 0 and record.method in BASELINES)
    ]


def _names(names: list[str], one: str, several: str) -> str:
    """Those who are first, with the verb; two that are written alike are both first."""
    return f"{names[0]} {one}" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} {several}"


def _within(value: Estimate, form: str = ".2f") -> str:
    return f" (95 % interval {value.interval(form)})" if value.interval(form) else ""
