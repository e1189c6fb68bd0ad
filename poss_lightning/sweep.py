"""`poss sweep`: an experiment as a folder. Choices × seeds are trained and measured, and one table sums them up.

NAME/
  sweep.yaml                         what all trainings have in common, the choices, the seeds, what is measured
  cells.jsonl, records.parquet       the finished trainings (`evaluation/cells.py`)
  cells/CHOICE/seed-N/               a training: fit.yaml, cell.json (settings, inputs, processes), the draft, the
                                     TensorBoard file, its records and run.json
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from tqdm import tqdm

from poss_lightning.configs import read_config
from poss_lightning.evaluation.cell import PlannedCell
from poss_lightning.evaluation.cells import FOLDERS, PackedCell, pack, packed_cells
from poss_lightning.evaluation.records import check_names, read_records, read_runs
from poss_lightning.files import find_config
from poss_lightning.ranges import Seed, describe
from poss_lightning.reports.compare import print_findings
from poss_lightning.reports.findings import find
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.terminal import is_told
from poss_lightning.work import Work

SETTINGS, SEED = "sweep.yaml", "${seed}"


@dataclass(frozen=True)
class Sweep:
    """What `sweep.yaml` says.

    Attributes:
        choices: by name, the options that make it, nested as those of `poss fit`; `config` lists YAML files.
        seeds: of weights, order and noise; `${seed}` stands for it anywhere in fit, choices and measures.
        fit: what all choices have in common, in the same form.
        replay: options of `poss replay`, or
        benchmark: options of `poss benchmark`: one of the two.
        reference: the choice that the others are compared with.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    choices: Annotated[dict[Annotated[str, Field(pattern=r"^[\w.+-]+$")], dict | None], Field(min_length=1)]
    seeds: Annotated[list[Seed], Field(min_length=1)]
    fit: dict | None = None
    replay: dict | None = None
    benchmark: dict | None = None
    reference: str | None = None

    @classmethod
    def load(cls, file: Path) -> "Sweep":
        """Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a sweep; the message names file and field.
        """
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; an experiment is a folder with a {SETTINGS}")
        try:
            experiment = TypeAdapter(cls).validate_python(read_config(str(file)))
            experiment.check()
        except ValidationError as error:
            raise ValueError(f"{file} is not a sweep: {describe(error)}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not a sweep: {error}") from error
        return experiment

    def check(self) -> None:
        """Raise ValueError where a field cannot be, OSError where a config is not there; the message names it."""
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {self.seeds}; name none twice")
        check_names(self.choices)
        for name, options in {"fit": self.fit, **self.choices}.items():
            if not isinstance(files := (options or {}).get("config", []), list):
                raise ValueError(f"config of {name} is {files!r}; it must be a list of YAML files")
            for file in files:
                find_config(str(file))
        if (self.replay is None) == (self.benchmark is None):
            raise ValueError("give one of replay and benchmark, the options of how choices are measured")
        if "drafts" in (self.replay or self.benchmark or {}):
            raise ValueError("drafts is among the options of the measure; each choice's own draft is what is measured")
        if self.reference is not None and self.reference not in self.choices:
            raise ValueError(f"reference is {self.reference!r}, which is none of {', '.join(self.choices)}")

    def cells(self, experiment: Path) -> list[PlannedCell]:
        """Every choice of the first seed, then of the second, and so on."""
        packed = {cell.key: cell for cell in packed_cells(experiment)}
        pairs = product(map(int, self.seeds), self.choices)
        return [self._cell(experiment / FOLDERS, choice, seed, packed.get((choice, seed))) for seed, choice in pairs]

    def _cell(self, folder: Path, choice: str, seed: int, packed: PackedCell | None) -> PlannedCell:
        measure = "replay" if self.benchmark is None else "benchmark"
        common, special = (_with_seed(options or {}, seed) for options in (self.fit, self.choices[choice]))
        configs = [*common.pop("config", []), *special.pop("config", [])]
        layers = [*configs, {"seed_everything": seed, "data": {"seed": seed}}, common, special]
        place = folder / choice / f"seed-{seed}"
        return PlannedCell(choice, seed, place, layers, measure, _with_seed(getattr(self, measure), seed), packed)


def _with_seed(options: Any, seed: int) -> Any:
    """Options with the seed in the place of `${seed}`."""
    if isinstance(options, dict):
        return {name: _with_seed(value, seed) for name, value in options.items()}
    if isinstance(options, list):
        return [_with_seed(value, seed) for value in options]
    if options == SEED:
        return seed
    return options.replace(SEED, str(seed)) if isinstance(options, str) else options


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
                    _pack(cell, Path(folder))
                seconds.append(time.monotonic() - began)
        except Exception as error:  # of whatever kind: the other trainings need not wait for it
            if not is_told(error):
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


def _check(folder: Path, cells: list[PlannedCell], share: list[PlannedCell]) -> None:
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
def _named(folder: Path, cell: PlannedCell) -> Iterator[None]:
    """Let an error of a cell say whose it is."""
    try:
        yield
    except Exception as error:
        if not is_told(error):
            raise
        raise ValueError(f"{folder / SETTINGS}: {cell.name}: {error}") from error


def _share(cells: list[PlannedCell], shard: str) -> list[PlannedCell]:
    try:
        place, shares = map(int, shard.split("/"))
    except ValueError:
        place, shares = 0, 0
    if not 1 <= place <= shares:
        raise ValueError(f"shard is {shard!r}; it must be i/n, for example 1/4, with i from 1 to n")
    return cells[place - 1 :: shares]


def _sum_up(done: list[PlannedCell], reference: str | None) -> None:
    if reference not in {cell.choice for cell in done}:
        reference = None
    print_findings(find([cell.folder for cell in done], reference=reference), all=True)


def _pack(cell: PlannedCell, experiment: Path) -> None:
    """Add it to cells.jsonl and records.parquet, with the last of every scalar."""
    scalars = read_scalars(cell.folder)[str(cell.folder)]
    last = {tag: series[-1] for tag, series in sorted(scalars.items())}
    (run,) = read_runs(cell.folder).values()
    rows = [asdict(record) for record in read_records(cell.folder)]
    pack(experiment, cell.choice, cell.seed, cell.note() | {"run": run, "scalars": last}, rows)
