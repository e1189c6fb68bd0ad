"""`poss sweep`: an experiment as a folder. Choices × seeds are trained and measured, and one table sums them up.

NAME/
  sweep.yaml                         what all trainings have in common, the choices, the seeds, what is measured
  cells.jsonl, records.parquet       the finished trainings (`evaluation/cells.py`)
  cells/CHOICE/seed-N/               a training: fit.yaml, cell.json (settings, inputs, processes), the draft, the
                                     TensorBoard file, its records and run.json
"""

import json
import re
import shlex
import time
import traceback
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from tqdm import tqdm

from poss_lightning.configs import check_options, read_config
from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.drafting import check_tree
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import WEIGHTS, local_folder
from poss_lightning.evaluation import benchmark, replay
from poss_lightning.evaluation.cells import FOLDERS, NOTE, PackedCell, pack, packed_cells
from poss_lightning.evaluation.provenance import origin
from poss_lightning.evaluation.records import BASELINES, UNFINISHED, has_records, read_records, read_runs
from poss_lightning.evaluation.suites import load_suites, local_files
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import atomic, conf, find_config, read_json, sha256, without_secrets
from poss_lightning.machine import choose_device, choose_precision
from poss_lightning.ranges import Seed, describe
from poss_lightning.reports.compare import print_findings
from poss_lightning.reports.findings import find
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.training.command import BASE
from poss_lightning.training.fit import OPTIONS, build, compose, fit_once
from poss_lightning.training.resume import FINISHED, has_outputs
from poss_lightning.work import Work, flat

SETTINGS, SEED = "sweep.yaml", "${seed}"
MEASURES = {"replay": replay.replay, "benchmark": benchmark.benchmark}
MENDABLE = (ArgumentError, NotImplementedError, OSError, ValueError)  # what an error of says is enough


