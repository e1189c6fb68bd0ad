"""`poss sweep`: an experiment as a folder. Choices × seeds are trained and measured, and one table sums them up.

NAME/
  sweep.yaml               what all trainings have in common, the choices, the seeds, what is measured
  answers.parquet          the answers on which they were measured
  choice=CHOICE/seed=N/    a cell, one training of one choice: its draft, its TensorBoard file, and

    cell.json              what it was begun with: settings, and digests of its inputs; with others it does not resume
    rounds.parquet         what it accepts (`evaluation/rounds.py`)
    run.json               how it was measured; once it also has `cell` and `scalars`, the cell is done
"""

import json
import re
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from itertools import product
from math import gcd
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from tqdm import tqdm
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from poss_lightning.configs import ConfigSource, check_options, read_config
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.folder import local_folder
from poss_lightning.evaluation import benchmark, replay
from poss_lightning.evaluation.provenance import describe_inputs, origin
from poss_lightning.evaluation.record import write_run
from poss_lightning.evaluation.rounds import CELL, RUN, UNFINISHED, check_method_names, move_answers
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import atomic, conf, find_config, read_json, sha256
from poss_lightning.machine import choose_device
from poss_lightning.ranges import Seed, describe_refusal
from poss_lightning.reports.compare import print_findings
from poss_lightning.reports.results import find
from poss_lightning.reports.scalars import last_values, read_scalars
from poss_lightning.terminal import is_user_error
from poss_lightning.training.command import BASE
from poss_lightning.training.fit import OPTIONS, build, compose, fit_once
from poss_lightning.training.run_folder import FINISHED
from poss_lightning.work import Work, check_same, flat

SETTINGS = "sweep.yaml"
MEASURES = {"replay": replay.replay, "benchmark": benchmark.benchmark}


@dataclass(frozen=True)
class Cell:
    """One training of one choice, as sweep.yaml asks for it."""

    choice: str
    seed: int
    folder: Path
    configs: list[ConfigSource]  # what `poss fit` gets: configs, then options, in order
    measure: str  # "replay" or "benchmark"
    options: dict  # of that command

    @property
    def name(self) -> str:
        return f"{self.choice}, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        file = self.folder / RUN
        return file.is_file() and "cell" in read_json(file)

    @cached_property
    def training(self) -> dict[str, Any]:
        """All options of the training."""
        return compose(*self.configs)

    def settings(self) -> dict[str, Any]:
        """Return what sweep.yaml asks for, by dotted names: options of training and measure, and digests of configs."""
        fit: dict[str, Any] = {}
        for options in (flat(config) for config in self.configs if not isinstance(config, str)):
            lists = {name: fit.get(name, []) + value for name, value in options.items() if name.endswith("+")}
            fit |= options | lists
        configs = {name: sha256(find_config(name)) for name in self.configs if isinstance(name, str)}
        settings = {"configs": configs, "fit": fit, self.measure: flat(self.options)}
        return json.loads(json.dumps(settings))

    def recorded(self) -> dict[str, Any]:
        """Return settings, inputs and processes of the earlier runs; of a new cell its settings alone."""
        if self.is_done:
            return read_json(self.folder / RUN)["cell"]
        note = self.folder / CELL
        return read_json(note) if note.is_file() else {"settings": self.settings(), "inputs": {}, "processes": []}

    def check_settings(self) -> None:
        """Raise ValueError if it was begun with other settings."""
        check_same(self.folder, self.recorded()["settings"], self.settings())

    def train(self) -> None:
        """Train and measure, or resume; ValueError if it was begun with other inputs."""
        recorded = self.recorded()
        inputs = {BASE: sha256(conf(BASE))} | describe_inputs(self.training, self._start(), self.options)
        check_same(self.folder, inputs | recorded["inputs"], inputs)
        processes = [*recorded["processes"], origin()]
        facts = {"settings": self.settings(), "inputs": recorded["inputs"] | inputs, "processes": processes}
        with atomic(self.folder / CELL) as path:
            path.write_text(json.dumps(facts, indent=1) + "\n")
        draft = fit_once(self.folder, *self.configs)
        MEASURES[self.measure](**self._measure_options(draft))
        work = Work(self.folder.parents[1] / UNFINISHED)
        with work.exclusive():
            move_answers(self.folder, self.folder.parents[1])
            work.clear()
        scalars = read_scalars(self.folder).get(str(self.folder), {})  # a short training logs none
        write_run(self.folder, read_json(self.folder / RUN) | {"cell": facts, "scalars": last_values(scalars)})

    def check(self, coming: Collection[Path]) -> None:
        """Raise what training or measuring would; it may start from trainings in the folders `coming`."""
        options = self._measure_options(self.folder / "draft-last")
        choose_device(options["device"])
        store = FeatureStore(options["store"]) if self.measure == "replay" else None
        if suites := options.get("suites"):
            _read_suites(tuple(suites) if isinstance(suites, list) else suites, options["limit"])
        if (self.folder / FINISHED).exists():
            return
        start = self._start(coming)
        is_coming = start is not None and start.parent.resolve() in coming
        if draft := build(*self.configs, *[{"model": {"start_from": None}}] * is_coming):
            TreePlan(options["depth"], options["nodes"], options["tree_width"], options["lookup"]).for_draft(draft)
            if store:
                replay.check_store(store, draft)

    def _measure_options(self, draft: Path) -> dict:
        """Return the arguments of the function that measures it."""
        options = {**self.options, "out": str(self.folder), "drafts": {self.choice: str(draft)}}
        return check_options(MEASURES[self.measure], options)

    def _start(self, coming: Collection[Path] = ()) -> Path | None:
        """Return the folder of the draft it starts from; ValueError for an unfinished one, as it may still change."""
        if not (draft := self.training["model"]["start_from"]):
            return None
        folder = local_folder(draft)
        training = folder.parent
        if training.resolve() not in coming and (training / OPTIONS).is_file() and not (training / FINISHED).exists():
            raise ValueError(f"{self.folder} starts from {draft}, but {training} is not finished: finish it first")
        return folder


