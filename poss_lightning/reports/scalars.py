"""Scalars of training runs, read from their TensorBoard event files; the seeds of a choice are taken together.

A run in `CHOICE/seed-N` is one of its choice's seeds; any other run is a choice of its own.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from poss_lightning.evaluation.cells import packed_cells
from poss_lightning.reports.statistics import Estimate, Mean, interval

Series = list[tuple[int, float]]  # (step, value), in order of steps
Scalars = dict[str, Series]  # of one run, by tag
SEED, VERSION = re.compile(r"seed-\d+"), re.compile(r"version_\d+")  # the latter are Lightning's


def read_scalars(folders: Iterable[str | Path] | str | Path) -> dict[str, Scalars]:
    """The scalars of every folder that holds event files, at any depth: by folder, then by tag.

    A finished cell of an experiment (`evaluation/cells.py`) whose folder has none gives the last value of each.

    Raises:
        FileNotFoundError: no such folder.
    """
    by_folder: dict[str, Scalars] = {}
    for folder in [Path(folders)] if isinstance(folders, str | Path) else map(Path, folders):
        cells = packed_cells(folder)
        if not folder.is_dir() and not cells:
            raise FileNotFoundError(f"{folder}: no such folder; give the folder of a training run")
        events = {file.parent for file in folder.rglob("events.out.tfevents.*")}
        last = {cell.folder: cell for cell in cells if cell.folder not in events}
        for place in sorted(events | last.keys()):
            by_folder[str(place)] = last[place].last_scalars() if place in last else _read_events(place)
    return {name: scalars for name, scalars in by_folder.items() if scalars}


def _read_events(folder: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def series_by_depth(scalars: Scalars, name: str) -> dict[int, Series]:
    """The series `name/depth_1`, `name/depth_2` and so on, by depth."""
    prefix = f"{name}/depth_"
    tags = {int(tag.removeprefix(prefix)): tag for tag in scalars if tag.startswith(prefix)}
    return {depth: scalars[tags[depth]] for depth in sorted(tags)}


def group_by_choice(runs: dict[str, Scalars]) -> dict[str, list[Scalars]]:
    """The runs of each choice, named by what its path does not share: of `runs/hass`, `runs/eagle` hass, eagle."""
    folders: dict[Path, dict[str, Scalars]] = {}
    for folder, scalars in runs.items():
        parts = Path(folder).absolute().parts
        seeds = [place for place, part in enumerate(parts) if SEED.fullmatch(part)]
        choice, run = (parts[: seeds[-1]], parts[seeds[-1]]) if seeds else (parts, "")
        tags = folders.setdefault(Path(*choice), {}).setdefault(run, {})
        for tag, series in scalars.items():  # several folders of one seed are one run
            tags[tag] = sorted(tags.get(tag, []) + series, key=lambda point: point[0])
    versions = [folder for folder in folders if VERSION.fullmatch(folder.name)]
    for version in versions:
        siblings = sum(other.parent == version.parent for other in versions)
        if siblings == 1 and version.parent not in folders:  # the only version says nothing
            folders[version.parent] = folders.pop(version)
    shared = os.path.commonpath(folders) if folders else ""
    names = {folder: str(folder.relative_to(shared)) for folder in folders}
    return {folder.name if name == "." else name: list(folders[folder].values()) for folder, name in names.items()}


def mean_over_runs(series: Sequence[Series]) -> dict[int, Estimate]:
    """The mean over runs at every step that all of them have; a step logged twice counts as it was last logged."""
    runs = [dict(points) for points in series]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    return {step: mean([run[step] for run in runs]) for step in steps}


def mean(values: Sequence[float]) -> Estimate:
    """The mean of independent runs and its t-interval; no interval for a single run."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return interval(Mean(fmean(values), error, len(values) - 1))
