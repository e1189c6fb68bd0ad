"""Every command that writes, at tiny sizes; what it leaves; and whether it survives the faults of `faults.py`."""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import torch
import yaml
from tqdm import tqdm

from poss_lightning.reports.scalars import read_scalars
from poss_lightning.training.export import load_checkpoint
from tests.support.faults import KILLED, PATIENCE, STORE, Child, Fault, Operation, Outcome, recorded
from tests.support.stores import ROLES, make_conversations
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer

TARGET = ("--target={inputs}/target", "--dtype=float32", "--device=cpu")
TRAINER = {
    "accelerator": "cpu",
    "precision": "32-true",
    "max_steps": 6,
    "val_check_interval": 2,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": ".", "name": "run", "version": ""}},
}
THERE = "is there already"  # said of finished work
OTHER = f"another process writes there|{THERE}|holds a training already"  # said to a second writer
FOREIGN = "has files of others|is not empty and holds nothing to resume|holds a training"
LAST = "run/checkpoints/last.ckpt"
# As in conf/trainer/base.yaml, but with a checkpoint at step 3, between two validations: after a checkpoint of the same
# step Lightning takes a validation that a kill ended for done.
CALLBACKS = [
    {"class_path": "poss_lightning.evaluation.probe.Replay"},
    {"class_path": "poss_lightning.training.callbacks.DraftFolders"},
    {"class_path": "poss_lightning.training.dashboard.Dashboard"},
    {"class_path": "poss_lightning.training.callbacks.LastCheckpoint", "init_args": {"every_n_train_steps": 3}},
]
FIT = {
    "model": {"allocation": [1, 1], "vocabulary_size": 50},
    "data": {"store": STORE, "validation": 0.2, "batch_tokens": 300},
    "trainer": TRAINER | {"callbacks": CALLBACKS},
}
SWEEP = {
    "choices": {"one": {"model": {"allocation": [2]}}, "two": {"model": {"allocation": [1, 1]}}},
    "seeds": [0],
    "fit": FIT
    | {"trainer": {name: value for name, value in FIT["trainer"].items() if name != "logger"} | {"devices": 1}},
    "replay": {"store": STORE, "nodes": 20},
}


class Writer(NamedTuple):
    """A command line, run in a folder of its own, which must hold the same in the end, whatever happens."""

    arguments: tuple[str, ...]
    copies: tuple[str, ...] = ()  # inputs to copy into that folder
    again: Callable[[Path], list[str]] = lambda folder: []  # further arguments to resume with

    @property
    def command(self) -> str:
        return self.arguments[0]


def resume_fit(folder: Path) -> list[str]:
    """As the messages of `poss fit` say: resume from the checkpoint, or start again if a kill left none."""
    if (folder / LAST).exists():
        return [f"--ckpt_path={LAST}"]
    if not any(folder.rglob("thesis.*")):
        shutil.rmtree(folder / "run", ignore_errors=True)
    return []


FIT_LINE = ("fit", "--config={inputs}/fit.yaml")
SUITES = "--suites=[{inputs}/suite.jsonl] --max_new_tokens=6"


def line(text: str, copies: tuple[str, ...] = (), **options: Any) -> Writer:
    """A command line as one would write it; TARGET and ON stand for options."""
    words = text.replace("ON", " ".join(TARGET[1:])).replace("TARGET", " ".join(TARGET)).split()
    return Writer(tuple(words), copies, **options)


