"""What records say: every method summed up, by temperature, and what to know before methods are compared."""

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
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
from poss_lightning.reports.summary import ALL, Answers, MethodSummary, by_choice, by_method, summarise
from poss_lightning.terminal import announced

AUTO = (
    "Trees were sized by their cost (tree: auto), so a round may end before a position is drafted: pos-acc and τ "
    "depend on the draft, on this machine, and on earlier prompts, from which auto learns."
)
TRAINED_ONCE = (
    "Each method was trained once: 95 % intervals are for other prompts, and say nothing about other trainings."
)
SEEDS = "95 % intervals are for other trainings and other prompts."
APART = "Each way of sampling is compared, and corrected, by itself."


class Findings(NamedTuple):
    """What records say.

    Attributes:
        rows: the methods over all prompts, then by suite.
        speed: the measure by which speeds are compared: a sweep's choices were timed apart, each beside its baseline.
        notes: what to know before methods are compared.
        answers: of the first training of each method, named as the rows are.
        costs: of each method, where `tree: auto` measured them; of several runs the last.
        sources: what all this was read from.
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
    groups: dict[str, list[Source]] = {}
    for source in sorted(sources, key=_sampling):
        temperature, top_k, top_p = _sampling(source)
        name = f"T = {temperature:g}" + f", top_k {top_k}" * (top_k > 0) + f", top_p {top_p:g}" * (top_p < 1)
        groups.setdefault(name, []).append(source)
    parts = []
    for name, group in groups.items():
        suffix, place = (f", {name}", f"at {name}: ") if len(groups) > 1 else ("", "")
        try:
            parts.append(_find(group, baseline, reference, suffix))
        except ValueError as error:
            raise ValueError("; ".join([f"{place}{error}", *not_comparable(group)])) from error
    timed = next((part for part in parts if part.baseline), parts[0])
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return timed._replace(
        rows=[row for part in parts for row in part.rows],
        notes=[*notes, *[APART] * (len(parts) > 1)],
        answers={name: answers for part in parts for name, answers in part.answers.items()},
        costs={name: costs for part in parts for name, costs in part.costs.items()},
        sources=sources,
    )


def _sampling(source: Source) -> tuple[float, int, float]:
    """Temperature, top-k and top-p of a run; greedy where its run.json does not say."""
    config = as_object((source.run or {}).get("config"))
    temperature = config.get("temperature") or 0
    return (temperature, config.get("top_k") or 0, config.get("top_p") or 1) if temperature else (0, 0, 1)


def _find(sources: list[Source], baseline: str, reference: str | None, suffix: str) -> Findings:
    """What records of one way of sampling say; `suffix` is added to the names of methods."""
    runs, cells = by_folder(sources), by_cell(sources)
    records = [record for source in sources for record in source.records]
    trainings = by_choice(cells) if cells else by_method(records)
    decoded = {name for by_seed in trainings.values() for beside in by_seed.values() for name in beside}
    is_timed = any(record.seconds for record in records)  # else all were replayed
    if is_timed and decoded & set(BASELINES) and baseline not in decoded:
        raise ValueError(f"baseline is {baseline!r}; these records have {', '.join(sorted(decoded & set(BASELINES)))}")
    rows = summarise(trainings, baseline=baseline if is_timed else None, reference=reference, depths=find_depths(runs))
    notes = not_comparable(sources)
    if any(len(row.seeds) > 1 for row in rows):
        notes.append(SEEDS)
        seeds = {seed for row in rows if row.method == reference for seed in row.seeds}
        if few := sorted({row.method for row in rows if row.gains and len(seeds & {*row.seeds}) == 1}):
            notes.append(
                f"One seed alone is shared with {reference}, so the interval is for other prompts: {', '.join(few)}."
            )
    else:
        notes.append(TRAINED_ONCE)
    if any(as_object(run.get("config")).get("tree") == "auto" for run in runs.values()):
        notes.append(AUTO)
    firsts = {name: next(iter(by_seed.values())) for name, by_seed in trainings.items()}
    answers = {name: own for name, own in next(iter(firsts.values())).items() if name in BASELINES}
    answers |= {name: beside[name] for name, beside in firsts.items()}
    costs = {name: each for run in runs.values() for name, each in as_object(run.get("costs")).items()}
    return Findings(
        rows=[replace(row, method=row.method + suffix) for row in rows],
        baseline=baseline if any("speed_up" in row.values for row in rows) else None,
        reference=reference,
        speed="speed_up" if cells else "tokens_per_second",
        notes=notes,
        answers={name + suffix: own for name, own in answers.items()},
        costs={name + suffix: Costs.read(each) for name, each in costs.items()},
        sources=sources,
    )


def not_comparable(sources: Iterable[Source]) -> list[str]:
    """A warning for each input (store, start, config), and each circumstance of a measurement, that differs."""
    seen: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        run = source.run or {}
        options = as_object(run.get("config"))
        facts: dict[str, Any] = {**source.inputs, "dtype": options.get("dtype")}
        if any(record.seconds for record in source.records):
            facts |= {"max_new_tokens": options.get("max_new_tokens")}
            facts |= {name: run.get(name) for name in ("machine", "device")}
        for name, value in facts.items():
            if value is not None:
                seen[name].add(str(value))
    return [
        f"WARNING: not comparable: these records had {len(different)} different {public_name(name)}"
        for name, different in seen.items()
        if len(different) > 1
    ]


def name_sources(sources: Iterable[Source]) -> str:
    """A title for sources: the folder that holds them all, for a sweep's cells the experiment's."""
    parts = Path(os.path.commonpath([source.folder.absolute() for source in sources])).parts
    named = public_name(Path(*parts[: parts.index("cells")] if "cells" in parts else parts))
    return "records" if named == "." else named