_read_suites = cache(read_suites)  # once for all trainings that ask the same questions: the hub may have to send them


class FitOptions(TypedDict, total=False):
    """Options of `poss fit`, nested."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]

    config: str | list[str] | None  # YAML files


@dataclass(frozen=True)
class Sweep:
    """The content of `sweep.yaml`; `${seed}` stands for the seed anywhere in fit, choices and measure."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    choices: Annotated[dict[Annotated[str, Field(pattern=r"^[\w.+-]+$")], FitOptions | None], Field(min_length=1)]
    seeds: Annotated[list[Seed], Field(min_length=1)]  # of weights, order and noise
    fit: FitOptions | None = None  # those that all choices have in common
    replay: dict | None = None  # options of `poss replay`, or
    benchmark: dict | None = None  # of `poss benchmark`
    reference: str | None = None  # the choice that the others are compared with

    @classmethod
    def load(cls, file: Path) -> "Sweep":
        """Read a YAML file; FileNotFoundError or ValueError names file and field."""
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; an experiment is a folder with a {SETTINGS}")
        try:
            experiment = TypeAdapter(cls).validate_python(read_config(str(file)))
            experiment.check()
        except ValueError as error:
            reason = describe_refusal(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{file} is not a sweep: {reason}") from error
        return experiment

    def check(self) -> None:
        """Raise ValueError, which names it, for a wrong field."""
        check_method_names(self.choices)
        if (self.replay is None) == (self.benchmark is None):
            raise ValueError("give one of replay and benchmark, the options of how choices are measured")
        if "drafts" in (self.replay or self.benchmark or {}):
            raise ValueError("drafts is among the options of the measure; each choice's own draft is what is measured")
        if self.reference not in (None, *self.choices):
            raise ValueError(f"reference is {self.reference!r}, which is none of {', '.join(self.choices)}")

    def cells(self, experiment: Path) -> list[Cell]:
        """Every choice of the first seed, then of the second, and so on. What a choice sets counts before `fit`."""
        measure = "replay" if self.benchmark is None else "benchmark"
        cells = []
        for seed, choice in product(dict.fromkeys(map(int, self.seeds)), self.choices):
            text = json.dumps([self.fit or {}, self.choices[choice] or {}, getattr(self, measure)])
            text = text.replace('"${seed}"', str(seed)).replace("${seed}", str(seed))  # a number, or within a text
            common, special, options = json.loads(text)
            seeds = {"seed_everything": seed, "data.seed": seed}
            seeds |= {name: value for name, value in (flat(common) | flat(special)).items() if name in seeds}
            files = [own.pop("config", None) or [] for own in (common, special)]
            files = [[file] if isinstance(file, str) else file for file in files]
            configs = [*files[0], common, *files[1], special, seeds]
            folder = experiment / f"choice={choice}" / f"seed={seed}"
            cells.append(Cell(choice, seed, folder, configs, measure, options))
        return cells


def sweep(folder: str, shard: str = "1/1") -> None:
    """Train and measure every choice with every seed, skip what is done, and sum up what there is.

    Several processes, or the jobs of an array, may share an experiment: each takes its shard.

    Args:
        folder: folder of the experiment, with a sweep.yaml.
        shard: i/n, the i-th of n shares of the trainings.
    """
    experiment = Sweep.load(Path(folder) / SETTINGS)
    cells = experiment.cells(Path(folder))
    share, failed = _share(cells, shard), []
    _check(Path(folder), cells, share)
    todo, began = [cell for cell in share if not cell.is_done], time.monotonic()
    for number, cell in enumerate(todo):
        seconds = (time.monotonic() - began) / max(number, 1) * (len(todo) - number)
        left = f", {timedelta(seconds=round(seconds))} left" if number else ""
        print(f"\n[{number + 1}/{len(todo)}] {cell.name}{left}", flush=True)
        try:
            with Work(cell.folder / "training").part("cell") as acquired:
                if not acquired:
                    print("another process is training it")
                elif not cell.is_done:  # by another process, a moment ago
                    cell.train()
        except Exception as error:  # of any kind: it does not keep the other trainings from running
            if not is_user_error(error):
                traceback.print_exc()
            print(f"FAILED {cell.name}: {' '.join(str(error).split())}", flush=True)
            failed.append(cell.name)
    done = [cell for cell in cells if cell.is_done]
    print(f"\n{folder}: {len(done)} of {len(cells)} trainings are done")
    if done:
        reference = experiment.reference if experiment.reference in {cell.choice for cell in done} else None
        print_findings(find([cell.folder for cell in done], reference=reference), all=True)
    if failed:
        raise ValueError(f"{len(failed)} of {len(share)} trainings failed: {'; '.join(failed)}")


def _check(folder: Path, cells: list[Cell], share: list[Cell]) -> None:
    """Raise ValueError for a training made with different settings, or one of this share that would fail; name it."""
    coming = {cell.folder.resolve() for cell in cells if not cell.is_done}
    for cell in tqdm(cells, desc="check", delay=5, leave=False):
        try:
            cell.check_settings()
            if cell in share and not cell.is_done:
                cell.check(coming)
        except Exception as error:
            if not is_user_error(error):
                raise
            raise ValueError(f"{folder / SETTINGS}: {cell.name}: {error}") from error


def _share(cells: list[Cell], shard: str) -> list[Cell]:
    number, shares = map(int, shard.split("/")) if re.fullmatch(r"\d+/\d+", shard) else (0, 0)
    if not 1 <= number <= shares:
        raise ValueError(f"shard is {shard!r}; it must be i/n, for example 1/4, with i from 1 to n")
    choices = len({cell.choice for cell in cells})
    turn = int(gcd(choices, shares) > 1)  # with each seed, so that no share, and so no machine, has one choice alone
    return [cell for i, cell in enumerate(cells) if (i + turn * (i // choices)) % shares == number - 1]
