"""What records say: over training seeds where choices have several, or decoded each in a folder; else over prompts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from poss_lightning.evaluation.records import (
    BASELINES,
    Record,
    check_drafts,
    depths,
    read_cells,
    read_records,
    read_runs,
    sized,
    timed,
)
from poss_lightning.reports.costs import cost_table, read_costs
from poss_lightning.reports.seeds import Cells, SeedSummary, over_seeds
from poss_lightning.reports.statistics import LEVEL, Estimate
from poss_lightning.reports.summary import ALL, MethodSummary, summarise
from poss_lightning.reports.tables import Measured, Table, method_tables, of_choices, positions, seed_tables

AUTO = (
    " Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ tell "
    "of a draft and this machine together."
)


class Findings(NamedTuple):
    """What records say."""

    headline: str
    note: str  # how to read the tables
    made: str  # how intervals were
    shares: dict[str, Sequence[Estimate]]  # pos-acc of every method that drafts
    tables: list[Table]
    rows: list[MethodSummary] | list[SeedSummary]  # what the tables show
    answers: list[Record]  # of one training of each method
    cells: list[tuple[str, int]]  # choice and seed of these trainings, where the records tell


def find(
    records: Iterable[str | Path] | str | Path,
    baseline: str = "autoregressive",
    reference: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Findings:
    """What records say.

    Args:
        records: files, or folders that hold some or have such below them; a sweep's, in folders CHOICE/seed-N.
        baseline: the method whose speed is 1 and whose tokens the others should give.
        reference: the method or choice that the others are held against.
        resamples: draws of the bootstrap over prompts.
        seed: of the bootstrap.

    Raises:
        FileNotFoundError, ValueError: as `read_records`, `check_drafts`, `summarise` and `over_seeds`.
    """
    runs, cells = read_runs(records), read_cells(records)
    known, chosen = depths(runs), one_seed(cells)
    answers = own_records(cells, chosen) if cells else read_records(records)
    if not cells:  # whose folders tell the trainings of a choice apart
        check_drafts(runs)
    if len(chosen) < len(cells) or (cells and timed(answers)):  # speeds compare with a folder's own baseline alone
        found = across_seeds(cells, baseline, reference, known)._replace(answers=answers)
    else:
        over = baseline if timed(answers) else None
        found = across_prompts(answers, over, reference, known, resamples, seed)
        if costs := read_costs(runs):
            speed_ups = {
                row.method: row.speed_up[over] for row in found.rows if row.suite == ALL and over in row.speed_up
            }
            found.tables.insert(1, cost_table(costs, speed_ups))
    return found._replace(cells=chosen, note=found.note + (AUTO if sized(runs) else ""))


def across_prompts(
    answers: list[Record], baseline: str | None, reference: str | None, known: dict[str, int], resamples: int, seed: int
) -> Findings:
    """One training of each method: other prompts might come."""
    summaries = summarise(answers, baseline, reference, known, resamples, seed)
    overall = [row for row in summaries if row.suite == ALL]
    note = (
        f"{overall[0].prompts} prompts. Each method was trained once: under each value stands its 95 % interval for "
        "other prompts, which says nothing of another training."
    )
    shares = {row.method: row.pos_acc for row in overall if row.rounds}
    tables, made = method_tables(summaries, baseline, reference), f"{resamples} draws of the bootstrap, seed {seed}"
    return Findings(headline(overall, baseline), note, made, shares, tables, summaries, answers, [])


def across_seeds(cells: Cells, baseline: str, reference: str | None, known: dict[str, int]) -> Findings:
    """Several trainings of each choice."""
    summaries = over_seeds(cells, reference, baseline, known)
    overall = of_choices(summaries)
    note = (
        f"{len(overall)} choices, {len(cells)} trainings. Under each mean over seeds stand its 95 % interval for other "
        "seeds, and the standard deviation of one training."
    )
    shares = {choice: [one.mean for one in positions(own)] for choice, own in overall.items()}
    tables, made = seed_tables(summaries, reference), "intervals from the spread over seeds and prompts"
    return Findings(headline_over_seeds(overall, baseline, reference), note, made, shares, tables, summaries, [], [])


def headline(overall: list[MethodSummary], baseline: str | None) -> str:
    """The fastest drafting method against the baseline, in a sentence or two; or acceptance alone."""
    if baseline is None:
        taus = ", ".join(f"{row.method} {row.tau_macro.text()}{_within(row.tau_macro)}" for row in overall)
        return f"Replayed rounds, without seconds. Tokens a round (τ macro): {taus}."
    drafting = [row for row in overall if row.method not in BASELINES and baseline in row.speed_up]
    if not drafting:
        speeds = ", ".join(f"{row.method} {row.tokens_per_second.text('.1f')}" for row in overall)
        return f"No method here drafts; tokens per second: {speeds}."
    best = max(drafting, key=lambda row: row.speed_up[baseline].value)
    gain = best.speed_up[baseline]
    sure = gain.holm < LEVEL  # the best of several was chosen to be told here
    verdict = "no difference shown" if not sure else "faster" if gain.value > 1 else "slower"
    return (
        f"{best.method} decodes at {gain.text()} times the speed of {baseline}{_within(gain)}: {verdict}. "
        f"It emits {best.tau_micro.text()} tokens a round{_within(best.tau_micro)}, "
        f"and {best.identical.text('.0%')} of its {best.prompts} prompts have exactly {baseline}'s tokens."
    )


def headline_over_seeds(overall: dict[str, Measured], baseline: str, reference: str | None) -> str:
    """The choice with the largest τ, its speed, and what is certain of it against the reference."""
    best, own = max(overall.items(), key=lambda entry: entry[1]["tau_macro"].mean.value)
    tau = own["tau_macro"]
    words = f"{best} has the largest τ by prompt, {tau.mean.text()} over {len(tau.values)} seeds{_within(tau.mean)}"
    if "speed_up" in own:
        words += f", at {own['speed_up'].mean.text()} times the speed of {baseline}{_within(own['speed_up'].mean)}"
    if tau.gain is None or not tau.gain.significance():
        return f"{words}."
    verdict = "no difference shown" if tau.gain.holm >= LEVEL else "larger" if tau.gain.value > 0 else "smaller"
    return (
        f"{words}. Against {reference} it is {tau.gain.text('+.2f')}{_within(tau.gain, '+.2f')}, "
        f"{tau.gain.significance()} after Holm's correction: {verdict}."
    )


def one_seed(cells: Cells) -> list[tuple[str, int]]:
    """One cell of each choice: the first seed that all choices have, or else each one's first."""
    seeds: dict[str, set[int]] = {}
    for choice, seed in cells:
        seeds.setdefault(choice, set()).add(seed)
    shared = set.intersection(*seeds.values()) if seeds else set()
    return [(choice, min(shared or own)) for choice, own in seeds.items()]


def own_records(cells: Cells, chosen: list[tuple[str, int]]) -> list[Record]:
    """Of the chosen cells each choice's own records, and those of the baselines from the first cell."""
    return [
        record
        for place, cell in enumerate(chosen)
        for record in cells[cell]
        if record.method == cell[0] or (place == 0 and record.method in BASELINES)
    ]


def _within(value: Estimate, form: str = ".2f") -> str:
    return f" (95 % interval {value.interval(form)})" if value.interval(form) else ""
