"""What records say: every method summed up, by temperature, and what to know before methods are compared."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from poss_lightning.decoding.costs import Costs
from poss_lightning.evaluation.records import (
    BASELINES,
    Paths,
    Source,
    as_object,
    by_cell,
    by_folder,
    check_drafts,
    check_targets,
    find_depths,
    read_sources,
)
from poss_lightning.files import public_name
from poss_lightning.reports.summary import ALL, Answers, MethodSummary, Trainings, by_choice, by_method, summarise
from poss_lightning.terminal import announced

AUTO = (
    "Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft and on this machine."
)
TRAINED_ONCE = (
    "Each method was trained once: 95 % intervals are for other prompts, and say nothing about other trainings."
)
SEEDS = "95 % intervals are for other trainings and other prompts."
APART = "Each temperature is compared, and corrected, by itself."


class Findings(NamedTuple):
    """What records say.

    Attributes:
        rows: the methods over all prompts, then by suite.
        speed: the measure by which speeds are compared: a sweep's choices were timed apart, each beside its baseline.
        notes: what to know before methods are compared.
        answers: of one training of each method, named as the rows are.
        shown: those of the lowest temperature, to show answers one by one.
        costs: of each method, where `tree: auto` measured them; of several runs the last.
        sources: what all this was read from.
    """

    rows: list[MethodSummary]
    baseline: str | None
    reference: str | None
    speed: str
    notes: list[str]
    answers: dict[str, Answers]
    shown: dict[str, Answers]
    costs: dict[str, Costs]
    sources: list[Source]

    @property
    def overall(self) -> list[MethodSummary]:
        """The rows over all suites."""
        return [row for row in self.rows if row.suite == ALL]


@announced("reading records")
def find(records: Paths, *, baseline: str = "plain", reference: str | None = None) -> Findings:
    """Sum up records.

    Args:
        records: files, or folders with some in them or below; those of a sweep are in folders CHOICE/seed-N.
        baseline: the method whose speed is 1; the others should give its tokens.
        reference: the method or choice that the others are compared with.

    Raises:
        FileNotFoundError, ValueError: as `read_sources`, `check_targets`, `check_drafts`, `by_cell` and `summarise`.
    """
    sources = read_sources(records)
    runs = by_folder(sources)
    check_targets(runs)
    if any(not by_cell([source]) for source in sources):  # folders of a sweep tell the trainings of a choice apart
        check_drafts(runs)
    found = {}
    for temperature, group in _by_temperature(sources).items():
        try:
            found[temperature] = _find(group, baseline, reference)
        except ValueError as error:
            place = f"at T = {temperature:g}: " if temperature else ""
            raise ValueError("; ".join([f"{place}{error}", *not_comparable(group)])) from error
    first = next(iter(found.values()))
    if len(found) == 1:
        return first
    timed = next((one for one in found.values() if one.baseline), first)
    notes = [*(note for one in found.values() for note in one.notes), APART]
    return first._replace(
        rows=[replace(row, method=f"{row.method}, T = {t:g}") for t, one in found.items() for row in one.rows],
        baseline=timed.baseline,
        speed=timed.speed,
        notes=[*dict.fromkeys(notes)],
        answers={f"{name}, T = {t:g}": answers for t, one in found.items() for name, answers in one.answers.items()},
        sources=sources,
    )


def _find(sources: list[Source], baseline: str, reference: str | None) -> Findings:
    """What records of one temperature say."""
    runs, cells = by_folder(sources), by_cell(sources)
    records = [record for source in sources for record in source.records]
    trainings = by_choice(cells) if cells else by_method(records)
    decoded = {name for by_seed in trainings.values() for beside in by_seed.values() for name in beside}
    is_timed = any(record.seconds for record in records)  # else all were replayed
    if is_timed and decoded & set(BASELINES) and baseline not in decoded:
        raise ValueError(f"baseline is {baseline!r}; these records have {', '.join(sorted(decoded & set(BASELINES)))}")
    rows = summarise(trainings, baseline=baseline if is_timed else None, reference=reference, depths=find_depths(runs))
    is_auto = any(as_object(run.get("config")).get("tree") == "auto" for run in runs.values())
    answers = _choose_answers(trainings)
    notes = [SEEDS if any(len(row.seeds) > 1 for row in rows) else TRAINED_ONCE]
    seeds = set(next((row.seeds for row in rows if row.method == reference), ()))
    if notes == [SEEDS] and (
        few := sorted({row.method for row in rows if row.gains and len(seeds & {*row.seeds}) == 1})
    ):
        notes.append(
            f"One seed alone is shared with {reference}, so the interval is for other prompts: {', '.join(few)}."
        )
    return Findings(
        rows=rows,
        baseline=baseline if any("speed_up" in row.values for row in rows) else None,
        reference=reference,
        speed="speed_up" if cells else "tokens_per_second",
        notes=[*not_comparable(sources), *notes, *([AUTO] if is_auto else [])],
        answers=answers,
        shown=answers,
        costs={
            method: Costs.read(costs) for run in runs.values() for method, costs in as_object(run.get("costs")).items()
        },
        sources=sources,
    )


def _by_temperature(sources: Iterable[Source]) -> dict[float, list[Source]]:
    """The sources by the temperature of their runs, in increasing order; 0 where no run.json says.

    Raises:
        ValueError: sources of one temperature were sampled with different top-k or top-p.
    """
    groups: dict[float, list[Source]] = {}
    first: dict[float, tuple[Source, str]] = {}
    for source in sources:
        config = as_object((source.run or {}).get("config"))
        temperature = config.get("temperature") or 0
        top_k, top_p = config.get("top_k") or 0, float(config.get("top_p") or 1)
        cut = f"top_k {top_k} and top_p {top_p:g}" if temperature else "greedy"
        groups.setdefault(temperature, []).append(source)
        other, known = first.setdefault(temperature, (source, cut))
        if cut != known:
            raise ValueError(
                f"{other.folder} was sampled with {known}, {source.folder} with {cut}; records of one temperature must "
                "agree in both"
            )
    return dict(sorted(groups.items()))


def not_comparable(sources: Iterable[Source]) -> list[str]:
    """A warning for each input (store, start, config), and each circumstance of a measurement, that differs."""
    seen: dict[str, set[str]] = {}
    for source in sources:
        run = source.run or {}
        options, is_timed = as_object(run.get("config")), any(record.seconds for record in source.records)
        facts: dict[str, Any] = {**source.inputs, "dtype": options.get("dtype")}
        if is_timed:
            facts |= {"max_new_tokens": options.get("max_new_tokens")}
            facts |= {name: run.get(name) for name in ("machine", "device")}
        for name, value in facts.items():
            if value is not None:
                seen.setdefault(name, set()).add(str(value))
    return [
        f"WARNING: not comparable: these records had {len(different)} different {public_name(name)}"
        for name, different in seen.items()
        if len(different) > 1
    ]


def _choose_answers(trainings: Trainings) -> dict[str, Answers]:
    """Answers of one seed of each method, the first that all have if any; and those of the baselines beside one."""
    shared = set.intersection(*(set(by_seed) for by_seed in trainings.values()))
    chosen = {name: by_seed[min(shared or by_seed)] for name, by_seed in trainings.items()}
    first = next(iter(chosen.values()))
    baselines = {name: answers for name, answers in first.items() if name in BASELINES}
    return baselines | {name: methods[name] for name, methods in chosen.items()}


def name_sources(sources: Iterable[Source]) -> str:
    """A title for sources: their folder, for a sweep's cells the experiment's."""
    places = [source.folder.absolute() for source in sources]
    places = [place.parents[1] if re.fullmatch(r"seed-\d+", place.name) else place for place in places]
    places = list(dict.fromkeys(place.parent if place.name == "cells" else place for place in places))
    if len(places) > 1 and len({place.parent for place in places}) == 1:
        places = [places[0].parent]
    named = ", ".join(public_name(place) for place in places[:2]) + ", …" * (len(places) > 2)
    return "records" if named == "." else named
