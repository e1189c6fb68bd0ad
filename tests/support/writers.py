"""Every command that writes, at tiny sizes; what it leaves; and whether it survives a fault (`faults.py`)."""

import contextlib
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
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
THERE = "is there already"  # to whoever asks for what is finished
OTHER = f"another process writes there|{THERE}|holds a training already"  # to a second writer
FOREIGN = "has files of others|is not empty and holds nothing to resume|holds a training"
LAST = "run/checkpoints/last.ckpt"
# As conf/trainer/base.yaml has them, but with a checkpoint at step 3, between two validations: Lightning takes a
# validation for done that a kill ended, if the checkpoint is of the same step.
CALLBACKS = [
    {"class_path": f"poss_lightning.{name}"}
    for name in ("evaluation.probe.Replay", "training.callbacks.DraftFolders", "training.dashboard.Dashboard")
] + [
    {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"monitor": "val/tau_tree", "mode": "max", "auto_insert_metric_name": False, "filename": "best"},
    },
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
    """A command line; it is given in a folder of its own, which must hold the same in the end, whatever happens."""

    arguments: tuple[str, ...]
    copies: tuple[str, ...] = ()  # of the inputs, into that folder
    again: Callable[[Path], list[str]] = lambda folder: []  # what more is said to go on
    processes: int = 1

    @property
    def command(self) -> str:
        return self.arguments[0]


def go_on_fit(folder: Path) -> list[str]:
    """As its messages say: go on with the checkpoint, or begin anew where a kill left none."""
    if (folder / LAST).exists():
        return [f"--ckpt_path={LAST}"]
    if not any(folder.rglob("thesis.*")):
        shutil.rmtree(folder / "run", ignore_errors=True)
    return []


FIT_LINE = ("fit", "--config={inputs}/fit.yaml")
SUITES = "--suites=[{inputs}/suite.jsonl] --max_new_tokens=6"


def line(text: str, copies: tuple[str, ...] = (), **options: Any) -> Writer:
    """A command line as one would write it; TARGET and ON are its options."""
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
    "fit": Writer(FIT_LINE, (STORE,), go_on_fit),
    "fit-two": Writer((*FIT_LINE, "--trainer.devices=2", "--trainer.strategy=ddp"), (STORE,), go_on_fit, processes=2),
    "sweep": line("sweep .", (STORE, "sweep.yaml")),
}
MADE = {  # inputs that take a command, by name: made where one of the above names them
    STORE: line(f"extract {{inputs}}/corpus.jsonl {STORE} TARGET"),
    "records": line(f"benchmark records --drafts.d={{inputs}}/draft TARGET {SUITES}"),
    "run": Writer(FIT_LINE, (STORE,)),
}


def plant(folder: Path, writer: Writer) -> dict[Path, str]:
    """Files of others wherever a command might clear: in every folder but the inputs, and beside what it writes."""
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
    """What a command does when nothing happens."""

    whole: dict[str, object]  # what it leaves, see `result`
    operations: list[Operation]
    sizes: list[int]  # of the files that are there then