@dataclass(frozen=True)
class Cell:
    """One training of one choice."""

    choice: str
    seed: int
    folder: Path
    layers: list[str | dict]  # what `poss fit` gets: configs, then options, in their order
    measure: str  # "replay" or "benchmark"
    options: dict  # of that command
    packed: PackedCell | None = None  # where it is done

    @property
    def key(self) -> tuple[str, int]:
        return self.choice, self.seed

    @property
    def name(self) -> str:
        return f"{self.choice}, seed {self.seed}"

    @cached_property
    def training(self) -> dict[str, Any]:
        """All options of its training."""
        return compose(*self.layers)

    def settings(self) -> dict:
        """What was asked for: digests of configs, and options with the values that the training has."""
        configs = {layer: sha256(find_config(layer)) for layer in self.layers if isinstance(layer, str)}
        fit: dict[str, Any] = {}
        for group, name, value in (own for layer in self.layers if isinstance(layer, dict) for own in _own(layer)):
            if name is None:
                fit[group] = self.training[group]
            elif name.endswith("+"):  # what is appended to a list, whatever stands there
                fit.setdefault(group, {})[name] = fit[group].get(name, []) + value
            else:
                fit.setdefault(group, {})[name] = self.training[group][name]
        settings = {"configs": configs, "fit": fit, self.measure: self.options}
        return json.loads(without_secrets(json.dumps(settings)))

    def inputs(self) -> dict[str, str]:
        """Digests of the local files that it is made of: stores, text, the draft it starts from, every fit's config."""
        return self._trained_on() | self._measured_on()

    def _trained_on(self) -> dict[str, str]:
        data, start, trainer = self.training["data"], self.training["model"]["start_from"], self.training["trainer"]
        stores = [data["store"]] if isinstance(data["store"], str) else data["store"] or []
        files = {BASE: conf(BASE)} | {store: Path(store) / MANIFEST for store in stores}
        files |= {data["corpus"]: Path(data["corpus"])} if data["corpus"] else {}
        digests = _digests(files | ({start: self._start(start) / WEIGHTS} if start else {}))
        if (precision := trainer["precision"]) == "auto":  # machines choose differently
            precision = choose_precision(str(trainer["accelerator"]))
        return digests | {"trainer.precision": precision}

    def _measured_on(self) -> dict[str, str]:
        store, suites = self.options.get("store"), self.options.get("suites") or []
        suites = [suites] if isinstance(suites, str) else suites
        files = {store: Path(store) / MANIFEST} if store else {}
        return _digests(files | {str(file): file for suite in suites for file in local_files(suite)})

    def _start(self, draft: str) -> Path:
        """The folder of the draft it starts from; refuse an unfinished one, as it may still change."""
        folder = local_folder(draft)
        training = folder.parent
        if (training / OPTIONS).is_file() and not (training / FINISHED).exists():
            raise ValueError(f"{self.folder} starts from {draft}, but {training} is not finished: finish it first")
        return folder

    @property
    def is_done(self) -> bool:
        """Whether it stands in cells.jsonl."""
        return self.packed is not None

    @property
    def has_records(self) -> bool:
        """Whether its measure has begun to write."""
        return self.is_done or has_records(self.folder)

    @property
    def has_outputs(self) -> bool:
        """Whether its training has left anything."""
        return self.has_records or has_outputs(self.folder)

    def changed(self) -> list[str]:
        """Names of settings that it was made with otherwise; those of its measure count once it has records."""
        earlier = self._note()["settings"]
        if not earlier or not self.has_outputs:
            return []
        asked = self.settings()
        if not self.has_records:
            earlier, asked = ({part: settings[part] for part in ("configs", "fit")} for settings in (earlier, asked))
        earlier, asked = flat(earlier), flat(asked)
        return sorted(name for name in earlier | asked if earlier.get(name) != asked.get(name))

    def claim(self) -> None:
        """Note what it is made of, and by which process: each that goes on with it adds itself.

        Raises:
            ValueError: another began with other inputs.
        """
        note, inputs = self._note(), self.inputs()
        kept = (self._trained_on() if self.has_outputs else {}) | (self._measured_on() if self.has_records else {})
        if other := sorted(name for name, digest in note["inputs"].items() if kept.get(name, digest) != digest):
            raise ValueError(f"{self.folder} was begun with another {other[0]} than is here now: remove the folder")
        if note["processes"] and not self.has_records:  # a measure that left nothing may have had other options
            (self.folder / "run.json").unlink(missing_ok=True)
            Work(self.folder / UNFINISHED).clear()
        facts = {"settings": self.settings(), "inputs": inputs, "processes": [*note["processes"], origin()]}
        with atomic(self.folder / NOTE) as path:
            path.write_text(json.dumps(facts, indent=1) + "\n")

    def run(self) -> None:
        """Train and measure."""
        draft = fit_once(self.folder, *self.layers)
        MEASURES[self.measure](**self.measure_options(draft))

    def pack(self, experiment: Path) -> None:
        """Add it to cells.jsonl and records.parquet, with the last of every scalar."""
        scalars = read_scalars(self.folder)[str(self.folder)]
        last = {tag: series[-1] for tag, series in sorted(scalars.items())}
        (run,) = read_runs(self.folder).values()
        rows = [asdict(record) for record in read_records(self.folder)]
        pack(experiment, self.choice, self.seed, self._note() | {"run": run, "scalars": last}, rows)

    def _note(self) -> dict[str, Any]:
        """What `claim` wrote."""
        if self.packed is not None:
            return self.packed.facts
        file = self.folder / NOTE
        return {"settings": {}, "inputs": {}, "processes": []} | (read_json(file) if file.exists() else {})

    def measure_options(self, draft: Path) -> dict:
        """Arguments of the function that measures it."""
        options = {**self.options, "out": str(self.folder), "drafts": {self.choice: str(draft)}}
        return check_options(MEASURES[self.measure], options)

    def check(self, coming: set[Path]) -> None:
        """Refuse what could only fail later: options nobody has, sizes that do not fit, what is not on this machine.

        Args:
            coming: folders of trainings that it may start from though they are not finished.

        Raises:
            ArgumentError, OSError, ValueError: as the commands would.
        """
        draft = None if (self.folder / FINISHED).exists() else self._build(coming)
        options = self.measure_options(self.folder / "draft-last")
        choose_device(options["device"])
        if draft:
            depth = sum(draft.allocation) if options["depth"] is None else options["depth"]
            check_tree(depth, options["tree_width"])
            Fixed(depth, options["nodes"])
        if self.measure == "benchmark":
            benchmark.check(options)
            _load_suites_once(json.dumps(options["suites"]), options["limit"])
            return
        store = FeatureStore(options["store"])
        if draft and (difference := draft.target.difference(store.target)):
            raise ValueError(f"{options['store']} is of another target than the draft: {difference}")
        if draft:
            store.select(draft.layers)

    def _build(self, coming: set[Path]) -> DraftConfig | None:
        """The draft that it would train; without a start that is not trained yet."""
        start = self.training["model"]["start_from"]
        if start and local_folder(start).parent.resolve() in coming:
            return build(*self.layers, {"model": {"start_from": None}})
        if start:
            self._start(start)
        return build(*self.layers)


