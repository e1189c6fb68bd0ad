"""Scalars of training runs, read back from their TensorBoard event files."""

import re
from collections.abc import Iterable
from pathlib import Path

Series = list[tuple[int, float]]  # (step, value), in order of steps


def read_scalars(folders: Iterable[str | Path] | str | Path) -> dict[str, dict[str, Series]]:
    """The scalars of every folder that holds event files, at any depth: by folder, then by tag.

    Raises:
        FileNotFoundError: no such folder.
    """
    found: dict[str, dict[str, Series]] = {}
    for folder in [Path(folders)] if isinstance(folders, str | Path) else map(Path, folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; give the folder of a training run")
        for place in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
            found[str(place)] = _read_folder(place)
    return {name: scalars for name, scalars in found.items() if scalars}


def by_depth(scalars: dict[str, Series], name: str) -> dict[int, Series]:
    """The series `name/depth_1`, `name/depth_2` and so on, by depth."""
    tags = {tag: re.fullmatch(rf"{re.escape(name)}/depth_(\d+)", tag) for tag in scalars}
    depths = {int(match[1]): tag for tag, match in tags.items() if match}
    return {depth: scalars[depths[depth]] for depth in sorted(depths)}


def _read_folder(folder: Path) -> dict[str, Series]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
