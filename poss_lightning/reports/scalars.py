"""Scalars of training runs, read from their TensorBoard event files; the seeds of a choice are taken together.

A run in `choice=NAME/seed=N` is one of its choice's seeds; any other run is a choice of its own.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from poss_lightning.evaluation.rounds import RUN
from poss_lightning.files import read_json
from poss_lightning.reports.statistics import Estimate, Mean, interval

KEPT = re.compile(r"val/(loss|tau_tree)|val_(pos_acc_(tree|unroll)|drift_\w+)/depth_\d+|throughput/slots_per_second")
Series = list[tuple[int, float]]  # (step, value), in order of steps
Scalars = dict[str, Series]  # of one run, by tag


def read_scalars(folders: Iterable[str | Path] | str | Path) -> dict[str, Scalars]:
    """Read the scalars of every folder that holds event files, at any depth: by folder, then by tag.

    A finished cell of a sweep that has none, as in a clone, gives the last value of each that its run.json kept, at
    step 0.
    """
    by_folder: dict[str, Scalars] = {}
    for folder in [Path(folders)] if isinstance(folders, str | Path) else map(Path, folders):
        kept = {file.parent: read_json(file).get("scalars", {}) for file in folder.rglob(RUN)}
        found = {place: {tag: [(0, value)] for tag, value in last.items()} for place, last in kept.items()}
        events = {file.parent for file in folder.rglob("events.out.tfevents.*")}
        found |= {place: _read_events(place) for place in events}
        by_folder |= {str(place): found[place] for place in sorted(found) if found[place]}
    return by_folder


def last_values(scalars: Scalars) -> dict[str, float]:
    """Return the last value of each scalar that pages and notebooks read, as the run.json of a cell keeps them."""
    return {tag: float(f"{series[-1][1]:.5g}") for tag, series in sorted(scalars.items()) if KEPT.fullmatch(tag)}


def _read_events(folder: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def series_by_depth(scalars: Scalars, name: str) -> dict[int, Series]:
    """Return the series `name/depth_1`, `name/depth_2` and so on, by depth."""
    prefix = f"{name}/depth_"
    tags = {int(tag.removeprefix(prefix)): tag for tag in scalars if tag.startswith(prefix)}
    return {depth: scalars[tags[depth]] for depth in sorted(tags)}


def group_by_choice(runs: dict[str, Scalars]) -> dict[str, list[Scalars]]:
    """The runs of each choice, named by what its path does not share: of `runs/hass`, `runs/eagle` hass, eagle."""
    folders: dict[Path, list[Scalars]] = {}
    for folder, scalars in runs.items():
        path = Path(folder).absolute()
        seeds = [place for place in (path, *path.parents) if re.fullmatch(r"seed=\d+", place.name)]
        folders.setdefault(seeds[0].parent if seeds else path, []).append(scalars)
    shared = os.path.commonpath(folders) if folders else ""
    names = {folder: str(folder.relative_to(shared)) for folder in folders}
    named = {folder.name if name == "." else name: folders[folder] for folder, name in names.items()}
    return {name.replace("choice=", ""): runs for name, runs in named.items()}


def mean_by_step(runs: Iterable[Scalars], tag: str) -> dict[int, Estimate]:
    """The mean of `tag` at every step that all runs with it have; a step logged twice counts as it was last logged."""
    series = [dict(run[tag]) for run in runs if tag in run]
    steps = sorted(set.intersection(*map(set, series))) if series else []
    return {step: mean([one[step] for one in series]) for step in steps}


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent runs and its t-interval; no interval for a single run."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return interval(Mean(fmean(values), error, len(values) - 1))
