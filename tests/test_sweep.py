"""A sweep: every choice with every seed, once; killed and gone on with; shared out; summed up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from poss_lightning import sweep as module
from poss_lightning.corpus.readers import Conversation
from poss_lightning.draft.specialists import SHIPPED, Specialists
from poss_lightning.evaluation.cells import pack, packed_cells, packed_rows
from poss_lightning.evaluation.provenance import COMMIT
from poss_lightning.evaluation.records import UNFINISHED, read_cells, read_records
from poss_lightning.evaluation.replay import replay
from poss_lightning.features.extract import write_store
from poss_lightning.files import find_config, public_name, sha256
from poss_lightning.sweep import Sweep, _share, sweep
from poss_lightning.training import fit as training
from poss_lightning.work import Work
from tests.support.tiny import tiny_draft, tiny_target

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
WORDS = ["the sky is blue", "why is it so", "tell me a story", "water flows down", "a cat sat here", "count to ten"]
TRAINER = {
    "max_steps": 2,
    "accelerator": "cpu",
    "devices": 1,
    "precision": "32-true",
    "callbacks": [
        {"class_path": "poss_lightning.training.callbacks.DraftFolders", "init_args": {"monitor": "val/loss"}}
    ],
    "val_check_interval": 2,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "store"
    conversations = [
        Conversation(
            f"odd/{i}",
            [
                {"role": "user", "content": WORDS[i % 6]},
                {"role": "assistant", "content": f"{WORDS[(i + 1) % 6]} {i} " * 3},
            ],
        )
        for i in range(40)
    ]
    write_store(folder, tiny_target(), conversations, max_length=128, batch_tokens=1024, shard_bytes=2**20)
    return str(folder)


@pytest.fixture
def experiment(tmp_path, store):
    """A folder with a sweep.yaml; returns a function that changes it."""

    def write(**changes):
        fit = {"data": {"store": store, "validation": 0.2}, "trainer": TRAINER, "model": {"vocabulary_size": 50}}
        given = {
            "fit": fit,
            "choices": {"one": {"model": {"allocation": [2]}}, "two": {"model": {"allocation": [1, 1]}}},
            "seeds": [0, 1],
            "replay": {"store": store, "nodes": 20},
            "reference": "one",
        }
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(given | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def commands(monkeypatch):
    """What ran, "fit" and "replay", and `before`, called with each and with the folder of the cell."""
    return Commands(monkeypatch)


class Commands(list):
    def __init__(self, monkeypatch):
        super().__init__()
        self.before, fit_once = lambda command, folder: None, module.fit_once

        def counted_fit(folder, *options):
            if not (folder / "finished").exists():
                self.count("fit", folder)
            return fit_once(folder, *options)

        @wraps(replay)  # its options are checked
        def counted_replay(**options):
            self.count("replay", options["out"])
            return replay(**options)

        monkeypatch.setattr(module, "fit_once", counted_fit)
        monkeypatch.setitem(module.MEASURES, "replay", counted_replay)

    def count(self, command, folder):
        self.before(command, str(folder))
        self.append(command)


def facts_of(experiment: Path, choice: str, seed: int = 0) -> dict:
    (cell,) = packed_cells(experiment / "cells" / choice / f"seed-{seed}")
    return cell.facts


def unpack(experiment: Path, choice: str, seed: int = 0) -> None:
    """As if the process had been killed before it wrote down that the cell is done."""
    lines = (experiment / "cells.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if (json.loads(line)["choice"], json.loads(line)["seed"]) != (choice, seed)]
    (experiment / "cells.jsonl").write_text("".join(kept))


def test_every_choice_with_every_seed_once_and_one_table(experiment, tmp_path, capsys, commands):
    folder = experiment()
    sweep(folder)
    assert commands == ["fit", "replay"] * 4
    assert set(read_cells(tmp_path / "cells")) == {(choice, seed) for choice in ("one", "two") for seed in (0, 1)}
    for seed in (0, 1):
        draft = Specialists.from_pretrained(tmp_path / f"cells/two/seed-{seed}/draft-last")
        assert draft.config.allocation == (1, 1) and draft.config.vocabulary_size == 50
        assert facts_of(tmp_path, "two", seed)["scalars"]["val/loss"][1] > 0
        assert not (tmp_path / f"cells/two/seed-{seed}/checkpoints").exists()
    first = capsys.readouterr().out
    assert "4 of 4 trainings are done" in first
    shutil.rmtree(tmp_path / "cells")  # as in a fresh clone
    sweep(folder)  # everything is there: only the table is made anew
    assert len(commands) == 8 and first.endswith(capsys.readouterr().out)


def test_seeds_differ_and_the_same_seed_does_not(experiment, tmp_path):
    sweep(experiment(seeds=[3, 4]))
    weights = {
        cell: Specialists.from_pretrained(tmp_path / "cells" / cell / "draft-last").state_dict()["fc.weight"]
        for cell in ("one/seed-3", "one/seed-4")
    }
    assert not weights["one/seed-3"].equal(weights["one/seed-4"])
    given = yaml.safe_load((tmp_path / "cells/one/seed-3/fit.yaml").read_text())
    assert given["seed_everything"] == given["data"]["seed"] == 3


@pytest.mark.parametrize("data", [{"data": {"seed": 7}}, {"data.seed": 7}], ids=str)
def test_the_order_of_the_data_may_be_one_for_all_seeds(experiment, data):
    own = Sweep.load(Path(experiment(fit=data)) / "sweep.yaml")
    assert {cell.fit["data"]["seed"] for cell in own.cells(Path("x"))} == {7}


def test_an_option_of_fit_may_stand_for_another(experiment, tmp_path):
    own = Sweep.load(
        Path(experiment(fit={"trainer": {"max_steps": 7, "val_check_interval": "${trainer.max_steps}"}})) / "sweep.yaml"
    )
    assert own.cells(tmp_path)[0].fit["trainer"] == {"max_steps": 7, "val_check_interval": 7}


def test_a_config_that_is_no_yaml_is_named(experiment, tmp_path):
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"one, seed 0: .*broken.yaml is no YAML, line 1"):
        sweep(experiment(fit={"config": [str(tmp_path / "broken.yaml")]}))


def test_shards_share_the_trainings_out(experiment):
    cells = Sweep.load(Path(experiment(seeds=[0, 1, 2])) / "sweep.yaml").cells(Path("x"))
    shares = [_share(cells, f"{i}/4") for i in range(1, 5)]
    assert sorted(str(cell) for share in shares for cell in share) == sorted(map(str, cells)) and len(cells) == 6
    for wrong in ("0/2", "3/2", "half", "1/0"):
        with pytest.raises(ValueError, match="it must be i/n"):
            _share(cells, wrong)


def test_a_killed_sweep_goes_on(experiment, commands):
    folder = experiment()

    def dies(command, folder):
        if len(commands) == 3:
            raise KeyboardInterrupt

    commands.before = dies
    with pytest.raises(KeyboardInterrupt):
        sweep(folder)
    commands.clear()
    commands.before = lambda command, folder: None
    sweep(folder)
    assert commands == ["replay", "fit", "replay", "fit", "replay"]  # of the second training, only the measure was left


def test_a_training_of_other_settings_is_not_taken_for_this_one(experiment, tmp_path, capsys):
    sweep(experiment(seeds=[0]))
    with pytest.raises(ValueError, match=r"one/seed-0 was made with other settings \(fit.model.allocation\)"):
        sweep(experiment(seeds=[0], choices={"one": {"model": {"allocation": [1]}}}, reference=None))
    unpack(tmp_path, "one")
    (tmp_path / "cells/one/seed-0/cell.json").unlink()
    (tmp_path / "cells/one/seed-0/finished").unlink()
    with pytest.raises(ValueError, match="1 of 1 trainings failed: one, seed 0"):
        sweep(experiment(seeds=[0], choices={"one": {"model": {"allocation": [1]}}}, reference=None))
    said = capsys.readouterr()
    assert "one/seed-0 was trained with other settings, or" in said.out and "Traceback" not in said.err


def test_a_copy_of_an_experiment_says_what_to_copy(experiment, tmp_path):
    sweep(experiment(seeds=[0]))
    mine = tmp_path.parent / "mine"
    shutil.copytree(tmp_path, mine)
    experiment(seeds=[0, 1], replay={"store": "nowhere"})
    (tmp_path / "sweep.yaml").rename(mine / "sweep.yaml")
    words = r"one/seed-0 was .*\(replay.nodes, replay.store\), one of 2 such of 4: .*sweep.yaml alone"
    with pytest.raises(ValueError, match=words):
        sweep(str(mine))


@pytest.mark.parametrize(
    ("error", "traced"), [(RuntimeError("out of\nmemory"), True), (NotImplementedError("out of\nmemory"), False)]
)
def test_one_failure_does_not_keep_the_others_from_being_done(experiment, tmp_path, capsys, commands, error, traced):
    def fails(command, folder):
        if "one/seed-0" in folder:
            raise error

    commands.before = fails
    with pytest.raises(ValueError, match=r"^1 of 2 trainings failed: one, seed 0$"):
        sweep(experiment(seeds=[0]))
    assert facts_of(tmp_path, "two")
    said = capsys.readouterr()
    assert said.out.count("FAILED one, seed 0: out of memory\n") == 1 and ("Traceback" in said.err) == traced


def test_time_left_is_told_once_a_training_is_done(experiment, capsys, monkeypatch):
    clock = iter(range(0, 10_000, 60))  # a minute passes between looks
    monkeypatch.setattr("poss_lightning.sweep.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(module.Cell, "run", lambda cell: None)
    monkeypatch.setattr(module.Cell, "pack", lambda cell, experiment: None)
    sweep(experiment())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert lines == [
        "[1/4] one, seed 0",
        "[2/4] two, seed 0, 0:03:00 left",
        "[3/4] one, seed 1, 0:02:00 left",
        "[4/4] two, seed 1, 0:01:00 left",
    ]


ONE = {"one": {"model": {"allocation": [2]}}}
HOPELESS = [
    ({"replay": {"store": "missing"}}, "one, seed 0: missing is no finished feature store"),
    ({"replay": {"store": "STORE", "nodess": 10}}, "'nodess'"),
    ({"replay": {"store": "STORE", "dept": 4}}, "'dept'"),
    ({"replay": {"store": "STORE", "device": "tpu"}}, "device is 'tpu'"),
    ({"replay": None, "benchmark": {"suites": ["nowhere.jsonl"]}}, "suite 'nowhere.jsonl' is no .jsonl file"),
    ({"replay": None, "benchmark": {"tree": "large"}}, "one, seed 0: tree is .large.; it must be fixed or auto"),
    ({"replay": {"store": "STORE", "nodes": 0}}, "one, seed 0: nodes is 0; it must lie between 1 and 1,024"),
    ({"replay": {"store": "STORE", "depth": 9, "nodes": 9}}, "which cannot hold a path of depth 9"),
    ({"replay": {"store": "STORE", "tree_width": 0}}, "tree_width is 0; it must lie between 1 and 64"),
    ({"replay": None, "benchmark": {"baselines": ["generate"]}}, "it must hold autoregressive"),
    ({"replay": None, "benchmark": {"repeats": 0}}, "repeats is 0; it must lie between 1 and"),
    ({"replay": None, "benchmark": {"temperature": -1}}, "temperature is -1"),
    ({"choices": ONE | {"two": {"model": {"alocation": [2]}}}}, "two, seed 0: .*'alocation'"),
    ({"choices": ONE | {"two": {"model": {"depth": 2}}}}, "two, seed 0: .* required: model.allocation"),
    ({"choices": ONE | {"two": {"model": {"allocation": [2, 2, 2], "depth": 4}}}}, "depth is 4, which never reaches"),
    ({"choices": ONE | {"two": {"model": {"allocation": [2], "start_from": "gone/draft-last"}}}}, "draft 'gone/draft"),
    ({"choices": ONE | {"two": {"model": {"allocation": [2]}, "trainer": {"max_step": 2}}}}, "'max_step'"),
    (
        {"choices": ONE | {"two": {"model": {"allocation": [2]}, "data": {"store": "missing"}}}},
        "missing is no finished",
    ),
]


@pytest.mark.parametrize(("changes", "words"), HOPELESS, ids=lambda x: str(x)[:60])
def test_what_can_only_fail_is_refused_before_anything_is_trained(
    experiment, tmp_path, store, commands, changes, words
):
    given = json.loads(json.dumps({"seeds": [0]} | changes).replace("STORE", store))
    with pytest.raises(ValueError, match=words) as error:
        sweep(experiment(**given))
    assert str(error.value).startswith(f"{tmp_path / 'sweep.yaml'}: ")
    assert not commands and not (tmp_path / "cells").exists()


def test_a_store_of_another_target_measures_no_draft_of_this_one(experiment, tmp_path):
    words = [Conversation("a/0", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])]
    write_store(tmp_path / "other", tiny_target(seed=1), words, max_length=128, batch_tokens=1024, shard_bytes=2**20)
    with pytest.raises(ValueError, match="other is of another target than the draft: "):
        sweep(experiment(replay={"store": str(tmp_path / "other")}))


def test_a_training_may_start_from_one_of_the_same_experiment(experiment, tmp_path):
    start = str(tmp_path / "cells/one/seed-${seed}/draft-last")
    two = {"two": {"model": {"allocation": [1, 1], "start_from": start}}}
    sweep(experiment(seeds=[3], choices=ONE | two))
    assert start.replace("${seed}", "3") in facts_of(tmp_path, "two", 3)["inputs"]
    (tmp_path / "cells/one/seed-3/finished").unlink()
    unpack(tmp_path, "two", 3)
    shutil.rmtree(tmp_path / "cells/two")
    with pytest.raises(ValueError, match=r"sweep.yaml: two, seed 3: .*one/seed-3 is not finished"):
        sweep(experiment(seeds=[3], choices=two, reference="two"))


def test_inner_layers_are_there_for_the_measure_too(experiment, tmp_path, store):
    said = [
        Conversation(f"a/{i}", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        for i in range(40)
    ]
    write_store(
        tmp_path / "all",
        tiny_target(num_hidden_layers=4),
        said,
        max_length=128,
        batch_tokens=1024,
        shard_bytes=2**20,
        layers=(1, 2),
    )
    fit = {"data": {"store": str(tmp_path / "all"), "validation": 0.2}, "trainer": TRAINER}
    eagle3 = {"one": {"model": {"allocation": [2], "kind": "eagle3"}}}
    write_store(
        tmp_path / "dev", tiny_target(num_hidden_layers=4), said, max_length=128, batch_tokens=1024, shard_bytes=2**20
    )
    with pytest.raises(ValueError, match=r"one, seed 0: .*dev keeps no outputs of layer"):
        sweep(experiment(fit=fit, choices=eagle3, replay={"store": str(tmp_path / "dev")}))


def test_another_measure_is_refused_only_of_records(experiment, tmp_path, store, commands):
    def fails(command, folder):
        if command == "replay":
            raise ValueError("no replay")

    commands.before, cell = fails, tmp_path / "cells/one/seed-0"
    shutil.copytree(store, tmp_path / "dev")
    with pytest.raises(ValueError, match="1 of 1 trainings failed"):
        sweep(experiment(seeds=[0], choices=ONE, replay={"store": str(tmp_path / "dev")}))
    (cell / "run.json").write_text(json.dumps({"config": {"store": "dev"}, "methods": {}}))  # killed before its records
    (manifest := tmp_path / "dev/manifest.json").write_text(manifest.read_text() + " ")  # extracted anew
    commands.before, dev = lambda command, folder: None, str(tmp_path / "dev")
    sweep(experiment(seeds=[0], choices=ONE, replay={"store": dev, "nodes": 9}))
    assert (
        commands == ["fit", "replay"]
        and json.loads((cell / "cell.json").read_text())["settings"]["replay"]["nodes"] == 9
    )
    assert facts_of(tmp_path, "one")["run"]["methods"]["one"]["nodes"] == 9
    unpack(tmp_path, "one")
    with pytest.raises(ValueError, match=r"made with other settings \(replay.nodes\)"):
        sweep(experiment(seeds=[0], choices=ONE, replay={"store": dev, "nodes": 10}))


def test_a_training_that_took_no_step_may_have_other_settings(experiment, tmp_path, store, monkeypatch):
    fit = {"data": {"store": str(tmp_path / "copy"), "validation": 0.2}, "trainer": TRAINER}
    shutil.copytree(store, tmp_path / "copy")
    cell = tmp_path / "cells/one/seed-0"

    def fails(self):
        raise ValueError("no step")

    with monkeypatch.context() as patch:
        patch.setattr("poss_lightning.training.module.SpecialistTraining.on_train_start", fails, raising=False)
        with pytest.raises(ValueError, match="1 of 1 trainings failed"):
            sweep(experiment(seeds=[0], choices=ONE, fit=fit))
    (cell / "events.out.tfevents.0.stale").touch()
    assert (cell / "fit.yaml").exists() and not (cell / "draft-last").exists()
    (tmp_path / "copy/manifest.json").write_text((tmp_path / "copy/manifest.json").read_text() + " ")
    sweep(experiment(seeds=[0], choices={"one": {"model": {"allocation": [1]}}}, fit=fit))
    assert Specialists.from_pretrained(cell / "draft-last").config.allocation == (1,)
    assert not (cell / "events.out.tfevents.0.stale").exists()
    with pytest.raises(ValueError, match="one/seed-0 was made with other settings"):
        sweep(experiment(seeds=[0], choices=ONE, fit=fit))


def test_what_is_finished_needs_no_store(experiment, tmp_path, store, commands, capsys):
    shutil.copytree(store, tmp_path / "all")
    fit = {"data": {"store": str(tmp_path / "all"), "validation": 0.2}, "trainer": TRAINER}
    given = {"fit": fit, "seeds": [0], "choices": ONE}
    sweep(experiment(**given))
    shutil.rmtree(tmp_path / "all")
    unpack(tmp_path, "one")
    sweep(experiment(**given))  # the measure is left
    assert commands == ["fit", "replay", "replay"]
    given["replay"] = {"store": str(tmp_path / "gone"), "nodes": 20}
    line = facts_of(tmp_path, "one")
    line["settings"]["replay"] = given["replay"]
    (tmp_path / "cells.jsonl").write_text(json.dumps(line))
    capsys.readouterr()
    sweep(experiment(**given))
    assert len(commands) == 3 and "1 of 1 trainings are done" in capsys.readouterr().out


def test_what_another_process_trains_is_left_to_it(experiment, tmp_path, capsys):
    """Overlapping shares, or a job that was queued again, must not write into one folder."""
    folder = experiment(seeds=[0])
    (tmp_path / "cells/one/seed-0").mkdir(parents=True)
    with Work(tmp_path / "cells").part("one/seed-0/training"):
        sweep(folder)
    assert not (tmp_path / "cells/one/seed-0/cell.json").exists()
    out = capsys.readouterr().out
    assert "another process is at it" in out and "1 of 2 trainings are done" in out


def test_a_training_knows_what_it_was_made_of_and_by_whom(experiment, tmp_path, store, capsys):
    sweep(experiment(seeds=[0]))
    cell = tmp_path / "cells/one/seed-0"
    line = facts_of(tmp_path, "one")
    assert line["inputs"][store] == sha256(Path(store) / "manifest.json") and "trainer/base.yaml" in line["inputs"]
    assert [process["git"] for process in line["processes"]] == [COMMIT]
    made = json.loads((cell / "cell.json").read_text())
    packed = (tmp_path / "cells.jsonl").read_text()
    unpack(tmp_path, "one")
    (cell / "cell.json").write_text(json.dumps({**made, "inputs": {store: "another"}}))
    with pytest.raises(ValueError, match="1 of 2 trainings failed: one, seed 0"):
        sweep(experiment(seeds=[0]))
    assert f"one/seed-0 was begun with another {store} than is here now" in capsys.readouterr().out
    (tmp_path / "cells.jsonl").write_text(packed.replace(line["inputs"][store], "another", 1))
    sweep(experiment(seeds=[0]))  # a table of such is made, with a warning
    said = " ".join(capsys.readouterr().out.split())
    assert f"WARNING: not comparable: these trainings had 2 different {public_name(store)}" in said


def test_a_start_must_be_finished_and_is_digested_wherever_it_is_named(experiment, tmp_path):
    """A draft folder is rewritten by every validation, so one of a training that failed half-way is not begun with."""
    sweep(experiment(seeds=[0], choices={"one": {"model": {"allocation": [2]}}}))
    start = tmp_path / "cells/one/seed-0/draft-last"
    (tmp_path / "start.yaml").write_text(f"model: {{start_from: {start}}}")
    child = {"config": [str(tmp_path / "start.yaml")], "model": {"allocation": [1, 1]}}
    folder = experiment(seeds=[0], choices={"one": {"model": {"allocation": [2]}}, "two": child})
    (start.parent / "finished").unlink()
    cell = Sweep.load(tmp_path / "sweep.yaml").cells(tmp_path)[1]
    with pytest.raises(ValueError, match=r"two/seed-0 starts from .*draft-last, but .*one/seed-0 is not finished"):
        cell.inputs()
    (start.parent / "finished").touch()
    sweep(folder)
    assert facts_of(tmp_path, "two")["inputs"][str(start)] == sha256(start / "model.safetensors")


def test_a_config_that_changed_is_another_training(experiment, tmp_path):
    config = tmp_path / "more.yaml"
    config.write_text("model: {allocation: [1], learning_rate: 1.0e-3}")
    options = yaml.safe_load(Path(experiment(), "sweep.yaml").read_text())["fit"]
    training.fit_once(tmp_path / "run", [str(config)], options)
    training.fit_once(tmp_path / "run", [str(config)], options)
    config.write_text("model: {allocation: [1], learning_rate: 5.0}")
    with pytest.raises(ValueError, match="run was trained with other settings, or with configs that have changed"):
        training.fit_once(tmp_path / "run", [str(config)], options)


def test_an_experiment_may_be_called_by_another_path(experiment, tmp_path, commands, monkeypatch):
    sweep(experiment(seeds=[0]))
    unpack(tmp_path, "two")
    monkeypatch.chdir(tmp_path)
    commands.clear()
    sweep(".")
    assert commands == ["replay"]


def test_a_kill_in_the_last_validation_costs_no_training(experiment, tmp_path, monkeypatch):
    """What was left is trained again: a checkpoint behind the last step would leave nothing to do."""
    callbacks = [
        *TRAINER["callbacks"],
        {
            "class_path": "poss_lightning.training.callbacks.LastCheckpoint",
            "init_args": {"every_n_train_steps": 1},
        },
    ]
    fit = {"trainer": {**TRAINER, "callbacks": callbacks}}
    whole = experiment(seeds=[0], choices={"one": {"model": {"allocation": [2]}, **fit}})

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("poss_lightning.training.module.SpecialistTraining.on_validation_start", dies, raising=False)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            sweep(whole)
    assert (tmp_path / "cells/one/seed-0/checkpoints/last.ckpt").exists()
    sweep(whole)
    assert facts_of(tmp_path, "one")["scalars"]["val/loss"][0] == TRAINER["max_steps"] - 1  # Lightning counts from 0
    assert Specialists.from_pretrained(tmp_path / "cells/one/seed-0/draft-last")


def test_a_benchmark_measures_too_and_the_seed_can_be_named(experiment, tmp_path, tiny_folder):
    suite = tmp_path / "s.jsonl"
    suite.write_text("".join(json.dumps({"question_id": i, "turns": [f"word {i}"]}) + "\n" for i in range(3)))
    options = {
        "target": tiny_folder,
        "dtype": "float32",
        "suites": [str(suite)],
        "max_new_tokens": 9,
        "seed": "${seed}",
    }
    sweep(
        experiment(
            replay=None,
            benchmark=options,
            seeds=[7],
            choices={"two": {"model": {"allocation": [1, 1]}}},
            reference="two",
        )
    )
    records = read_records(tmp_path / "cells/two/seed-7")
    assert {record.method for record in records} == {"autoregressive", "generate", "two"}
    assert {record.seed for record in records} == {7}


def test_a_training_on_several_devices_is_a_process_of_its_own(experiment, tmp_path, store, monkeypatch, capsys):
    """Lightning's other processes would run the first one's command line, which is then that of a fit alone."""
    choices, started = {"one": {"model": {"allocation": [2]}}}, []
    fit = {"data": {"store": store, "validation": 0.2}, "trainer": {**TRAINER, "devices": 2}}
    folder = experiment(seeds=[0], fit=fit, choices=choices)

    def start(command, **options):
        started.append(command)
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(training, "Popen", start)
    with pytest.raises(ValueError, match="1 of 1 trainings failed: one, seed 0"):
        sweep(folder)
    assert "FAILED one, seed 0: the training ended with exit code 3" in capsys.readouterr().out
    assert [command[:4] for command in started] == [[sys.executable, "-m", "poss_lightning.cli", "fit"]]
    options = yaml.safe_load(Path(started[0][-1]).read_text())
    assert options["trainer"]["devices"] == 2 and options["data"]["store"] == store
    assert not (tmp_path / "cells/one/seed-0/finished").exists()


def test_ctrl_c_of_a_sweep_waits_for_a_training_apart(tmp_path):
    """The terminal tells both; the training writes its checkpoint behind the step."""
    python, began, saved = (tmp_path / name for name in ("python", "began", "saved"))
    wait = "while true; do sleep 0.1; done"
    python.write_text(f"#!/bin/sh\ntrap 'sleep 1; touch {saved}; exit 130' INT; touch {began}; {wait}\n")
    python.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from poss_lightning.training import fit; "
        f"sys.executable = '{python}'; fit._fit_apart(fit.FitOptions(), Path('{tmp_path}'))"
    )
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # of a job in the background nobody does
    command = [sys.executable, "-c", code]
    parent = subprocess.Popen(command, start_new_session=True, preexec_fn=listens, stderr=subprocess.DEVNULL)
    _until(began.exists)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait() and saved.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_training_apart_ends_with_its_sweep(tmp_path):
    """So that none goes on writing into a folder whose lock is free."""
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(f"#!/bin/sh\necho $$ > {said}.tmp; mv {said}.tmp {said}; exec sleep 60\n")
    python.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from poss_lightning.training import fit; "
        f"sys.executable = '{python}'; fit._fit_apart(fit.FitOptions(), Path('{tmp_path}'))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    _until(said.exists)
    facts = Path("/proc") / said.read_text().strip() / "stat"
    parent.kill()
    parent.wait()
    _until(lambda: not facts.exists() or " Z " in facts.read_text())


def _until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


BAD = [
    ({"choices": {}}, r"choices are \[\]"),
    ({"seeds": []}, r"seeds \[\]"),
    ({"seeds": [0, 0]}, "none twice"),
    ({"seeds": ["a"]}, '"seeds"'),
    ({"seeds": [-1]}, '"seeds"'),
    ({"seeds": 3}, r"seeds is '3'; it must be a list \[A,B\], each a whole number"),
    ({"replay": None}, "give one of replay and benchmark"),
    ({"replay": {"store": "s", "drafts": {"a": "b"}}}, "drafts is among the options of the measure"),
    ({"replay": {"nodes": 9}}, "replay has no store"),
    ({"replay": 3}, "replay is '3'; it must be names with values {A: B} or null"),
    ({"fit": [1]}, r"fit is '\[1\]'; it must be names with values {A: B} or null"),
    ({"choices": {"one": [1]}}, r"choice one is \[1\]; it must be options of `poss fit`, as {model: {allocation: "),
    ({"choices": ["one"]}, r"choices is .*; it must be names with values {A: B}"),
    ({"choices": {"a/b": None}}, "a choice is named 'a/b'"),
    ({"choices": {"generate": None}}, "a choice is named 'generate'"),
    ({"choices": {20: None}}, "a choice is named 20, which YAML reads as int: quote it"),
    ({"choices": {"one": {"config": "lab.yaml"}}}, "config of one is 'lab.yaml'; it must be a list"),
    ({"choices": {"one": {"config": ["labb.yaml"]}}}, "conf/labb.yaml is neither"),
    ({"reference": "three"}, "reference is 'three', which is none of one, two"),
    ({"reference": 3}, "reference is '3'; it must be a text or null; YAML reads 3 as int: quote it"),
    ({"sedes": [1]}, r"it has 'sedes'; did you mean seeds\?"),
    ({"replay": {"store": "s", "nodse": 9}}, "one, seed 0: Option 'nodse' is not accepted; did you mean nodes"),
    ({"replay": {"store": "s", "nodes": "many"}}, "one, seed 0: nodes is 'many'; it must be a whole number"),
    ({"choices": {"one": {"model": {"alocation": [2]}}}}, "one, seed 0: .*'alocation'; did you mean model.allocation"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda x: str(x)[:20])
def test_what_is_no_sweep_is_refused(experiment, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words) as error:
        sweep(experiment(**changes))
    assert str(tmp_path / "sweep.yaml") in str(error.value)
    assert not (tmp_path / "cells").exists()


def test_a_folder_without_one_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"an experiment is a folder with a sweep.yaml"):
        sweep(str(tmp_path))


def test_a_config_is_found_by_path_or_by_its_name_in_conf(tmp_path):
    (tmp_path / "own.yaml").write_text("{}")
    assert find_config(str(tmp_path / "own.yaml")) == str(tmp_path / "own.yaml")
    assert find_config("draft/poss2.yaml").endswith("conf/draft/poss2.yaml")


@pytest.mark.parametrize("experiment", sorted(EXPERIMENTS.glob("*/sweep.yaml")), ids=lambda path: path.parent.name)
def test_the_experiments_parse(experiment, tmp_path):
    """Every choice of every one, as `poss fit` would take it."""
    own = Sweep.load(experiment)
    for cell in own.cells(tmp_path)[: len(own.choices)]:
        parsed = training.parse(cell.configs, cell.fit)
        for name, value in cell.fit.get("model", {}).items():
            assert parsed.model[name] == value
        trainer = parsed.trainer  # the end is validated: an epoch's by itself
        assert trainer["max_steps"] == -1 or trainer["max_steps"] % trainer["val_check_interval"] == 0
        classes = [callback["class_path"].rpartition(".")[2] for callback in trainer["callbacks"]]
        assert {"DraftFolders", "Replay"} <= set(classes)
        assert ("PublishedMask" in classes) == (cell.choice == "published")


def test_a_shipped_start_is_digested_unless_a_folder_of_that_name_is_there(experiment, tmp_path, monkeypatch):
    choices = {"one": {"model": {"allocation": [6], "start_from": "embedded-hass"}}}
    cell = Sweep.load(Path(experiment(choices=choices, reference=None), "sweep.yaml")).cells(tmp_path)[0]
    shipped = cell.inputs()["embedded-hass"]
    assert shipped == sha256(SHIPPED / "embedded-hass" / "model.safetensors")
    (tmp_path / "embedded-hass").mkdir()
    (tmp_path / "embedded-hass" / "model.safetensors").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path)
    assert cell.inputs()["embedded-hass"] == sha256("embedded-hass/model.safetensors") != shipped


def test_text_that_is_trained_and_measured_on_is_digested(experiment, tmp_path):
    corpus, suite = tmp_path / "talks.jsonl", tmp_path / "asked.jsonl"
    for file in (corpus, suite):
        file.write_text(f"{file.name}\n")
    fit = {"data": {"corpus": str(corpus), "target": "embedded"}, "trainer": TRAINER}
    folder = experiment(fit=fit, replay=None, benchmark={"suites": [str(suite), "maths"]})
    inputs = Sweep.load(Path(folder, "sweep.yaml")).cells(tmp_path)[0].inputs()
    assert inputs[str(corpus)] == sha256(corpus) and inputs[str(suite)] == sha256(suite) and "maths" not in inputs


def test_a_summary_that_cannot_be_made_says_what_differs(experiment, tmp_path):
    sweep(experiment(seeds=[0]))
    line, lines = facts_of(tmp_path, "two"), (tmp_path / "cells.jsonl").read_text()
    (tmp_path / "cells.jsonl").write_text(lines.replace(line["inputs"]["trainer/base.yaml"], "another", 1))
    rows = [row | {"prompt_tokens": 999} for row in packed_rows(packed_cells(tmp_path / "cells/two")).popitem()[1]]
    pack(tmp_path, "two", 0, line, rows)
    with pytest.raises(ValueError, match=r"have prompts of .* tokens at .* had 2 different trainer/base.yaml"):
        sweep(experiment(seeds=[0]))


def test_a_replay_writes_over_nobodys_records(tmp_path, store):
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(ValueError, match=r"records.jsonl was written by `poss benchmark`: choose another folder"):
        replay(store, str(tmp_path), drafts={"one": "a-draft"})
    drafts = [str(tmp_path / f"draft-{seed}") for seed in range(2)]
    for seed, draft in enumerate(drafts):
        tiny_draft(tiny_target(), [2], seed=seed).save_pretrained(draft)
    out = tmp_path / "out"
    with Work(out / UNFINISHED).exclusive(), pytest.raises(ValueError, match="out: another process writes there"):
        replay(store, str(out), drafts={"one": drafts[0]})
    replay(store, str(out), drafts={"one": drafts[0]})
    before = (out / "records.jsonl.gz").read_bytes()
    with pytest.raises(ValueError, match=r"out holds records of other settings \(methods.one.nodes 60, now 7;"):
        replay(store, str(out), drafts={"one": drafts[0]}, tree_width=2)
    replay(store, str(tmp_path / "chain"), drafts={"one": drafts[0]}, tree_width=1)
    facts = json.loads((tmp_path / "chain" / "run.json").read_text())["methods"]["one"]
    assert (facts["nodes"], facts["tree_width"]) == (3, 1)  # all that a chain of two and its root can be
    computed = json.loads((out / "run.json").read_text())["config"]["dtype"]
    other = {"bfloat16": "float32", "float32": "bfloat16"}[computed]
    with pytest.raises(ValueError, match=rf"of other settings \(dtype '{computed}', now '{other}'; "):
        replay(store, str(out), drafts={"one": drafts[0]}, dtype=other)
    with pytest.raises(ValueError, match=r"methods.one.weights .*methods.two.weights .*\): choose another"):
        replay(store, str(out), drafts={"one": drafts[1], "two": drafts[0]})
    replay(store, str(out), drafts={"one": drafts[0]})
    assert (out / "records.jsonl.gz").read_bytes() == before
