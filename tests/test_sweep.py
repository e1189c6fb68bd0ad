"""A sweep: every choice with every seed, once; killed and resumed; shared among processes; summed up.

With the fixture `commands` trainings are pretended; `test_roads.py` tests what is trained.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import wraps
from pathlib import Path

import pytest
import yaml

from poss_lightning import sweep as module
from poss_lightning.draft.folder import SHIPPED, local_folder
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.provenance import COMMIT, describe_inputs
from poss_lightning.evaluation.replay import replay
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.features.writing import write_store
from poss_lightning.files import read_json, sha256
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.sweep import Cell, Sweep, _share, sweep
from poss_lightning.training import fit as training
from poss_lightning.work import Work
from tests.support import writers
from tests.support.processes import SECONDS
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_draft, tiny_target

pytestmark = pytest.mark.usefixtures("short_replays")

CALLBACKS = [{"class_path": f"poss_lightning.training.callbacks.{name}"} for name in ("DraftFolders", "LastCheckpoint")]
TRAINER = writers.TRAINER | {"max_steps": 2, "devices": 1, "callbacks": CALLBACKS, "enable_model_summary": False}
ONE = {"one": {"model": {"allocation": [2]}}}


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    """Folder of two: `all` to train on, and `dev` to measure with."""
    folder = tmp_path_factory.mktemp("stores")
    write_store(folder / "all", tiny_target(), talks(), **SIZES)
    write_store(folder / "dev", tiny_target(), talks()[:4], **SIZES)
    return folder


def fit_on(store: Path, **trainer) -> dict:
    """What all trainings have in common."""
    data, model = {"store": str(store), "validation": 0.2}, {"vocabulary_size": 50}
    return {"data": data, "trainer": TRAINER | trainer, "model": model}


@pytest.fixture
def experiment(tmp_path, stores):
    """A function that writes a sweep.yaml, with changes, and returns its folder."""

    def write(**changes):
        measure = {"store": str(stores / "dev"), "nodes": 20}
        given = writers.SWEEP | {"fit": fit_on(stores / "all"), "replay": measure, "reference": "one"}
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(given | changes))
        return str(tmp_path)

    return write


class Commands(list):
    """The commands that ran, such as "fit one/seed=0"; what `failing` names raises its error instead, once."""

    def __init__(self):
        self.failing: dict[str, BaseException] = {}

    def record(self, command: str, folder: str | Path) -> None:
        name = f"{command} {'/'.join(Path(folder).parts[-2:])}".replace("choice=", "")
        if name in self.failing:
            raise self.failing.pop(name)
        self.append(name)


@pytest.fixture
def commands(monkeypatch) -> Commands:
    """Pretended trainings, which log no scalars, and the commands that ran."""
    ran, target = Commands(), tiny_target()

    def pretended_fit(folder, *configs):
        if not (folder / "finished").exists():
            ran.record("fit", folder)
            (folder / "fit.yaml").touch()
            tiny_draft(target, configs[-2]["model"]["allocation"]).save_pretrained(folder / "draft-last")
            (folder / "finished").touch()
        return folder / "draft-last"

    @wraps(replay)  # its options are checked
    def recorded_replay(**options):
        ran.record("replay", options["out"])
        return replay(**options)

    monkeypatch.setattr(module, "fit_once", pretended_fit)
    monkeypatch.setitem(module.MEASURES, "replay", recorded_replay)
    return ran


def facts_of(experiment: Path, choice: str) -> dict:
    """Those of the finished cell: what it was begun with, and its scalars."""
    return read_json(experiment / f"choice={choice}" / "seed=0" / "run.json")


def unpack(experiment: Path, choice: str) -> None:
    """Leave a cell as if its process had been killed before it noted that the cell is done."""
    run = facts_of(experiment, choice)
    del run["cell"]
    (experiment / f"choice={choice}" / "seed=0" / "run.json").write_text(json.dumps(run))


def inputs_of(cell: Cell) -> dict[str, str]:
    return describe_inputs(cell.training, local_folder("embedded-hass"), cell.options)


def cells_of(folder: str) -> list[Cell]:
    return Sweep.load(Path(folder, "sweep.yaml")).cells(Path(folder))


# --- what it does ---


def test_every_choice_with_every_seed_is_trained_and_measured(experiment, tmp_path, capsys):
    """With real trainings: drafts, scalars, no checkpoints, nothing twice; and seeds differ."""
    folder = experiment(seeds=[3, 4], choices=ONE)
    sweep(folder)
    weights = []
    for seed in (3, 4):
        draft = load_draft(tmp_path / f"choice=one/seed={seed}/draft-last")
        weights.append(draft.state_dict()["fc.weight"])
        assert draft.config.allocation == (2,) and draft.config.vocabulary_size == 50
        run = read_json(tmp_path / f"choice=one/seed={seed}/run.json")
        settings = run["cell"]["settings"]["fit"]
        assert settings["data.seed"] == settings["seed_everything"] == seed
        assert run["scalars"]["val/loss"] > 0
        assert not (tmp_path / f"choice=one/seed={seed}/checkpoints").exists()
    assert not weights[0].equal(weights[1])
    first = capsys.readouterr().out
    assert "2 of 2 trainings are done" in first
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.name in ("rounds.parquet", "run.json")}
    shutil.rmtree(tmp_path / "choice=one")  # as in a fresh clone
    for file, content in kept.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    sweep(folder)  # everything is done: only the table is made again
    assert first.endswith(capsys.readouterr().out) and len([*tmp_path.rglob("choice=one/*/*")]) == 4
    assert len([*read_scalars(tmp_path).values()]) == 2


@pytest.mark.nightly
def test_a_benchmark_measures_too(experiment, tmp_path, inputs, commands):
    options = {"target": str(inputs / "target"), "dtype": "float32", "suites": [str(inputs / "suite.jsonl")]}
    sweep(experiment(replay=None, benchmark=options | {"seed": "${seed}"}, seeds=[7], choices=ONE))
    assert {*read_rounds(tmp_path)["method"]} == {"plain", "generate", "one"}
    assert read_json(tmp_path / "choice=one/seed=7/run.json")["config"]["seed"] == 7


def test_what_a_cell_trains(experiment, tmp_path):
    """The seed may stand anywhere, that of the data be fixed; a choice counts before `fit`; nesting does not matter."""
    choices = {"one": {"model": {"allocation": [2], "start_from": "runs/${seed}/draft", "warmup": "${seed}"}}}
    replayed = {"store": "dev", "limit": "${seed}"}
    (cell,) = cells_of(experiment(fit={"data.seed": 7}, choices=choices, seeds=[1], replay=replayed))
    model = cell.training["model"]
    assert (model["start_from"], model["warmup"], cell.options["limit"]) == ("runs/1/draft", 1, 1)
    assert cell.training["data"]["seed"] == 7
    (tmp_path / "deep.yaml").write_text("seed_everything: 3\nmodel: {depth: 3}\ndata: {seed: 3}\n")
    deep = str(tmp_path / "deep.yaml")
    for files, fit, seed in ((deep, {"model.depth": 2}, 1), ([deep], {"model.depth": 2, "data.seed": 7}, 7)):
        one = {"one": {"config": files, "model": {"allocation": [2]}}}
        (cell,) = cells_of(experiment(fit=fit, choices=one, seeds=[1, 1]))
        options = cell.training
        assert (options["model"]["depth"], options["seed_everything"], options["data"]["seed"]) == (3, 1, seed)
    common = {"model": {"allocation": [1]}, "trainer.max_steps": 3}
    folder = experiment(fit=common, choices={"one": {"trainer": {"max_steps": 4}}, "two": None})
    assert [cell.settings()["fit"] for cell in cells_of(folder)] == [
        {"seed_everything": 0, "data.seed": 0, "model.allocation": [1], "trainer.max_steps": steps} for steps in (4, 3)
    ]


def test_shards_share_the_trainings_out(experiment):
    cells = cells_of(experiment(seeds=[0, 1, 2]))
    shares = [_share(cells, f"{i}/4") for i in range(1, 5)]
    assert sorted(cell.name for share in shares for cell in share) == sorted(cell.name for cell in cells)
    assert all({cell.choice for cell in _share(cells, f"{i}/{n}")} == {"one", "two"} for n in (2, 3) for i in (1, n))
    for wrong in ("0/2", "3/2", "half", "1/0"):
        with pytest.raises(ValueError, match="it must be i/n"):
            _share(cells, wrong)


def test_a_killed_sweep_resumes_with_its_settings_by_any_path(experiment, commands, tmp_path, monkeypatch, capsys):
    """A failure keeps no other training from running, and a cell of different settings is refused."""
    folder = experiment()
    commands.failing |= {"fit one/seed=0": RuntimeError("out of\nmemory"), "replay two/seed=0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        sweep(folder)
    printed = capsys.readouterr()
    assert printed.out.count("FAILED one, seed 0: out of memory\n") == 1 and "Traceback" in printed.err  # a bug
    assert commands == ["fit two/seed=0"]
    monkeypatch.chdir(tmp_path)
    commands.failing["fit one/seed=0"] = ValueError("no step")
    with pytest.raises(ValueError, match=r"^1 of 2 trainings failed: one, seed 0$"):
        sweep(".")
    assert commands[1:] == ["replay two/seed=0"]  # of the second training, only the measure was left
    assert facts_of(tmp_path, "two")["scalars"] == {}
    other = {"choices": {"one": {"model": {"allocation": [1]}}}, "reference": None}
    words = r"one/seed=0 was begun with other settings \(fit.model.allocation \[2\], now \[1\]\)"
    with pytest.raises(ValueError, match=words):  # it has not trained a step
        sweep(experiment(**other))
    sweep(experiment())
    assert commands[2:] == ["fit one/seed=0", "replay one/seed=0"]
    assert [*tmp_path.rglob("answers.parquet")] == [tmp_path / "answers.parquet"]
    with pytest.raises(ValueError, match=words):
        sweep(experiment(**other))
    words = r"one/seed=0 was .*replay.store '.*', now 'nowhere'; replay.nodes 20, now None\)"
    with pytest.raises(ValueError, match=words):
        sweep(experiment(seeds=[0, 1], replay={"store": "nowhere"}))


def test_what_another_process_trains_is_left_to_it(experiment, tmp_path, capsys, commands):
    """Overlapping shares, or a job that was queued again, must not write into one folder."""
    folder = experiment()
    with Work(tmp_path / "choice=one/seed=0/training").part("cell"):
        sweep(folder)
    assert not (tmp_path / "choice=one/seed=0/cell.json").exists()
    out = capsys.readouterr().out
    assert "another process is training it" in out and "1 of 2 trainings are done" in out


# --- settings and inputs ---


def test_a_finished_training_needs_no_store_and_notes_its_inputs_and_processes(
    experiment, tmp_path, stores, commands, capsys
):
    """Nor does a measure that has its records."""
    copy = shutil.copytree(stores, tmp_path / "stores")
    store, folder = (
        str(copy / "all"),
        experiment(fit=fit_on(copy / "all"), choices=ONE, replay={"store": str(copy / "dev")}),
    )
    sweep(folder)
    cell = facts_of(tmp_path, "one")["cell"]
    assert cell["inputs"][store] == sha256(copy / "all/manifest.json") and "trainer/base.yaml" in cell["inputs"]
    assert [process["git"] for process in cell["processes"]] == [COMMIT]
    shutil.rmtree(copy / "all")
    (copy / "dev").rename(copy / "away")
    sweep(folder)
    assert commands == ["fit one/seed=0", "replay one/seed=0"]
    (copy / "away").rename(copy / "dev")
    unpack(tmp_path, "one")
    sweep(folder)
    assert commands[2:] == ["replay one/seed=0"]
    unpack(tmp_path, "one")
    note = tmp_path / "choice=one/seed=0/cell.json"
    dev = str(copy / "dev")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"inputs": {dev: "another"}}))
    with pytest.raises(ValueError, match="1 of 1 trainings failed: one, seed 0"):
        sweep(folder)
    assert f"one/seed=0 was begun with other settings ({dev} 'another', now " in capsys.readouterr().out


def test_a_start_must_be_finished_and_is_digested(experiment, tmp_path, commands):
    """Every validation rewrites the draft's folder, so that of an unfinished training is no start."""
    start = str(tmp_path / "choice=one/seed=0/draft-last")
    two = {"two": {"model": {"allocation": [1, 1], "start_from": start}}}
    sweep(experiment(choices=ONE | two))
    assert facts_of(tmp_path, "two")["cell"]["inputs"][start] == sha256(Path(start) / "model.safetensors")
    unpack(tmp_path, "two")
    shutil.rmtree(tmp_path / "choice=two")
    (tmp_path / "choice=one/seed=0/finished").unlink()
    with pytest.raises(ValueError, match=r"sweep.yaml: two, seed 0: .*one/seed=0 is not finished"):
        sweep(experiment(choices=two, reference="two"))


