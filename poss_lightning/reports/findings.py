"""What records say: every method summed up, by temperature, and what to know before methods are compared."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

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
from poss_lightning.reports.summary import ALL, Answers, MethodSummary, Training, by_choice, by_method, summarise
from poss_lightning.terminal import announced

GREEDY = (0, 0, 1.0)  # temperature, top-k and top-p
AUTO = (
    "Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft and on this machine."
)
PROMPTS = "Each method was trained once: 95 % intervals are for other prompts, and say nothing about other trainings."
SEEDS = "95 % intervals are for other trainings and other prompts."


class Findings(NamedTuple):
    """What records say.

    Attributes:
        rows: the methods over all prompts, then by suite.
        speed: the measure by which speeds are compared: a sweep's choices were timed apart, each beside its baseline.
        notes: what to know before methods are compared.
        answers: of one training of each method that drafts or not, for what shows answers one by one.
        costs: of each method, where `tree: auto` measured them; of several runs the last.
        sources: that all this was read from.
    """

    rows: list[MethodSummary]
    baseline: str | None
    reference: str | None
    speed: str
    notes: list[str]
    answers: dict[str, Answers]
    costs: dict[str, Costs]
    sources: list[Source]

    @property
    def overall(self) -> list[MethodSummary]:
        """The rows over all suites."""
        return [row for row in self.rows if row.suite == ALL]


@announced("reading records")
def find(records: Paths, *, baseline: str = "plain", reference: str | None = None) -> Findings:
    """What records say.

    Args:
        records: files, or folders that have some in them or below; those of a sweep are in folders CHOICE/seed-N.
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
    found = []
    for temperature, those in group_by_temperature(sources).items():
        try:
            found.append((f", T = {temperature}", _find(those, baseline, reference)))
        except ValueError as error:
            place = f"at T = {temperature}: " if temperature != "0" else ""
            raise ValueError("; ".join([f"{place}{error}", *not_comparable(those)])) from error
    first = found[0][1]
    if len(found) == 1:
        return first
    rows = [replace(row, method=row.method + name) for name, one in found for row in one.rows]
    notes = [*first.notes, "Each temperature is compared, and corrected, by itself."]
    return first._replace(rows=rows, notes=list(dict.fromkeys(notes)), sources=sources)


def _find(sources: list[Source], baseline: str, reference: str | None) -> Findings:
    """What records of one temperature say."""
    runs, cells = by_folder(sources), by_cell(sources)
    every = [record for source in sources for record in source.records]
    trainings = by_choice(cells) if cells else by_method(every)
    beside = {name for by_seed in trainings.values() for one in by_seed.values() for name in one.beside}
    timed = any(record.seconds for record in every)  # else all were replayed
    if timed and baseline not in beside and beside & set(BASELINES):
        raise ValueError(f"baseline is {baseline!r}; these records have {', '.join(sorted(beside & set(BASELINES)))}")
    compared = {"baseline": baseline if timed else None, "reference": reference}
    rows = summarise(trainings, **compared, depths=find_depths(runs))
    chosen = choose_seeds(trainings)
    several = max(len(row.seeds) for row in rows) > 1
    notes = [*not_comparable(sources), SEEDS if several else PROMPTS, *([AUTO] if _is_auto(runs) else [])]
    return Findings(
        rows=rows,
        baseline=baseline if any("speed_up" in row.values for row in rows) else None,
        reference=reference,
        speed="speed_up" if cells else "tokens_per_second",
        notes=notes,
        answers=choose_answers(trainings, chosen),
        costs=read_costs(sources),
        sources=sources,
    )


def _is_auto(runs: Mapping[str, dict]) -> bool:
    return any(as_object(run.get("config")).get("tree") == "auto" for run in runs.values())


def group_by_temperature(sources: Iterable[Source]) -> dict[str, list[Source]]:
    """The sources by the temperature of their runs, the lowest first; where no run tells it, it is 0.

    Raises:
        ValueError: sources of one temperature were sampled with different top-k or top-p.
    """
    groups: dict[float, list[Source]] = {}
    cuts: dict[float, tuple[Source, list]] = {}  # top-k and top-p of each temperature, and who has them
    for source in sources:
        temperature, *cut = _sampled(source)
        groups.setdefault(temperature, []).append(source)
        first, known = cuts.setdefault(temperature, (source, cut))
        if cut != known:
            raise ValueError(
                f"{first.folder} was sampled with top_k {known[0]} and top_p {known[1]}, {source.folder} with top_k "
                f"{cut[0]} and top_p {cut[1]}; records of one temperature must agree in both"
            )
    return {f"{temperature:g}": groups[temperature] for temperature in sorted(groups)}


def _sampled(source: Source) -> tuple[float, int, float]:
    """Temperature, top-k and top-p of its run, 0, 0 and 1 where it does not tell them or is greedy."""
    config = as_object((source.run or {}).get("config"))

    def number(name: str, usual: float) -> float:
        return value if isinstance(value := config.get(name), int | float) else usual

    if not (temperature := number("temperature", 0)):
        return GREEDY
    return temperature, int(number("top_k", 0)), number("top_p", 1.0)


def not_comparable(sources: Iterable[Source]) -> list[str]:
    """A warning for each input (store, start, config) of which trainings had different ones."""
    digests: dict[str, set[str]] = {}
    for source in sources:
        for name, digest in source.inputs.items():
            digests.setdefault(name, set()).add(str(digest))
    return [
        f"WARNING: not comparable: these trainings had {len(different)} different {public_name(name)}"
        for name, different in digests.items()
        if len(different) > 1
    ]


def choose_seeds(trainings: Mapping[str, Mapping[int, Training]]) -> dict[str, int]:
    """A seed of each method: the first that all have, or else its own first."""
    shared = set.intersection(*(set(by_seed) for by_seed in trainings.values()))
    return {name: min(shared or by_seed) for name, by_seed in trainings.items()}


def choose_answers(trainings: Mapping[str, Mapping[int, Training]], chosen: dict[str, int]) -> dict[str, Answers]:
    """Each method's answers of its chosen seed, and of baselines from the first."""
    answers = {name: trainings[name][seed].answers for name, seed in chosen.items()}
    first = next(iter(chosen))
    return {name: own for name, own in trainings[first][chosen[first]].beside.items() if name in BASELINES} | answers


def name_sources(sources: Iterable[Source]) -> str:
    """What a page or table of them is called: their folder, of a sweep's cells the experiment's."""
    places = [source.folder.absolute() for source in sources]
    places = [place.parents[1] if re.fullmatch(r"seed-\d+", place.name) else place for place in places]
    places = list(dict.fromkeys(place.parent if place.name == "cells" else place for place in places))
    if len(places) > 1 and len({place.parent for place in places}) == 1:
        places = [places[0].parent]
    named = ", ".join(public_name(place) for place in places[:2]) + ", …" * (len(places) > 2)
    return "records" if named == "." else named


def read_costs(sources: Iterable[Source]) -> dict[str, Costs]:
    """The costs of each method, where `tree: auto` measured them; of several runs the last."""
    by_name: dict[str, Costs] = {}
    for source in sources:
        for method, costs in ((source.run or {}).get("costs") or {}).items():
            by_name[method] = Costs.read(costs)
    return by_name
