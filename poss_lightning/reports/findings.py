"""What records say: over training seeds where choices have several, or a folder each; else over prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from poss_lightning.evaluation.records import (
    BASELINES,
    Record,
    Source,
    by_cell,
    by_folder,
    check_drafts,
    check_targets,
    find_depths,
    has_auto_trees,
    has_seconds,
    read_sources,
    sampled,
)
from poss_lightning.reports.costs import cost_table, read_costs
from poss_lightning.reports.lengths import length_tables
from poss_lightning.reports.seeds import Cells, check_choice, summarise_seeds
from poss_lightning.reports.statistics import Comparison, Estimate
from poss_lightning.reports.summary import ALL, MethodSummary, group, summarise
from poss_lightning.reports.tables import (
    GAIN,
    RATIO,
    Measured,
    Table,
    group_by_choice,
    method_tables,
    position_summaries,
    seed_tables,
    stack_tables,
)
from poss_lightning.terminal import announced

AUTO = (
    " Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft and on this machine."
)


NAMED = 4  # methods with one verdict that are named in a sentence; more are counted


class Effects(NamedTuple):
    """One measure of every method, compared with the reference's."""

    title: str
    reference: str
    own: Estimate  # the reference's own value
    gains: dict[str, Comparison]  # of the others
    form: str  # how a gain is written


