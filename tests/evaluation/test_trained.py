"""A draft knows the texts that it was trained on, in whatever store they are."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from poss_lightning.corpus.readers import Conversation
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation import replay as module
from poss_lightning.evaluation.provenance import _commit
from poss_lightning.evaluation.replay import replay
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.writing import write_store
from poss_lightning.interop.convert import convert
from poss_lightning.training.callbacks import DraftFolders
from tests.support.stores import dies_after
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_target
from tests.support.training import fit

OTHER = [{"role": "user", "content": "another question"}, {"role": "assistant", "content": "another answer"}]


def extracted(folder, conversations: list[Conversation], **sizes) -> str:
    write_store(folder, tiny_target(), conversations, **SIZES | sizes)
    return str(folder)


def train(store: str, folder, **options) -> FeatureDataModule:
    """A step."""
    kept = [DraftFolders(), ModelCheckpoint(folder, save_last=True)]
    model = {"allocation": [2], **options}
    return fit(store, folder, *kept, max_steps=1, limit_val_batches=1, model=model).trainer.datamodule


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a draft's training, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    data = train(extracted(folder / "store", talks()), folder)
    return folder, data


def test_texts_of_the_training_are_counted_and_others_not(trained, tmp_path, caplog):
    folder, data = trained
    held = {data.source.ids[i] for i in data.held_out}
    learnt = [talk for talk in talks() if talk.id not in held]
    unseen = [talk for talk in talks() if talk.id in held]
    cases = {
        "renamed": ([replace(talk, id=f"new{talk.id}") for talk in talks()], (len(learnt), 40)),  # and cut
        "some": (learnt[:5] + unseen[:2], (5, 7)),
        "unseen": (unseen, None),
        "of the same ids": ([Conversation(talk.id, OTHER) for talk in talks()], None),
    }
    drafts = {"own": str(folder / "draft-last")}
    for name, (conversations, found) in cases.items():
        store = extracted(tmp_path / name, conversations, max_length=100 if name == "renamed" else 128)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            replay(store, str(tmp_path / f"{name}-out"), drafts=drafts, nodes=4, tree_width=2, device="cpu")
        (words,) = [line for line in caplog.messages if "trained on" in line] or [""]
        assert words == "" if found is None else "trained on {} of these {} conv".format(*found) in words, name


def test_a_killed_replay_resumes_with_the_draft_that_is_missing(trained, tmp_path, monkeypatch):
    store, draft = extracted(tmp_path / "store", talks()[:6]), str(trained[0] / "draft-last")
    given: dict[str, Any] = {"drafts": {"one": draft, "two": draft}, "tree_width": 2, "device": "cpu"}
    replay(store, str(tmp_path / "whole"), nodes=4, **given)
    with dies_after(module, "_measure", 1):
        replay(store, str(tmp_path / "out"), nodes=4, **given)
    with pytest.raises(ValueError, match=r"was begun with other settings \(nodes 4, now 5"):
        replay(store, str(tmp_path / "out"), nodes=5, **given)
    measure, measured = module._measure, []
    monkeypatch.setattr(module, "_measure", lambda name, *rest: measured.append(name) or measure(name, *rest))
    replay(store, str(tmp_path / "out"), nodes=4, **given)
    assert measured == ["two"] and not (tmp_path / "out" / "unfinished").exists()
    whole, resumed = (read_rounds(tmp_path / name).drop(columns="folder") for name in ("whole", "out"))
    assert len(whole) and whole.astype(str).equals(resumed.astype(str))


def test_a_draft_keeps_what_it_was_trained_on(trained, tmp_path):
    """When it is converted, from a checkpoint too, and when a training on other text starts from it."""
    folder, data = trained
    known = load_draft(folder / "draft-last").trained_on
    assert known == {data.source.digest(i) for i in data.train} and len(known) == len(data.train)
    assert max(known) > 2**56, "of 32 bits, some of a million texts would be among others by chance"
    for number, source in enumerate((folder / "draft-last", folder / "last.ckpt")):
        convert(str(source), str(tmp_path / str(number)), dtype="bfloat16")
        assert load_draft(tmp_path / str(number)).trained_on == known
    store = extracted(tmp_path / "store", [Conversation(str(i), OTHER * (i + 1)) for i in range(9)])
    train(store, tmp_path / "second", start_from=str(folder / "draft-last"))
    after = load_draft(tmp_path / "second" / "draft-last").trained_on
    assert after > known
    assert load_draft("embedded-hass").trained_on == frozenset()  # it is from before, and says nothing


def test_a_copy_without_git_has_its_commit_in_a_file(tmp_path):
    assert _commit(tmp_path) is None
    (tmp_path / "commit.txt").write_text("abc1234\n")
    assert _commit(tmp_path) == "abc1234"
