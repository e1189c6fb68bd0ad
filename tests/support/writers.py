"""Every command that writes, at tiny sizes; what it leaves; and whether it survives the faults of `faults.py`."""

import contextlib
import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import torch
import yaml
from tqdm import tqdm

from poss_lightning.draft.folder import load_checkpoint
from poss_lightning.evaluation.rounds import PARTS
from poss_lightning.files import TEMPORARY
from poss_lightning.reports.scalars import read_scalars
from tests.support.faults import KILLED, Child, Fault, Operation, fork
from tests.support.inputs import write_inputs, write_suite
from tests.support.stores import ROLES

PATIENCE = 4  # seconds that a second writer may wait for one that is stopped
STORE = "store"  # that a command reads in its folder
TRAINER = {
    "accelerator": "cpu",
    "precision": "32-true",
    "max_steps": 6,
    "val_check_interval": 2,
    "check_val_every_n_epoch": None,
    "enable_progress_bar": False,
}
THERE = "already exists"  # said of finished work
OTHER = f"another process writes there|{THERE}|holds a training already"  # said to a second writer
FOREIGN = "has unknown files|is not empty and holds nothing to resume|holds a training"
LAST = "run/checkpoints/last.ckpt"
# As in conf/trainer/base.yaml, but with a checkpoint at step 3, between two validations: after a checkpoint of the same
# step Lightning takes a validation that a kill ended for done.
CALLBACKS = [
    {"class_path": "poss_lightning.evaluation.probe.Replay"},
    {"class_path": "poss_lightning.training.callbacks.DraftFolders"},
    {"class_path": "poss_lightning.training.dashboard.Dashboard"},
    {"class_path": "poss_lightning.training.callbacks.LastCheckpoint", "init_args": {"every_n_train_steps": 3}},
]
LOGGER = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": ".", "name": "run", "version": ""}}
FIT = {
    "model": {"allocation": [1, 1], "vocabulary_size": 50},
    "data": {"store": STORE, "validation": 0.2, "batch_tokens": 300},
    "trainer": TRAINER | {"callbacks": CALLBACKS, "logger": LOGGER},
}
SWEEP = {
    "choices": {"one": {"model": {"allocation": [2]}}, "two": {"model": {"allocation": [1, 1]}}},
    "seeds": [0],
    "fit": FIT | {"trainer": TRAINER | {"callbacks": CALLBACKS, "devices": 1}},
    "replay": {"store": STORE, "nodes": 20},
}
SUITES = "--suites=[{inputs}/questions.jsonl] --max_new_tokens=6 --tree=fixed"


class Writer(NamedTuple):
    """A command line, run in a folder of its own, which must hold the same in the end, whatever happens."""

    arguments: tuple[str, ...]
    copies: tuple[str, ...]  # inputs to copy into that folder

    @property
    def command(self) -> str:
        return self.arguments[0]


def line(text: str, *copies: str) -> Writer:
    """A command line as one would write it; TARGET and ON stand for options."""
    words = text.replace("TARGET", "--target={inputs}/target ON").replace("ON", "--dtype=float32 --device=cpu").split()
    return Writer(tuple(words), copies)


WRITERS = {
    "extract": line("extract {inputs}/talks.jsonl out TARGET --shard_mb=1 --batch_tokens=2000"),
    "synthesize": line(
        "synthesize out.jsonl.gz TARGET --conversations=6 --batch_size=4 --user_tokens=6 --answer_tokens=6"
    ),
    "answers": line(
        "synthesize out.jsonl TARGET --prompts=[{inputs}/questions.jsonl] --answer_tokens=6 --batch_size=2"
    ),
    "convert": line("convert {inputs}/draft out --output_format=poss --target={inputs}/target"),
    "to bfloat16": line("convert {inputs}/draft out --dtype=bfloat16"),
    "benchmark": line(f"benchmark out --drafts.d={{inputs}}/draft TARGET {SUITES}"),
    "replay": line("replay store out --drafts.d={inputs}/draft ON", STORE),
    "compare": line("compare {inputs}/records --html=out.html"),
    "doctor": line("doctor {inputs}/draft TARGET --store=store --limit=6 --out=out", STORE),
    "fit": line("fit --config={inputs}/fit.yaml", STORE),
    "sweep": line("sweep .", STORE, "sweep.yaml"),
}