WRITERS = {
    "extract": line("extract {inputs}/long.jsonl out TARGET --shard_mb=1 --batch_tokens=2000"),
    "synthesize": line(
        "synthesize out.jsonl.gz TARGET --conversations=6 --batch_size=4 --user_tokens=6 --answer_tokens=6"
    ),
    "answers": line("synthesize out.jsonl TARGET --prompts=[{inputs}/suite.jsonl] --answer_tokens=6 --batch_size=2"),
    "convert": line("convert {inputs}/draft out --output_format=poss --target={inputs}/target"),
    "export": line("export {inputs}/run/checkpoints/last.ckpt out --dtype=bfloat16"),
    "benchmark": line(f"benchmark out --drafts.d={{inputs}}/draft TARGET {SUITES}"),
    "replay": line("replay store out --drafts.d={inputs}/draft ON", (STORE,)),
    "compare": line("compare {inputs}/records --html=out.html"),
    "fit": Writer(FIT_LINE, (STORE,), resume_fit),
    "sweep": line("sweep .", (STORE, "sweep.yaml")),
}
MADE = {  # inputs that a command makes, by name, if one of the above needs them
    STORE: line(f"extract {{inputs}}/corpus.jsonl {STORE} TARGET"),
    "records": line(f"benchmark records --drafts.d={{inputs}}/draft TARGET {SUITES}"),
    "run": Writer(FIT_LINE, (STORE,)),
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
    operations: list[Operation]
    sizes: list[int]  # of the files that it leaves


class Place:
    """A folder of inputs, and one in which the commands run, always of the same name, within an empty folder."""

    def __init__(self, folder: Path):
        self.inputs, self.work, self._record = folder / "inputs", folder / "work", folder / "record.json"
        torch.set_num_threads(1)  # and no other thread either: this process forks
        tqdm.monitor_interval = 0
        write_inputs(self.inputs)

    def start(self, writer: Writer, fault: Fault | None = None, record: Path | None = None) -> Child:
        return Child(self.work, self._arguments(writer), fault, record)

    def _arguments(self, writer: Writer) -> list[str]:
        return [each.replace("{inputs}", str(self.inputs)) for each in writer.arguments]

    def _make_inputs(self, writer: Writer) -> None:
        named = re.findall(r"\{inputs\}/(\w+)", " ".join(writer.arguments))
        for name in [*named, *writer.copies]:
            if name in MADE and not (self.inputs / name).exists():
                self._make_inputs(MADE[name])
                outcome = Child(self.inputs, self._arguments(MADE[name])).end()
                assert not outcome.code, outcome.text

    def fresh(self, writer: Writer) -> None:
        """Empty the folder, but for the copies that the command needs."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in writer.copies:
            copy = shutil.copytree if (self.inputs / name).is_dir() else shutil.copyfile
            copy(self.inputs / name, self.work / name)

    def observe(self, writer: Writer) -> Observed:
        """Run the command without a fault; this process then imports what that did."""
        self._make_inputs(writer)
        self.fresh(writer)
        outcome = self.start(writer, record=self._record).end()
        operations, modules = recorded(self._record)
        assert not outcome.code, outcome.text
        for name in set(modules) - set(sys.modules):
            with contextlib.suppress(Exception):  # some modules can only be imported by others
                import_module(name)
        sizes = [path.stat().st_size for path in self.work.rglob("*") if path.is_file()]
        return Observed(result(self.work), operations, sizes)

    def check(self, writer: Writer, fault: Fault, whole: dict[str, object]) -> str | None:
        """Run a command under a fault, then again without; return what is wrong, if anything.

        Args:
            whole: what the command leaves without a fault, from `observe`.
        """
        self.fresh(writer)
        problem = self._run_two(writer, fault) if fault.kind == "beside" else self._meet(writer, fault)
        planted = plant(self.work, writer) if fault.kind == "foreign" else {}
        return problem or self._resume(writer, whole, planted)

    def _meet(self, writer: Writer, fault: Fault) -> str | None:
        """Problems of the run that meets the fault."""
        outcome = self.start(writer, fault).end()
        if fault.kind in ("kill", "torn", "foreign"):
            return None if outcome.code == KILLED else f"ended with {_shown(outcome)}"
        if outcome.code and not outcome.is_refusal(writer.command):
            return f"ended without a clear line: {_shown(outcome)}"
        if torn := [str(path) for path in self.work.rglob("*.tmp")]:
            return f"left {torn}"
        return None

    def _run_two(self, writer: Writer, fault: Fault) -> str | None:
        first = self.start(writer, fault)
        if (early := first.wait()) is not None:
            return f"ended before it could be stopped: {_shown(early)}"
        second = self.start(writer)
        beside = second.wait(PATIENCE)
        first.resume()
        outcomes = [first.end(), beside or second.end()]
        if wrong := [each for each in outcomes if each.code and not re.search(OTHER, each.last)]:
            return f"one of two does not name the other: {_shown(wrong[0])}"
        if all(each.code for each in outcomes):
            return f"both of two were refused: {[each.last for each in outcomes]}"
        return None

    def _resume(self, writer: Writer, whole: dict[str, object], planted: dict[Path, str]) -> str | None:
        """Problems of the same command, given again; it may refuse if files of others are in its way."""
        outcome = Child(self.work, [*self._arguments(writer), *writer.again(self.work)]).end()
        if lost := [path for path, text in planted.items() if not path.is_file() or path.read_text() != text]:
            return f"took files of others for its own: {[str(path.relative_to(self.work)) for path in lost]}"
        if planted and re.search(FOREIGN, outcome.last):
            return None
        for path in planted:
            path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        if outcome.code and not re.search(THERE, outcome.last):
            return f"does not resume: {_shown(outcome)}"
        wrong = differences(whole, result(self.work))
        return f"resumed to different results: {wrong}" if wrong else None


def _shown(outcome: Outcome) -> str:
    return f"exit code {outcome.code}: {outcome.text[-3000:].strip() if 'Traceback' in outcome.text else outcome.last}"


# --- what they leave ---


def result(folder: Path) -> dict[str, object]:
    """The content of a folder by file, without times, durations and the number of processes.

    Of run.json and cell.json the processes are left out; of records, cells.jsonl and TensorBoard files seconds and
    rates, and what was logged first of a step that was logged twice; of a sweep the order of its trainings. Of a
    checkpoint only what training resumes from is compared.
    """
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name.startswith("events.out.tfevents."):
            scalars = read_scalars(path.parent)[str(path.parent)]
            found[f"{path.parent.relative_to(folder)}/events"] = _without_rates(
                {tag: dict(points) for tag, points in scalars.items()}
            )
        elif path.is_file():
            try:
                found[name] = READ.get(path.name, READ.get(path.suffix, Path.read_bytes))(path)
            except (OSError, ValueError) as error:
                found[name] = f"cannot be read: {error}"
        else:
            found[name] = "folder"
    return found


def differences(whole: dict[str, object], found: dict[str, object]) -> list[str]:
    """Names of files that are missing, superfluous or different."""
    return sorted(name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name))


def _without_process(facts: Any) -> Any:
    return {name: facts[name] for name in facts.keys() - {"started", "gone_on", "processes", "costs"}}


def _facts(path: Path) -> Any:
    return _without_process(json.loads(path.read_text()))


def _records(path: Path) -> Any:
    return [json.loads(line) | {"seconds": None} for line in path.read_text().splitlines()]


def _cells(path: Path) -> Any:
    lines = [_without_process(json.loads(line)) for line in path.read_text().splitlines()]
    lines = [
        line | {"run": _without_process(line["run"]), "scalars": _without_rates(line["scalars"])} for line in lines
    ]
    return sorted(lines, key=lambda line: (line["choice"], line["seed"]))


def _rows(path: Path) -> Any:
    return sorted(json.dumps(row) for row in pyarrow.parquet.read_table(path).to_pylist())


def _without_rates(scalars: dict[str, Any]) -> dict[str, Any]:
    return {tag: json.loads(json.dumps(value)) for tag, value in scalars.items() if not tag.startswith("throughput")}


def _checkpoint(path: Path) -> Any:
    stored = load_checkpoint(path)
    kept = ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers")
    return _plain({name: stored.get(name) for name in kept})


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


READ: dict[str, Callable[[Path], Any]] = {
    "run.json": _facts,
    "cell.json": _facts,
    "records.jsonl": _records,
    "cells.jsonl": _cells,
    ".parquet": _rows,
    ".ckpt": _checkpoint,
}


# --- what they read ---


def write_inputs(folder: Path) -> None:
    """Write a target, a draft for it, corpora, a suite, and the options of a training and a sweep."""

    def write_lines(name: str, lines: Iterable[dict]) -> None:
        (folder / name).write_text("\n".join(map(json.dumps, lines)))

    folder.mkdir()
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    talks = make_conversations()
    write_lines("corpus.jsonl", ({"id": f"corpus/{talk.id}", "messages": talk.messages} for talk in talks))
    long = [" ".join(["the draft says four legs"] * 16) + f" {i}" for i in range(60)]
    write_lines("long.jsonl", ({"messages": [{"role": role, "content": text} for role in ROLES]} for text in long))
    questions = [["How many legs?", "And a cat?"], ["What is it?"], ["Why?"]]
    write_lines("suite.jsonl", ({"question_id": i, "turns": turns} for i, turns in enumerate(questions)))
    (folder / "fit.yaml").write_text(yaml.safe_dump(FIT))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    tiny_draft(tiny_target(), [1, 1]).save_pretrained(folder / "draft")