@dataclass(frozen=True)
class Sweep:
    """What `sweep.yaml` says.

    Attributes:
        choices: by name, the options that make it, nested as those of `poss fit`; `config` lists YAML files.
        seeds: of weights, order and noise; `${seed}` stands for it anywhere in fit, choices and measures.
        fit: what all choices have in common, in the same form.
        replay: options of `poss replay`, or
        benchmark: options of `poss benchmark`: one of the two.
        reference: the choice that the others are held against.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    choices: dict[str, dict | None]
    seeds: list[Seed]
    fit: dict | None = None
    replay: dict | None = None
    benchmark: dict | None = None
    reference: str | None = None

    @classmethod
    def load(cls, file: Path) -> "Sweep":
        """Raises:
        FileNotFoundError: no such file.
        ValueError: it is no sweep; the message names file and field.
        """
        if file.parent.is_file():
            is_sweep = file.parent.name == SETTINGS
            command = f": poss sweep {shlex.quote(str(file.parent.parent))}" if is_sweep else ""
            raise ValueError(f"{file.parent} is a file; an experiment is the folder of its {SETTINGS}{command}")
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; an experiment is a folder with a {SETTINGS}")
        content = read_config(str(file))
        try:
            experiment = TypeAdapter(cls).validate_python(content)
            experiment.check()
        except ValidationError as error:
            known = [field.name for field in fields(cls)]
            wrong = next((name for name in map(str, content) if name not in known), "")
            near = f"; did you mean {' or '.join(get_close_matches(wrong, known, 1) or known)}?" if wrong else ""
            raise ValueError(f"{file} is no sweep: {describe(error)}{near}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is no sweep: {error}") from error
        return experiment

    def check(self) -> None:
        """Raise ValueError where a field cannot be, OSError where a config is not there; the message names it."""
        if not self.choices or not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"choices are {list(self.choices)} and seeds {self.seeds}; name one or more of each, none twice"
            )
        for name in self.choices:
            if not re.fullmatch(r"[\w.+-]+", name) or name in BASELINES:
                raise ValueError(
                    f"a choice is named {name!r}; it names a folder and a method: letters, digits and -_.+, but none "
                    f"of {', '.join(BASELINES)}"
                )
        for name, options in {"fit": self.fit, **self.choices}.items():
            if not isinstance(files := (options or {}).get("config", []), list):
                raise ValueError(f"config of {name} is {files!r}; it must be a list of YAML files")
            for file in files:
                find_config(str(file))
        if (self.replay is None) == (self.benchmark is None):
            raise ValueError("give one of replay and benchmark, the options of how choices are measured")
        if "drafts" in (self.replay or self.benchmark or {}):
            raise ValueError("drafts is among the options of the measure; each choice's own draft is what is measured")
        if self.replay is not None and "store" not in self.replay:
            raise ValueError("replay has no store: name that of the answers to replay")
        if self.reference is not None and self.reference not in self.choices:
            raise ValueError(f"reference is {self.reference!r}, which is none of {', '.join(self.choices)}")

    def cells(self, experiment: Path) -> list[Cell]:
        """Every choice of the first seed, then of the second, and so on."""
        packed = {cell.key: cell for cell in packed_cells(experiment)}
        pairs = product(map(int, self.seeds), self.choices)
        return [self._cell(experiment / FOLDERS, choice, seed, packed.get((choice, seed))) for seed, choice in pairs]

    def _cell(self, folder: Path, choice: str, seed: int, packed: PackedCell | None) -> Cell:
        measure = "replay" if self.benchmark is None else "benchmark"
        common, special = (_with_seed(options or {}, seed) for options in (self.fit, self.choices[choice]))
        configs = [*common.pop("config", []), *special.pop("config", [])]
        layers = [*configs, {"seed_everything": seed, "data": {"seed": seed}}, common, special]
        place = folder / choice / f"seed-{seed}"
        return Cell(choice, seed, place, layers, measure, _with_seed(getattr(self, measure), seed), packed)


def _with_seed(options: Any, seed: int) -> Any:
    """Options with the seed in the place of `${seed}`."""
    if isinstance(options, dict):
        return {name: _with_seed(value, seed) for name, value in options.items()}
    if isinstance(options, list):
        return [_with_seed(value, seed) for value in options]
    if options == SEED:
        return seed
    return options.replace(SEED, str(seed)) if isinstance(options, str) else options


def _own(options: dict) -> Iterator[tuple[str, str | None, Any]]:
    """What a layer sets, by group and name: `trainer.max_steps: 2`, and `trainer: {max_steps: 2}`."""
    for name, value in options.items():
        group, _, rest = name.partition(".")
        below = {rest: value} if rest else value if isinstance(value, dict) else {None: value}
        yield from ((group, each and each.partition(".")[0], own) for each, own in below.items())


def sweep(folder: str, shard: str = "1/1") -> None:
    """Train and measure every choice with every seed, skip what is done, and sum up what there is.

    Several processes, or the jobs of an array, may share an experiment: each takes its shard.

    Args:
        folder: of the experiment, with a sweep.yaml.
        shard: i/n, the i-th of n shares of the trainings.
    """
    experiment = Sweep.load(Path(folder) / SETTINGS)
    cells = experiment.cells(Path(folder))
    share, seconds, failed = _share(cells, shard), [], []
    _check(Path(folder), cells, share)
    work = Work(Path(folder) / FOLDERS)
    for number, cell in enumerate(share, 1):
        if cell.is_done:
            continue
        remaining = sum(not other.is_done for other in share[number - 1 :])
        expected = f", {timedelta(seconds=round(fmean(seconds) * remaining))} left" if seconds else ""
        print(f"\n[{number}/{len(share)}] {cell.name}{expected}", flush=True)
        try:
            with work.part(f"{cell.choice}/seed-{cell.seed}/training") as acquired:
                if not acquired:
                    print("another process is at it")
                    continue
                if cell.key in {packed.key for packed in packed_cells(folder)}:  # another process has just done it
                    continue
                began = time.monotonic()
                cell.claim()
                cell.run()
                with work.exclusive():
                    cell.pack(Path(folder))
                seconds.append(time.monotonic() - began)
        except Exception as error:  # of whatever kind: the other trainings need not wait for it
            if not isinstance(error, MENDABLE):
                traceback.print_exc()
            print(f"FAILED {cell.name}: {' '.join(str(error).split())}", flush=True)
            failed.append(cell.name)
    cells = experiment.cells(Path(folder))
    done = [cell for cell in cells if cell.is_done]
    print(f"\n{folder}: {len(done)} of {len(cells)} trainings are done")
    if done:
        _sum_up(done, experiment.reference)
    if failed:
        raise ValueError(f"{len(failed)} of {len(share)} trainings failed: {'; '.join(failed)}")


def _check(folder: Path, cells: list[Cell], share: list[Cell]) -> None:
    """Raise ValueError for a training made with other settings, or one of this share that can only fail; name it."""
    changed: dict[Path, list[str]] = {}
    for cell in cells:
        with _named(folder, cell):
            changed |= {cell.folder: names} if (names := cell.changed()) else {}
    if changed:
        first, names = next(iter(changed.items()))
        raise ValueError(
            f"{first} was made with other settings ({', '.join(names)}), one of {len(changed)} such of {len(cells)}: "
            "name the experiment or the choice otherwise, or remove them; of an experiment that you copy, take "
            f"{SETTINGS} alone"
        )
    coming = {cell.folder.resolve() for cell in cells if not cell.is_done}
    for cell in tqdm([cell for cell in share if not cell.is_done], desc="check", delay=5, leave=False):
        with _named(folder, cell):
            cell.check(coming)


@contextmanager
def _named(folder: Path, cell: Cell) -> Iterator[None]:
    """Let an error of a cell say whose it is."""
    try:
        yield
    except MENDABLE as error:
        raise ValueError(f"{folder / SETTINGS}: {cell.name}: {error}") from error


@cache
def _load_suites_once(suites: str, limit: int | None) -> None:
    """Of all trainings that ask the same questions, only for the first: the hub may have to send them."""
    load_suites(json.loads(suites), limit)


def _share(cells: list[Cell], shard: str) -> list[Cell]:
    try:
        place, shares = map(int, shard.split("/"))
    except ValueError:
        place, shares = 0, 0
    if not 1 <= place <= shares:
        raise ValueError(f"shard is {shard!r}; it must be i/n, for example 1/4, with i from 1 to n")
    return cells[place - 1 :: shares]


def _sum_up(done: list[Cell], reference: str | None) -> None:
    if reference not in {cell.choice for cell in done}:
        reference = None
    print_findings(find([cell.folder for cell in done], reference=reference), all=True)


def _digests(files: dict[str, Path]) -> dict[str, str]:
    return {name: sha256(file) for name, file in files.items() if file.is_file()}