def plant(folder: Path, writer: Writer) -> dict[Path, str]:
    """Put files of others wherever a command might clear: in every folder but its inputs, and beside what it writes."""
    outs = re.findall(r"\bout[\w.]*", " ".join(writer.arguments)) or ["run"]
    inside = [folder, *(each for each in folder.rglob("*") if each.is_dir() and ".poss." not in str(each))]
    ours = [each for each in inside if STORE not in each.relative_to(folder).parts]
    paths = [each / name for each in ours for name in ("thesis.txt", ".thesis.tmp", "thesis.json", "thesis.ckpt")]
    for out in outs:
        names = (f".{out}.tmp", f"{out}.unfinished/a.json", f".{out}.unfinished.finished/a", f".poss.x.{out}.tmp/a")
        paths += [folder / name for name in (*names, f"{out}.parts/thesis.txt")]
    planted = {path: f"{path.name}, mine" for path in paths}
    for path, text in planted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return planted


# --- where they run ---


class Observed(NamedTuple):
    """A command without a fault."""

    whole: dict[str, object]  # what it leaves, see `result`
    operations: tuple[Operation, ...]
    sizes: list[int]  # of the files that it leaves


class Place:
    """A folder of inputs, and one in which the commands run, always of the same name, within an empty folder."""

    def __init__(self, folder: Path):
        self.inputs, self.work = folder / "inputs", folder / "work"
        torch.set_num_threads(1)  # and no other thread either: this process forks
        tqdm.monitor_interval = 0
        writing = fork.Process(target=_write_inputs, args=(self.inputs,))
        writing.start()
        writing.join()

    def start(self, writer: Writer, fault: Fault | None = None, more: tuple[str, ...] = ()) -> Child:
        words = [word.replace("{inputs}", str(self.inputs)) for word in (*writer.arguments, *more)]
        return Child(self.work, words, fault)

    def fresh(self, writer: Writer) -> None:
        """Empty the folder, but for the copies that the command needs."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in writer.copies:
            copy = shutil.copytree if (self.inputs / name).is_dir() else shutil.copyfile
            copy(self.inputs / name, self.work / name)

    def observe(self, writer: Writer) -> Observed:
        """Run the command without a fault; this process then imports what that did."""
        self.fresh(writer)
        ended = self.start(writer).end()
        assert not ended.code, ended
        for name in set(ended.modules) - set(sys.modules):
            with contextlib.suppress(Exception):  # some modules can only be imported by others
                import_module(name)
        sizes = [path.stat().st_size for path in self.work.rglob("*") if path.is_file()]
        return Observed(result(self.work), ended.operations, sizes)

    def check(self, writer: Writer, fault: Fault, whole: dict[str, object]) -> str | None:
        """Run a command under a fault, then again without; return what is wrong, if anything.

        Args:
            whole: what the command leaves without a fault, from `observe`.
        """
        self.fresh(writer)
        try:
            self._run_two(writer, fault) if fault.kind == "beside" else self._meet(writer, fault)
            self._resume(writer, whole, plant(self.work, writer) if fault.kind == "foreign" else {})
        except AssertionError as problem:
            return str(problem)
        return None

    def _meet(self, writer: Writer, fault: Fault) -> None:
        ended = self.start(writer, fault).end()
        if fault.kind in ("kill", "torn", "foreign"):
            assert ended.code == KILLED, f"was not killed, but {ended}"
            return
        is_clear = f"{ended.code}".startswith(f"poss {writer.command}: ") and "Traceback" not in ended.text
        assert not ended.code or is_clear, f"ended without a clear line: {ended}"
        torn = [str(path) for path in self.work.rglob("*.tmp")]
        assert not torn, f"left {torn}"

    def _run_two(self, writer: Writer, fault: Fault) -> None:
        first = self.start(writer, fault)
        early = first.wait()
        assert early is None, f"ended before it could be stopped: {early}"
        second = self.start(writer)
        beside = second.wait(PATIENCE)
        first.resume()
        codes = [each.code for each in (first.end(), beside or second.end())]
        assert not all(codes), f"both of two were refused: {codes}"
        assert all(re.search(OTHER, str(code)) for code in codes if code), f"one does not name the other: {codes}"

    def _resume(self, writer: Writer, whole: dict[str, object], planted: dict[Path, str]) -> None:
        """Give the same command again; it may refuse if files of others are in its way."""
        ended = self.start(writer, more=resume_fit(self.work) if writer.command == "fit" else ()).end()
        lost = [str(path) for path, text in planted.items() if not path.is_file() or path.read_text() != text]
        assert not lost, f"took files of others for its own: {lost}"
        if planted and ended.code and re.search(FOREIGN, f"{ended.code}\n{ended.text}"):  # a sweep says it per training
            return
        for path in planted:
            path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        assert not ended.code or re.search(THERE, str(ended.code)), f"does not resume: {ended}"
        found = result(self.work)
        wrong = sorted(name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name))
        assert not wrong, f"resumed to different results: {wrong}"


def resume_fit(folder: Path) -> tuple[str, ...]:
    """As the messages of `poss fit` say: resume from the checkpoint, or start again if a kill left none."""
    if (folder / LAST).exists():
        return (f"--ckpt_path={LAST}",)
    if not any(folder.rglob("thesis.*")):
        shutil.rmtree(folder / "run", ignore_errors=True)
    return ()


# --- what they leave ---

TIMES = {"started", "resumed", "processes", "seconds"}
RESUMED = ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers")  # of a checkpoint


def result(folder: Path) -> dict[str, object]:
    """The content of a folder by file, without times, rates and the number of processes.

    Of TensorBoard files what was logged first of a step that was logged twice is left out; of a sweep the order of
    answers. Of a checkpoint only what training resumes from is compared.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if TEMPORARY in name:  # what a killed command was writing
            continue
        if path.name.startswith("events.out.tfevents."):
            scalars = read_scalars(path.parent)[str(path.parent)]
            points = {tag: dict(each) for tag, each in scalars.items()}
            found[f"{path.parent.relative_to(folder)}/events"] = timeless(points)
            continue
        try:
            found[name] = "folder" if path.is_dir() else content(path)
        except (OSError, ValueError) as error:
            found[name] = f"cannot be read: {error}"
    return found