class Place:
    """A folder with what the commands read, and one in which they run, always of the same name.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path):
        self.inputs, self.work, self._record = folder / "inputs", folder / "work", folder / "record.json"
        torch.set_num_threads(1)  # and no thread of another kind: processes are forked off this one
        tqdm.monitor_interval = 0
        write_inputs(self.inputs)

    def start(self, writer: Writer, fault: Fault | None = None, more: Sequence[str] = (), **options: Any) -> Child:
        return Child(self.work, self._arguments(writer, more), fault, **options)

    def _arguments(self, writer: Writer, more: Sequence[str] = ()) -> list[str]:
        return [each.replace("{inputs}", str(self.inputs)) for each in [*writer.arguments, *more]]

    def _make_inputs(self, writer: Writer) -> None:
        named = re.findall(r"\{inputs\}/(\w+)", " ".join(writer.arguments))
        for name in [*named, *writer.copies]:
            if name in MADE and not (self.inputs / name).exists():
                self._make_inputs(MADE[name])
                outcome = Child(self.inputs, self._arguments(MADE[name])).end()
                assert not outcome.code, outcome.text

    def fresh(self, writer: Writer) -> None:
        """An empty folder, but for what it begins with."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in writer.copies:
            copy = shutil.copytree if (self.inputs / name).is_dir() else shutil.copyfile
            copy(self.inputs / name, self.work / name)

    def run(self, writer: Writer, fault: Fault | None = None, more: Sequence[str] = ()) -> Outcome:
        """What comes of it; of two processes the second meets the fault, and the first ends with it."""
        if writer.processes == 1:
            return self.start(writer, fault, more).end()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        ranks = [
            self.start(
                writer,
                fault if rank == "1" else None,
                more,
                environment={**shared, "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0"},
            )
            for rank in "01"
        ]
        first, second = ranks
        if (outcome := second.end()).code:
            first.kill()
        return max(first.end(), outcome, key=lambda each: abs(each.code)) if not outcome.code else outcome

    def observe(self, writer: Writer) -> Observed:
        """What the command leaves when nothing happens, and its operations. This process imports what it did."""
        self._make_inputs(writer)
        self.fresh(writer)
        if writer.processes > 1:
            outcome, operations, modules = self.run(writer), [], []
        else:
            outcome = self.start(writer, record=self._record).end()
            operations, modules = recorded(self._record)
        assert not outcome.code, outcome.text
        for name in set(modules) - set(sys.modules):
            with contextlib.suppress(Exception):  # it may only be imported by another module
                import_module(name)
        sizes = [path.stat().st_size for path in self.work.rglob("*") if path.is_file()]
        return Observed(result(self.work), operations, sizes)

    def check(self, writer: Writer, fault: Fault, whole: dict[str, object]) -> str | None:
        """Run a command under a fault, then again without: what is wrong then, if anything.

        Args:
            whole: what `observe` saw.
        """
        self.fresh(writer)
        problem = self._run_two(writer, fault) if fault.kind == "beside" else self._meet(writer, fault)
        planted = plant(self.work, writer) if fault.kind == "foreign" else {}
        return problem or self._go_on(writer, whole, planted)

    def _meet(self, writer: Writer, fault: Fault) -> str | None:
        """Problems of the run that meets the fault."""
        outcome = self.run(writer, fault)
        if fault.kind in ("kill", "torn", "time", "foreign"):
            ended = (KILLED, -signal.SIGKILL) if fault.kind != "time" else (0, -signal.SIGALRM, -signal.SIGKILL)
            return None if outcome.code in ended else f"ended with {_shown(outcome)}"
        if outcome.code and not outcome.is_refusal(writer.command):
            return f"ended without a clear line: {_shown(outcome)}"
        if torn := [str(path) for path in self.work.rglob("*.tmp")]:
            return f"left {torn}"
        return None

    def _run_two(self, writer: Writer, fault: Fault) -> str | None:
        first = self.start(writer, fault)
        if (early := first.wait()) is not None:
            return f"ended before it could stand still: {_shown(early)}"
        second = self.start(writer)
        beside = second.wait(PATIENCE)
        first.go_on()
        outcomes = [first.end(), beside or second.end()]
        if wrong := [each for each in outcomes if each.code and not re.search(OTHER, each.last)]:
            return f"one of two does not say that there is another: {_shown(wrong[0])}"
        if all(each.code for each in outcomes):
            return f"both of two were refused: {[each.last for each in outcomes]}"
        return None

    def _go_on(self, writer: Writer, whole: dict[str, object], planted: dict[Path, str]) -> str | None:
        """Problems of the same command, given again; it may do nothing where files of others stand in its way."""
        outcome = self.run(writer, more=writer.again(self.work))
        if lost := [path for path, text in planted.items() if not path.is_file() or path.read_text() != text]:
            return f"took files of others for its own: {[str(path.relative_to(self.work)) for path in lost]}"
        if planted and re.search(FOREIGN, outcome.last):
            return None
        for path in planted:
            path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        if outcome.code and not re.search(THERE, outcome.last):
            return f"does not go on: {_shown(outcome)}"
        wrong = differences(whole, result(self.work))
        return f"went on to other results: {wrong}" if wrong else None


def _shown(outcome: Outcome) -> str:
    return f"exit code {outcome.code}: {outcome.text[-3000:].strip() if 'Traceback' in outcome.text else outcome.last}"


# --- what they leave ---


def result(folder: Path) -> dict[str, object]:
    """What a folder holds, by file: its bytes, but where they tell the time, a duration or how often it was begun.

    Left out are, of run.json and cell.json, when a process began and which went on; of records, cells.jsonl and
    TensorBoard files seconds and rates; of a step that was logged twice what was logged first; of a sweep the order in
    which its trainings ended. A checkpoint is compared by what training goes on from.
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
    """What is missing, too much or other."""
    names = sorted(whole.keys() | found.keys())
    kinds = {name: "missing" if name not in found else "too much" if name not in whole else "other" for name in names}
    return [f"{name} ({kinds[name]})" for name in names if whole.get(name) != found.get(name)]


def _facts(path: Path) -> Any:
    return _without_process(json.loads(path.read_text()))


def _without_process(facts: Any) -> Any:
    left_out = ("started", "gone_on", "processes", "costs")
    return {name: value for name, value in facts.items() if name not in left_out}


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
    kept = {
        name: stored.get(name) for name in ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers")
    }
    return _plain(kept)


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
    """A target and a draft for it, corpora, a suite, and the options of a training and a sweep."""
    folder.mkdir()
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    lines = [json.dumps({"id": f"corpus/{each.id}", "messages": each.messages}) for each in make_conversations(24)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    long = [" ".join(["the draft says four legs"] * 16) + f" {i}" for i in range(60)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role in ROLES]}) for text in long]
    (folder / "long.jsonl").write_text("\n".join(lines))
    questions = [["How many legs?", "And a cat?"], ["What is it?"], ["Why?"]]
    lines = [json.dumps({"question_id": i, "turns": turns}) for i, turns in enumerate(questions)]
    (folder / "suite.jsonl").write_text("\n".join(lines))
    (folder / "fit.yaml").write_text(yaml.safe_dump(FIT))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    tiny_draft(tiny_target(), [1, 1]).save_pretrained(folder / "draft")
