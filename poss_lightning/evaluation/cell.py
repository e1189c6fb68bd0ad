"""A training of an experiment: what it is made from, whether it can run, and how it is trained and measured."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from poss_lightning.configs import check_options
from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.drafting import check_tree
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import WEIGHTS, local_folder
from poss_lightning.evaluation import benchmark, replay
from poss_lightning.evaluation.cells import NOTE, PackedCell
from poss_lightning.evaluation.provenance import origin
from poss_lightning.evaluation.records import NAMES, UNFINISHED
from poss_lightning.evaluation.suites import local_files, read_suites
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import atomic, conf, find_config, read_json, sha256, without_secrets
from poss_lightning.machine import choose_device, choose_precision
from poss_lightning.training.command import BASE
from poss_lightning.training.fit import OPTIONS, build, compose, fit_once
from poss_lightning.training.run_folder import FINISHED, has_outputs
from poss_lightning.work import Work, flat

MEASURES = {"replay": replay.replay, "benchmark": benchmark.benchmark}


@dataclass(frozen=True)
class PlannedCell:
    """One training of one choice, as sweep.yaml asks for it."""

    choice: str
    seed: int
    folder: Path
    layers: list[str | dict]  # what `poss fit` gets: configs, then options, in order
    measure: str  # "replay" or "benchmark"
    options: dict  # of that command
    packed: PackedCell | None = None  # once it is done

    @property
    def key(self) -> tuple[str, int]:
        return self.choice, self.seed

    @property
    def name(self) -> str:
        return f"{self.choice}, seed {self.seed}"

    @cached_property
    def training(self) -> dict[str, Any]:
        """All options of the training."""
        return compose(*self.layers)

    def settings(self) -> dict:
        """What was asked for: digests of configs, and the training's values of the options that are set."""
        configs = {layer: sha256(find_config(layer)) for layer in self.layers if isinstance(layer, str)}
        fit: dict[str, Any] = {}
        options = [option for layer in self.layers if isinstance(layer, dict) for option in _split(layer)]
        for group, name, value in options:
            if name is None:
                fit[group] = self.training[group]
            elif name.endswith("+"):  # what is appended to a list, whatever the list is
                fit.setdefault(group, {})[name] = fit[group].get(name, []) + value
            else:
                fit.setdefault(group, {})[name] = self.training[group][name]
        settings = {"configs": configs, "fit": fit, self.measure: self.options}
        return json.loads(without_secrets(json.dumps(settings)))

    def inputs(self) -> dict[str, str]:
        """Digests of local files: stores, text, the draft it starts from, the config of every fit."""
        return self._trained_on() | self._measured_on()

    def _trained_on(self) -> dict[str, str]:
        data, start, trainer = self.training["data"], self.training["model"]["start_from"], self.training["trainer"]
        stores = [data["store"]] if isinstance(data["store"], str) else data["store"] or []
        files = {BASE: conf(BASE)} | {store: Path(store) / MANIFEST for store in stores}
        files |= {data["corpus"]: Path(data["corpus"])} if data["corpus"] else {}
        digests = _digests(files | ({start: self._start(start) / WEIGHTS} if start else {}))
        if (precision := trainer["precision"]) == "auto":  # which depends on the machine
            precision = choose_precision(str(trainer["accelerator"]))
        return digests | {"trainer.precision": precision}

    def _measured_on(self) -> dict[str, str]:
        store, suites = self.options.get("store"), self.options.get("suites") or []
        suites = [suites] if isinstance(suites, str) else suites
        files = {store: Path(store) / MANIFEST} if store else {}
        return _digests(files | {str(file): file for suite in suites for file in local_files(suite)})

    def _start(self, draft: str) -> Path:
        """The folder of the draft it starts from; ValueError for an unfinished one, as it may still change."""
        folder = local_folder(draft)
        training = folder.parent
        if (training / OPTIONS).is_file() and not (training / FINISHED).exists():
            raise ValueError(f"{self.folder} starts from {draft}, but {training} is not finished: finish it first")
        return folder

    @property
    def is_done(self) -> bool:
        """Whether it is in cells.jsonl."""
        return self.packed is not None

    @property
    def has_records(self) -> bool:
        """Whether its measurement has written records, or, as long as it is unfinished, the first of them."""
        written = (*NAMES, f"{UNFINISHED}/question-*.json")
        return self.is_done or any(any(self.folder.glob(name)) for name in written)

    @property
    def has_outputs(self) -> bool:
        """Whether its training has written anything."""
        return self.has_records or has_outputs(self.folder)

    def changed(self) -> list[str]:
        """Names of settings it was begun with that differ now; those of the measurement count once it has records."""
        earlier = self.note()["settings"]
        if not earlier or not self.has_outputs:
            return []
        asked = self.settings()
        if not self.has_records:
            earlier, asked = ({part: settings[part] for part in ("configs", "fit")} for settings in (earlier, asked))
        earlier, asked = flat(earlier), flat(asked)
        return sorted(name for name in earlier | asked if earlier.get(name) != asked.get(name))

    def claim(self) -> None:
        """Note what it is made from and by which process; ValueError if an earlier one began with other inputs."""
        note, inputs = self.note(), self.inputs()
        kept = (self._trained_on() if self.has_outputs else {}) | (self._measured_on() if self.has_records else {})
        if other := sorted(name for name, digest in note["inputs"].items() if kept.get(name, digest) != digest):
            raise ValueError(f"{self.folder} was begun with another {other[0]} than is here now: remove the folder")
        if note["processes"] and not self.has_records:  # a measurement without records may have had other options
            (self.folder / "run.json").unlink(missing_ok=True)
            Work(self.folder / UNFINISHED).clear()
        facts = {"settings": self.settings(), "inputs": inputs, "processes": [*note["processes"], origin()]}
        with atomic(self.folder / NOTE) as path:
            path.write_text(json.dumps(facts, indent=1) + "\n")

    def run(self) -> None:
        """Train and measure."""
        draft = fit_once(self.folder, *self.layers)
        MEASURES[self.measure](**self.measure_options(draft))

    def note(self) -> dict[str, Any]:
        """Settings, inputs and processes, as `claim` wrote them; empty before."""
        if self.packed is not None:
            return self.packed.facts
        file = self.folder / NOTE
        return read_json(file) if file.exists() else {"settings": {}, "inputs": {}, "processes": []}

    def measure_options(self, draft: Path) -> dict:
        """Arguments of the function that measures it."""
        options = {**self.options, "out": str(self.folder), "drafts": {self.choice: str(draft)}}
        return check_options(MEASURES[self.measure], options)

    def check(self, coming: set[Path]) -> None:
        """Raise what training or measuring would: unknown options, sizes that do not fit, what this machine lacks.

        It may start from trainings in the folders `coming`, though they are not finished.
        """
        draft = None if (self.folder / FINISHED).exists() else self._build(coming)
        options = self.measure_options(self.folder / "draft-last")
        choose_device(options["device"])
        if draft:
            depth = sum(draft.allocation) if options["depth"] is None else options["depth"]
            draft.check_depth(depth)
            check_tree(depth, options["tree_width"])
            Fixed(depth, options["nodes"])
        if self.measure == "benchmark":
            benchmark.check_options_fit(options)
            _read_suites_once(json.dumps(options["suites"]), options["limit"])
            return
        store = FeatureStore(options["store"])
        if draft and (difference := draft.target.difference(store.target)):
            raise ValueError(f"{options['store']} is of another target than the draft: {difference}")
        if draft:
            store.select(draft.aux_layers)

    def _build(self, coming: set[Path]) -> DraftConfig | None:
        """The draft that it would train; of a start that is not trained yet, without it."""
        start = self.training["model"]["start_from"]
        if start and local_folder(start).parent.resolve() in coming:
            return build(*self.layers, {"model": {"start_from": None}})
        if start:
            self._start(start)
        return build(*self.layers)


def _split(options: dict) -> Iterator[tuple[str, str | None, Any]]:
    """Group, name and value of each option, whether it is `trainer.max_steps: 2` or `trainer: {max_steps: 2}`."""
    for name, value in options.items():
        group, _, rest = name.partition(".")
        below = {rest: value} if rest else value if isinstance(value, dict) else {None: value}
        yield from ((group, each and each.partition(".")[0], inner) for each, inner in below.items())


@cache
def _read_suites_once(suites: str, limit: int | None) -> None:
    """Read the suites for the first of all trainings that ask the same questions: the hub may have to send them."""
    read_suites(json.loads(suites), limit)


def _digests(files: dict[str, Path]) -> dict[str, str]:
    return {name: sha256(file) for name, file in files.items() if file.is_file()}