def content(path: Path) -> Any:
    if path.name in ("run.json", "cell.json"):
        return timeless(json.loads(path.read_text()))
    if path.suffix == ".parquet":
        rows = pyarrow.parquet.read_table(path, partitioning=None).to_pylist()
        timed = ("seconds", *PARTS)
        return sorted(json.dumps({name: value for name, value in row.items() if name not in timed}) for row in rows)
    if path.suffix == ".ckpt":
        stored = load_checkpoint(path)
        return timeless({name: stored.get(name) for name in RESUMED})
    return path.read_bytes()


def timeless(value: Any) -> Any:
    """The same in lists and dicts, without what depends on the time."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        names = (name for name in value if name not in TIMES and not str(name).startswith("throughput"))
        return {name: timeless(value[name]) for name in names}
    return [timeless(each) for each in value] if isinstance(value, list | tuple) else value


# --- what they read ---


def _write_inputs(folder: Path) -> None:
    """The inputs of all commands, the options of a training and a sweep, and a corpus of several shards."""
    folder.mkdir()
    write_inputs(folder)
    write_suite(folder / "questions.jsonl", ["How many legs?", "And a cat?"], ["What is it?"], ["Why?"])
    contents = [" ".join(["the draft says four legs"] * 16) + f" {i}" for i in range(60)]
    talks = ({"messages": [{"role": role, "content": content} for role in ROLES]} for content in contents)
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    (folder / "fit.yaml").write_text(yaml.safe_dump(FIT))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
