"""`poss sweep`: an experiment as a folder. Choices × seeds are trained and measured, and one table sums them up.

NAME/
  sweep.yaml                what all trainings have in common, the choices, the seeds, what is measured
  cells/CHOICE/seed-N/      cell.json and fit.yaml (settings), made.json (by whom, of what), scalars.json,
                            records.jsonl.gz (records.jsonl of a benchmark) and run.json; beside them the draft and
                            the TensorBoard file
  summary.json              every choice in every measure, over seeds
"""

import json
import math
import re
import traceback
from argparse import ArgumentError
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from filelock import FileLock, Timeout
from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt
from omegaconf import OmegaConf

from poss_lightning import cli
from poss_lightning.draft.specialists import WEIGHTS, here
from poss_lightning.evaluation.records import BASELINES
from poss_lightning.evaluation.surroundings import origin
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.files import atomic, conf, sha256
from poss_lightning.fitting import FINISHED, fitted, named, option
from poss_lightning.fitting import SETTINGS as FIT
from poss_lightning.reports.compare import show
from poss_lightning.reports.findings import find
from poss_lightning.reports.scalars import read_scalars

SETTINGS, BASE, SCALARS = "sweep.yaml", "trainer/base.yaml", "scalars.json"


@dataclass(frozen=True)
class Cell:
    """One training of one choice."""

    choice: str
    seed: int
    folder: Path
    configs: list[str]
    fit: dict  # options on top of the configs
    measure: str  # "replay" or "benchmark"
    options: dict  # of that command

    def settings(self) -> dict:
        """What was asked for."""
        configs = {name: sha256(named(name)) for name in self.configs}
        return {"configs": configs, "fit": self.fit, self.measure: self.options}

    def inputs(self) -> dict[str, str]:
        """Digests of what else it is made of: stores, the draft it starts from, and what every fit reads first."""
        store, start = (option(name, self.configs, self.fit) for name in ("data.store", "model.start_from"))
        files = {place: Path(place) / MANIFEST for place in (store, self.options.get("store")) if place}
        files |= {BASE: conf(BASE)} | ({start: self._start(start) / WEIGHTS} if start else {})
        return {name: sha256(file) for name, file in files.items() if file.is_file()}

    def _start(self, draft: str) -> Path:
        """The folder of the draft it starts from.

        Raises:
            ValueError: of a training that is not finished, as its last validation may be half-way.
        """
        folder = here(draft)
        training = folder.parent
        ours = (training / FIT).is_file() and (training / FIT).read_text().startswith("# after ")
        if ours and not any((training / end).exists() for end in (FINISHED, SCALARS)):
            raise ValueError(f"{self.folder} starts from {draft}, but {training} is not finished: finish it first")
        return folder

    def check(self) -> None:
        """Refuse a folder that was made with other settings.

        Raises:
            ValueError: naming what differs.
        """
        if (earlier := _flat(_read(self.folder / "cell.json"))) and earlier != (now := _flat(self.settings())):
            changed = sorted(name for name in earlier | now if earlier.get(name) != now.get(name))
            raise ValueError(
                f"{self.folder} was made with other settings ({', '.join(changed)}): name the experiment or the choice "
                "otherwise, or remove it"
            )

    def claim(self) -> None:
        """Note what it is made of, and by which process: each that goes on with it adds itself.

        Raises:
            ValueError: another began with other inputs.
        """
        made, inputs = _read(self.folder / "made.json"), self.inputs()
        if changed := sorted(name for name, digest in made.get("inputs", {}).items() if inputs.get(name) != digest):
            raise ValueError(f"{self.folder} was begun with another {changed[0]} than is here now: remove the folder")
        processes = [*made.get("processes", []), origin()]
        for name, facts in {"cell": self.settings(), "made": {"inputs": inputs, "processes": processes}}.items():
            with atomic(self.folder / f"{name}.json") as path:
                path.write_text(json.dumps(facts, indent=1) + "\n")


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

    choices: dict[str, dict | None]
    seeds: list[NonNegativeInt]
    fit: dict | None = None
    replay: dict | None = None
    benchmark: dict | None = None
    reference: str | None = None

    @classmethod
    def read(cls, file: Path) -> "Sweep":
        """Raises:
        FileNotFoundError: no such file.
        ValueError: it is no sweep; the message names file and field.
        """
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; an experiment is a folder with a {SETTINGS}")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        try:
            own = cls(**parser.parse_path(str(file)))
            own.check()
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"{file} is no sweep: {error}") from error
        return own

    def check(self) -> None:
        """Raise ValueError where a field cannot be; the message names it."""
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
        if (self.replay is None) == (self.benchmark is None):
            raise ValueError("give one of replay and benchmark, the options of how choices are measured")
        if "drafts" in (self.replay or self.benchmark or {}):
            raise ValueError("drafts is among the options of the measure; each choice's own draft is what is measured")
        if self.replay is not None and "store" not in self.replay:
            raise ValueError("replay has no store: name that of the answers to replay")
        if self.reference is not None and self.reference not in self.choices:
            raise ValueError(f"reference is {self.reference!r}, which is none of {', '.join(self.choices)}")

    def cells(self, folder: Path) -> list[Cell]:
        """Every choice of the first seed, then of the second, and so on."""
        return [self._cell(folder, choice, int(seed)) for seed, choice in product(self.seeds, self.choices)]

    def _cell(self, folder: Path, choice: str, seed: int) -> Cell:
        measure = "replay" if self.benchmark is None else "benchmark"
        common, special = self.fit or {}, self.choices[choice] or {}
        fit = OmegaConf.merge(common, special)
        configs = [*common.get("config", []), *special.get("config", [])]
        whole = OmegaConf.create({"seed": seed, "fit": fit, "measure": getattr(self, measure)})
        plain = OmegaConf.to_container(whole, resolve=True)
        own = {name: value for name, value in plain["fit"].items() if name != "config"}
        own = {"seed_everything": seed, **own, "data": {"seed": seed, **own.get("data", {})}}
        return Cell(choice, seed, folder / choice / f"seed-{seed}", configs, own, measure, plain["measure"])


