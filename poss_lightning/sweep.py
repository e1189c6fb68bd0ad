"""`poss sweep`: an experiment as a folder. Choices × seeds are trained and measured, and one table sums them up.

NAME/
  sweep.yaml                         what all trainings have in common, the choices, the seeds, what is measured
  cells.jsonl, records.parquet       the finished trainings (`evaluation/cells.py`)
  cells/CHOICE/seed-N/               a training: fit.yaml, cell.json (settings, inputs, processes), the draft, the
                                     TensorBoard file, its records and run.json
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from math import gcd
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from tqdm import tqdm

from poss_lightning.configs import read_config
from poss_lightning.evaluation.cell import PlannedCell
from poss_lightning.evaluation.cells import FOLDERS, pack, packed_cells
from poss_lightning.evaluation.records import check_method_names, read_records, read_runs
from poss_lightning.files import find_config
from poss_lightning.ranges import Seed, describe_refusal
from poss_lightning.reports.compare import print_findings
from poss_lightning.reports.findings import find
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.terminal import is_user_error
from poss_lightning.work import Work, flat

SETTINGS = "sweep.yaml"


@dataclass(frozen=True)
class Sweep:
    """The content of `sweep.yaml`.

    Attributes:
        choices: by name, the options of `poss fit` that make each, nested; `config` lists YAML files.
        seeds: of weights, order and noise; `${seed}` stands for the seed anywhere in fit, choices and measure.
        fit: options that all choices have in common, in the same form.
        replay: options of `poss replay`; or
        benchmark: options of `poss benchmark`.
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
        """The sweep in a YAML file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is not a sweep; the message names file and field.
        """
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; an experiment is a folder with a {SETTINGS}")
        try:
            experiment = TypeAdapter(cls).validate_python(read_config(str(file)))
            experiment.check()
        except (OSError, ValueError) as error:
            reason = describe_refusal(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{file} is not a sweep: {reason}") from error
        return experiment

    def check(self) -> None:
        """Raise ValueError for a wrong field, OSError for a missing config; the message names it."""
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {self.seeds}; name none twice")
        check_method_names(self.choices)
        common = flat(self.fit or {})
        for name, options in {"fit": self.fit, **self.choices}.items():
            if not isinstance(files := (options or {}).get("config", []), list):
                raise ValueError(f"config of {name} is {files!r}; it must be a list of YAML files")
            own = common if options is self.fit else flat(options or {})
            for file in files:
                given = flat(read_config(find_config(str(file)))).items()
                if lost := [key for key, value in given if key not in own and common.get(key, value) != value]:
                    raise ValueError(
                        f"{file} of {name} sets {', '.join(lost)}, but so does fit, which comes after it: move that "
                        "from fit to the choices"
                    )
        if (self.replay is None) == (self.benchmark is None):
            raise ValueError("give one of replay and benchmark, the options of how choices are measured")
        if "drafts" in (self.replay or self.benchmark or {}):
            raise ValueError("drafts is among the options of the measure; each choice's own draft is what is measured")
        if self.reference is not None and self.reference not in self.choices:
            raise ValueError(f"reference is {self.reference!r}, which is none of {', '.join(self.choices)}")

    def cells(self, experiment: Path) -> list[PlannedCell]:
        """Every choice of the first seed, then of the second, and so on."""
        packed = {cell.key: cell for cell in packed_cells(experiment)}
        measure = "replay" if self.benchmark is None else "benchmark"
        cells = []
        for seed, choice in product(map(int, self.seeds), self.choices):
            given = (self.fit, self.choices[choice], getattr(self, measure))
            common, special, options = (_with_seed(each or {}, seed) for each in given)
            configs = [*common.pop("config", []), *special.pop("config", [])]
            layers = [*configs, {"seed_everything": seed, "data": {"seed": seed}}, common, special]
            folder = experiment / FOLDERS / choice / f"seed-{seed}"
            cells.append(PlannedCell(choice, seed, folder, layers, measure, options, packed.get((choice, seed))))
        return cells


def _with_seed(options: Any, seed: int) -> Any:
    """Options with the seed in place of `${seed}`: a number, or digits within a text."""
    match options:
        case dict():
            return {name: _with_seed(value, seed) for name, value in options.items()}
        case list():
            return [_with_seed(value, seed) for value in options]
        case "${seed}":
            return seed
        case str():
            return options.replace("${seed}", str(seed))
    return options


def sweep(folder: str, shard: str = "1/1") -> None:
    """Train and measure every choice with every seed, skip what is done, and sum up what there is.

    Several processes, or the jobs of an array, may share an experiment: each takes its shard.

    Args:
        folder: folder of the experiment, with a sweep.yaml.
        shard: i/n, the i-th of n shares of the trainings.
    """
    experiment = Sweep.load(Path(folder) / SETTINGS)
    cells = experiment.cells(Path(folder))
    share, seconds, failed = _share(cells, shard), [], []
    _check(Path(folder), cells, share)
    for number, cell in enumerate(share, 1):
        if cell.is_done:
            continue
        remaining = sum(not other.is_done for other in share[number - 1 :])
        expected = f", {timedelta(seconds=round(fmean(seconds) * remaining))} left" if seconds else ""
        print(f"\n[{number}/{len(share)}] {cell.name}{expected}", flush=True)
        began = time.monotonic()
        try:
            if _train(cell, Path(folder)):
                seconds.append(time.monotonic() - began)
        except Exception as error:  # of any kind: it does not keep the other trainings from running
            if not is_user_error(error):
                traceback.print_exc()
            print(f"FAILED {cell.name}: {' '.join(str(error).split())}", flush=True)
            failed.append(cell.name)
    cells = experiment.cells(Path(folder))
    done = [cell for cell in cells if cell.is_done]
    print(f"\n{folder}: {len(done)} of {len(cells)} trainings are done")
    if done:
        reference = experiment.reference if experiment.reference in {cell.choice for cell in done} else None
        print_findings(find([cell.folder for cell in done], reference=reference), all=True)
    if failed:
        raise ValueError(f"{len(failed)} of {len(share)} trainings failed: {'; '.join(failed)}")


def _train(cell: PlannedCell, experiment: Path) -> bool:
    """Train, measure and pack a cell; or return False if another process does so or has just done it."""
    work = Work(experiment / FOLDERS)
    with work.part(f"{cell.choice}/seed-{cell.seed}/training") as acquired:
        if not acquired:
            print("another process is training it")
            return False
        if cell.key in {packed.key for packed in packed_cells(experiment)}:
            return False
        cell.claim()
        cell.run()
        scalars = read_scalars(cell.folder).get(str(cell.folder), {})  # a short training logs none
        last = {tag: series[-1] for tag, series in sorted(scalars.items())}
        (run,) = read_runs(cell.folder).values()
        rows = [asdict(record) for record in read_records(cell.folder)]
        with work.exclusive():
            pack(experiment, cell.choice, cell.seed, cell.note() | {"run": run, "scalars": last}, rows)
    return True


def _check(folder: Path, cells: list[PlannedCell], share: list[PlannedCell]) -> None:
    """Raise ValueError for trainings made with different settings, or one of this share that would fail; name it."""

    def named(cell: PlannedCell, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except Exception as error:
            if not is_user_error(error):
                raise
            raise ValueError(f"{folder / SETTINGS}: {cell.name}: {error}") from error

    changed = {cell.folder: names for cell in cells if (names := named(cell, cell.changed))}
    if changed:
        first, names = next(iter(changed.items()))
        raise ValueError(
            f"{first} was made with other settings ({', '.join(names)}), as {len(changed)} of {len(cells)} were: "
            f"rename the experiment or the choice, or remove them; to copy an experiment, copy its {SETTINGS} alone"
        )
    coming = {cell.folder.resolve() for cell in cells if not cell.is_done}
    for cell in tqdm([cell for cell in share if not cell.is_done], desc="check", delay=5, leave=False):
        named(cell, partial(cell.check, coming))


def _share(cells: list[PlannedCell], shard: str) -> list[PlannedCell]:
    try:
        place, shares = map(int, shard.split("/"))
    except ValueError:
        place, shares = 0, 0
    if not 1 <= place <= shares:
        raise ValueError(f"shard is {shard!r}; it must be i/n, for example 1/4, with i from 1 to n")
    choices = len({cell.choice for cell in cells})
    turn = int(gcd(choices, shares) > 1)  # with each seed, so that no share, and so no machine, has one choice alone
    return [cell for i, cell in enumerate(cells) if (i + turn * (i // choices)) % shares == place - 1]