def test_a_shipped_start_and_the_text_of_training_and_measure_are_digested(experiment, inputs, tmp_path, monkeypatch):
    """A folder of the name of a shipped draft is the one that is meant."""
    corpus, suite = inputs / "corpus.jsonl", inputs / "suite.jsonl"
    given = {"fit": {"data": {"corpus": str(corpus), "target": "embedded"}, "trainer": TRAINER}, "replay": None}
    start = {"one": {"model": {"allocation": [6], "start_from": "embedded-hass"}}}
    suites = [f"{suite}?field=question", "maths"]
    (cell,) = cells_of(experiment(**given, choices=start, benchmark={"suites": suites}))
    shipped, digests = SHIPPED / "embedded-hass" / "model.safetensors", inputs_of(cell)
    expected = {str(corpus): corpus, str(suite): suite, "embedded-hass": shipped}
    assert {name: digests.get(name) for name in expected} == {name: sha256(file) for name, file in expected.items()}
    assert "maths" not in digests
    (tmp_path / "embedded-hass").mkdir()
    (tmp_path / "embedded-hass" / "model.safetensors").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path)
    assert inputs_of(cell)["embedded-hass"] == sha256("embedded-hass/model.safetensors") != sha256(shipped)


REFUSED = [
    # a wrong sweep
    ({"replay": None}, "give one of replay and benchmark"),
    ({"replay": {"store": "s", "drafts": {"a": "b"}}}, "drafts is among the options of the measure"),
    ({"choices": {"generate": None}}, "a draft is named 'generate', like a baseline"),
    ({"fit": {"config": ["gone.yaml"]}}, "one, seed 0: gone.yaml: no such file"),
    ({"reference": "three"}, "reference is 'three', which is none of one, two"),
    ({"fit": {"config": 5}}, "fit.config is 5; it must be a valid string"),
    ({"sedes": [1]}, r"sedes is \[1\]; Unexpected keyword"),
    # what would fail
    ({"replay": {"store": "missing"}}, "one, seed 0: missing is not a finished feature store"),
    ({"replay": {"store": "DEV", "nodess": 10}}, "'nodess'"),
    ({"replay": {"store": "DEV", "depth": 9, "nodes": 9}}, "which cannot hold a path of depth 9"),
    ({"replay": None, "benchmark": {"suites": ["nowhere.jsonl"]}}, "suite 'nowhere.jsonl' is not a file"),
    ({"replay": None, "benchmark": {"baselines": ["beam"]}}, "baselines"),
    ({"choices": ONE | {"two": {"model": {"alocation": [2]}}}}, "two, seed 0: .*alocation'"),
    ({"choices": ONE | {"two": {"model": {"allocation": [2], "start_from": "gone/draft-last"}}}}, "draft 'gone/draft"),
    ({"replay": {"store": "ANOTHER"}}, "one, seed 0: .*another is of another target than the draft: "),
]