def sweep(folder: str, shard: str = "1/1") -> None:
    """Train and measure every choice with every seed, skip what is done, and sum up what there is.

    Several processes, or the jobs of an array, may share an experiment: each takes its shard.

    Args:
        folder: of the experiment, with a sweep.yaml.
        shard: i/n, the i-th of n shares of the trainings.
    """
    own = Sweep.read(Path(folder) / SETTINGS)
    cells = own.cells(Path(folder) / "cells")
    mine, failed = _share(cells, shard), []
    for cell in cells:
        cell.check()
    for number, cell in enumerate(mine, 1):
        if not _measured(cell):
            print(f"\n[{number}/{len(mine)}] {cell.choice}, seed {cell.seed}", flush=True)
            try:
                cell.folder.mkdir(parents=True, exist_ok=True)
                with FileLock(cell.folder / ".lock", timeout=0):
                    cell.claim()
                    _run(cell)
            except Timeout:
                print("another process is at it")
            except Exception as error:  # of whatever kind: the other trainings need not wait for it
                traceback.print_exc()
                failed.append(f"{cell.choice}, seed {cell.seed}: {error}")
    with FileLock(Path(folder) / ".summary.lock"):  # of shards that end together the last one sees all
        done = [cell for cell in cells if _measured(cell)]
        print(f"\n{folder}: {len(done)} of {len(cells)} trainings are done")
        for words in failed:
            print(f"FAILED {words}")
        if done:
            _sum_up(Path(folder), done, own.reference)
    if failed:
        raise ValueError(f"{len(failed)} of {len(mine)} trainings failed:\n" + "\n".join(failed))


def _share(cells: list[Cell], shard: str) -> list[Cell]:
    try:
        place, shares = map(int, shard.split("/"))
    except ValueError:
        place, shares = 0, 0
    if not 1 <= place <= shares:
        raise ValueError(f"shard is {shard!r}; it must be i/n, for example 1/4, with i from 1 to n")
    return cells[place - 1 :: shares]


def _measured(cell: Cell) -> bool:
    return (cell.folder / SCALARS).exists()  # written last


def _run(cell: Cell) -> None:
    """Train, measure, and keep the last of every scalar."""
    draft = fitted(cell.folder, cell.configs, cell.fit)
    given = dict(cell.options)
    places = [str(cell.folder), *([given.pop("store")] if cell.measure == "replay" else [])]
    options = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    cli.run(cell.measure, [*places, f"--drafts.{cell.choice}={draft}", *options])
    scalars = read_scalars(cell.folder)[str(cell.folder)]
    with atomic(cell.folder / SCALARS) as path:
        path.write_text(json.dumps({tag: series[-1] for tag, series in sorted(scalars.items())}, indent=0) + "\n")


def _sum_up(folder: Path, done: list[Cell], reference: str | None) -> None:
    for name, digests in _inputs(done).items():
        if len(digests) > 1:
            print(f"NOT LIKE WITH LIKE: these trainings had {len(digests)} different {name} (see made.json of each)")
    folders = [cell.folder for cell in done]
    if reference not in {cell.choice for cell in done}:
        reference = None
    found = find(folders, reference=reference)
    with atomic(folder / "summary.json") as path:
        path.write_text(json.dumps([_plain(asdict(row)) for row in found.rows], indent=1) + "\n")
    show(found.tables, note=found.note)


def _inputs(done: list[Cell]) -> dict[str, set[str]]:
    """The digests of every input, over all that were made of it."""
    found: dict[str, set[str]] = {}
    for cell in done:
        for name, digest in _read(cell.folder / "made.json").get("inputs", {}).items():
            found.setdefault(name, set()).add(digest)
    return found


def _flat(nested: dict) -> dict[str, object]:
    """With dots between the names of options."""
    flat = {}
    for name, value in nested.items():
        inner = _flat(value) if isinstance(value, dict) else {}
        flat |= {f"{name}.{below}": own for below, own in inner.items()} or {name: value}
    return flat


def _read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def _plain(value: object) -> object:
    """As JSON has it, which knows no nan."""
    if isinstance(value, dict):
        return {name: _plain(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    return None if isinstance(value, float) and math.isnan(value) else value