class Findings(NamedTuple):
    """What records say."""

    headline: str
    note: str  # how to read the tables
    made: str  # how the intervals were computed
    shares: Mapping[str, Sequence[Estimate]]  # pos-acc of every method that drafts
    tables: list[Table]
    effects: list[Effects]  # none without a reference that drafts
    answers: list[Record]  # of one training of each method
    cells: list[tuple[str, int]]  # choice and seed of these trainings, where the folders have them
    folders: list[str]  # that the answers lie in, or lay in


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
        FileNotFoundError, ValueError: as `read_sources`, `check_targets`, `check_drafts`, `summarise` and
            `summarise_seeds`.
    """
    options: dict = {"baseline": baseline, "reference": reference, "resamples": resamples, "seed": seed}
    sources = read_sources(records)
    check_targets(by_folder(sources))
    by_temperature = group_by_temperature(sources)
    if len(by_temperature) == 1:
        return _find(next(iter(by_temperature.values())), **options)
    _check_temperatures(by_temperature)
    check_drafts(by_folder(sources))
    found = {}
    for name, sources in by_temperature.items():
        try:
            found[name] = _find(sources, **options)
        except ValueError as error:
            raise ValueError(f"at T = {name}: {error}") from error
    return _side_by_side(found)


def _find(sources: list[Source], *, baseline: str, reference: str | None, resamples: int, seed: int) -> Findings:
    """What records of one temperature say."""
    runs, cells = by_folder(sources), by_cell(sources)
    known, chosen = find_depths(runs), choose_cells(cells)
    if not cells:  # whose folders tell the trainings of a choice apart
        check_drafts(runs)
    answers = select_records(cells, chosen) if cells else [record for source in sources for record in source.records]
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
        drafted = {name: found for name, found in group(answers).items() if name not in BASELINES}
        findings.tables.extend(length_tables(drafted, resamples, seed))
    folders = [str(source.folder) for source in sources]
    return findings._replace(cells=chosen, folders=folders, note=findings.note + (AUTO if has_auto_trees(runs) else ""))


def group_by_temperature(sources: Iterable[Source]) -> dict[str, list[Source]]:
    """The sources by the temperature of their runs, the lowest first; where no run tells it, it is 0.

    Raises:
        ValueError: sources of one temperature were sampled with another top-k or top-p.
    """
    groups: dict[float, list[Source]] = {}
    cuts: dict[float, tuple[Source, list]] = {}  # top-k and top-p of each temperature, and who has them
    for source in sources:
        temperature, *cut = sampled(source)
        groups.setdefault(temperature, []).append(source)
        first, known = cuts.setdefault(temperature, (source, cut))
        if cut != known:
            raise ValueError(
                f"{first.folder} was sampled with top_k {known[0]} and top_p {known[1]}, {source.folder} with top_k "
                f"{cut[0]} and top_p {cut[1]}; records of one temperature must agree in both"
            )
    return {f"{temperature:g}": groups[temperature] for temperature in sorted(groups)}


def _check_temperatures(by_temperature: dict[str, list[Source]]) -> None:
    """Raise ValueError where records of several temperatures do not stand side by side."""
    prompts = {
        name: {(record.suite, record.id, record.turn) for source in sources for record in source.records}
        for name, sources in by_temperature.items()
    }
    (first, asked), *others = prompts.items()
    for name, sources in by_temperature.items():
        if by_cell(sources):
            raise ValueError(f"the records of T = {name} are of several trainings; compare each temperature by itself")
    for name, own in others:
        if own != asked:
            raise ValueError(
                f"T = {first} has answers to {len(asked)} prompts and T = {name} to {len(own)}, {len(asked & own)} of "
                "them the same; temperatures are compared on the same prompts"
            )


def _side_by_side(found: dict[str, Findings]) -> Findings:
    """What was found at several temperatures: the methods in one table, and then the other tables of each.

    The answers are those of the first.
    """
    (lowest, first), *_ = found.items()
    together = stack_tables("By temperature", "T", {name: findings.tables[0] for name, findings in found.items()})
    pairs = [(f"T = {name}", findings) for name, findings in found.items()]
    return first._replace(
        headline=" ".join(f"{at}: {findings.headline}" for at, findings in pairs),
        note=f"{first.note} Each temperature is compared, and corrected, by itself.",
        made=f"{first.made}, answers of T = {lowest}",
        shares={f"{name}, {at}": own for at, findings in pairs for name, own in findings.shares.items()},
        tables=[
            together,
            *(replace(table, title=f"{table.title}, {at}") for at, one in pairs for table in one.tables[1:]),
        ],
        effects=[each._replace(title=f"{each.title}, {at}") for at, findings in pairs for each in findings.effects],
    )


def _find_over_prompts(summaries: list[MethodSummary], baseline: str | None, reference: str | None) -> Findings:
    """One training of each method: intervals are for other prompts."""
    overall = [row for row in summaries if row.suite == ALL]
    note = (
        f"{overall[0].prompts} prompts. Each method was trained once: under each value stands its 95 % interval for "
        "other prompts, which says nothing about other trainings."
    )
    shares = {row.method: row.pos_acc for row in overall if row.rounds}
    tables = method_tables(summaries, baseline, reference)
    effects = _effects_over_prompts(overall, reference)
    headline = " ".join([write_headline(overall, baseline), *map(write_verdicts, effects[-1:])])
    return Findings(
        headline=headline,
        note=note,
        made="",
        shares=shares,
        tables=tables,
        effects=effects,
        answers=[],
        cells=[],
        folders=[],
    )


def _find_over_seeds(cells: Cells, baseline: str, reference: str | None, depths: dict[str, int]) -> Findings:
    """Several trainings of each choice."""
    summaries = summarise_seeds(cells, reference=reference, baseline=baseline, depths=depths)
    overall = group_by_choice(summaries)
    note = (
        f"{len(overall)} choices, {len(cells)} trainings. Under each mean over seeds stand its 95 % interval for other "
        "seeds, and the standard deviation of one training."
    )
    effects = _effects_over_seeds(overall, reference)
    return Findings(
        headline=" ".join([write_seed_headline(overall, baseline), *map(write_verdicts, effects[:1])]),
        note=note,
        made="intervals from the spread over seeds and prompts",
        shares={choice: [one.mean for one in position_summaries(measured)] for choice, measured in overall.items()},
        tables=seed_tables(summaries, reference),
        effects=effects,
        answers=[],
        cells=[],
        folders=[],
    )


def _effects_over_prompts(overall: list[MethodSummary], reference: str | None) -> list[Effects]:
    """τ, and the speed where it was measured."""
    drafted = {row.method: row for row in overall if row.rounds}
    if reference not in drafted:
        return []
    own = drafted[reference]
    taus = {name: row.tau_macro_gain for name, row in drafted.items() if row.tau_macro_gain}
    speeds = {name: row.speed_gain for name, row in drafted.items() if row.speed_gain}
    return _known(
        Effects(f"τ macro − {reference}", reference, own.tau_macro, taus, GAIN),
        Effects(f"tokens/s × {reference}", reference, own.tokens_per_second, speeds, RATIO),
    )


def _effects_over_seeds(overall: dict[str, Measured], reference: str | None) -> list[Effects]:
    """τ, and the speed-up where it was measured."""
    if reference is None:
        return []
    effects = []
    for measure, title, form in (("tau_macro", "τ macro −", GAIN), ("speed_up", "speed-up ×", RATIO)):
        measured = {name: row[measure] for name, row in overall.items() if measure in row}
        gains = {name: one.gain for name, one in measured.items() if one.gain}
        if gains:
            effects.append(Effects(f"{title} {reference}", reference, measured[reference].mean, gains, form))
    return _known(*effects)


def _known(*effects: Effects) -> list[Effects]:
    """Those with a gain that the records define."""
    return [one for one in effects if any(gain.value == gain.value for gain in one.gains.values())]  # nan is not itself


def write_verdicts(effects: Effects) -> str:
    """Say who is shown to differ from the reference, and in which direction; and of whom no difference is shown."""
    by_verdict: dict[str, list[str]] = {"larger": [], "smaller": [], "identical": [], "no difference shown": []}
    for name, gain in effects.gains.items():
        by_verdict["identical" if gain.identical else gain.direction or "no difference shown"].append(name)
    verdicts = "; ".join(
        f"{verdict} for {', '.join(names) if len(names) <= NAMED else f'{len(names)} of {len(effects.gains)}'}"
        for verdict, names in by_verdict.items()
        if names
    )
    return f"{effects.title}, after Holm's correction: {verdicts}."


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


def write_seed_headline(overall: dict[str, Measured], baseline: str) -> str:
    """Say which choice has the largest τ, and its speed."""
    _, measured = max(overall.items(), key=lambda entry: entry[1]["tau_macro"].mean.value)
    tau = measured["tau_macro"]
    tied = [name for name, other in overall.items() if other["tau_macro"].mean.text() == tau.mean.text()]
    first = _names(tied, "has", "have")
    words = f"{first} the largest τ by prompt, {tau.mean.text()} over {len(tau.values)} seeds{_within(tau.mean)}"
    if "speed_up" in measured:
        speed = measured["speed_up"].mean
        words += f", at {speed.text()} times the speed of {baseline}{_within(speed)}"
    return f"{words}."


def choose_cells(cells: Cells) -> list[tuple[str, int]]:
    """Choose one cell of each choice: the first seed that all choices have, or else the first of its own."""
    seeds: dict[str, set[int]] = {}
    for choice, seed in cells:
        seeds.setdefault(choice, set()).add(seed)
    shared = set.intersection(*seeds.values()) if seeds else set()
    return [(choice, min(shared or trained)) for choice, trained in seeds.items()]


def select_records(cells: Cells, chosen: list[tuple[str, int]]) -> list[Record]:
    """Each choice's own records from its chosen cell, and those of the baselines from the first chosen cell.

    Raises:
        ValueError: as `check_choice`.
    """
    for cell in chosen:
        check_choice(*cell, cells[cell])
    return [
        record
        for place, cell in enumerate(chosen)
        for record in cells[cell]
        if record.method == cell[0] or (place == 0 and record.method in BASELINES)
    ]


def _names(names: list[str], one: str, several: str) -> str:
    """Those who are first, with the verb; two that are written alike are both first."""
    return f"{names[0]} {one}" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} {several}"


def _within(value: Estimate) -> str:
    return f" (95 % interval {value.interval()})" if value.interval() else ""