def test_a_wrong_sweep_is_refused_before_anything_is_trained(experiment, tmp_path, stores):
    write_store(tmp_path / "another", tiny_target(1), talks()[:2], **SIZES)
    for changes, words in REFUSED:
        places = json.dumps(changes).replace("DEV", str(stores / "dev")).replace("ANOTHER", str(tmp_path / "another"))
        with pytest.raises(ValueError, match=words) as error:
            sweep(experiment(**json.loads(places)))
        assert str(error.value).startswith(str(tmp_path / "sweep.yaml")), words
        assert not [*tmp_path.glob("choice=*")]


# --- processes ---


def test_a_training_on_several_devices_is_a_process_of_its_own(experiment, tmp_path, stores, monkeypatch, capsys):
    """Lightning's other processes run the first one's command line, so that must be that of a fit alone."""

    def start(command, *, env, **options):
        assert command[:5] == [sys.executable, "-P", "-m", "poss_lightning.cli", "fit"]
        assert env["PYTHONSAFEPATH"] == "1"  # for the processes that it starts, too
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(training, "Popen", start)
    with pytest.raises(ValueError, match="1 of 1 trainings failed: one, seed 0"):
        sweep(experiment(fit=fit_on(stores / "all", devices=2), choices=ONE))
    assert "FAILED one, seed 0: the training ended with exit code 3" in capsys.readouterr().out
    assert not (tmp_path / "choice=one/seed=0/finished").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_to_a_sweep_reaches_its_training_which_saves(tmp_path, monkeypatch, number):
    """Sent to the sweep alone; then the sweep ends, too."""
    python, began, saved = (tmp_path / name for name in ("python", "began", "saved"))
    trap = f"trap 'sleep 0.2; touch {saved}; exit 1' TERM INT HUP"
    python.write_text(f"#!/bin/sh\n{trap}\ntouch {began}\nwhile true; do sleep 0.1; done\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def send() -> None:
        end = time.monotonic() + SECONDS
        while not began.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.default_int_handler)  # jobs in the background ignore SIGINT
    threading.Thread(target=send).start()
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            training._fit_apart([])
        assert saved.exists() and signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.nightly
def test_a_sweep_of_two_processes_that_a_signal_stopped_resumes_by_the_same_command(experiment, tmp_path, stores):
    steps = {"max_steps": 40, "max_epochs": -1, "val_check_interval": 40, "log_every_n_steps": 1}
    experiment(fit=fit_on(stores / "all", devices=2, enable_progress_bar=True, **steps), choices=ONE)
    command = [Path(sys.executable).parent / "poss", "sweep", "."]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "step 2 of" in line:
                process.terminate()
        assert process.wait() == 128 + signal.SIGTERM, said
    assert any("stopped at step" in line for line in said) and [*tmp_path.rglob("last.ckpt")], said
    subprocess.run(command, cwd=tmp_path, check=True)
    assert [*tmp_path.rglob("finished")] and not [*tmp_path.rglob("last.ckpt")]
