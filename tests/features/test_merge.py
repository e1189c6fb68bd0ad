"""Stores of several corpora as one."""

import os
from pathlib import Path

import pytest
import torch

from poss_lightning.corpus.readers import Conversation
from poss_lightning.features.extract import write_store
from poss_lightning.features.manifest import StoreError, verify_files
from poss_lightning.features.merge import merge
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import temporary_path
from tests.support.stores import contents, make_conversations
from tests.support.tiny import tiny_target

SIZES = {"max_length": 64, "batch_tokens": 200, "shard_bytes": 6000}


@pytest.fixture(scope="module")
def parts(target, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("parts")
    for name in ("a", "b"):
        chats = [Conversation(f"{name}{chat.id}", chat.messages) for chat in make_conversations(6)]
        write_store(folder / name, target, chats, **SIZES)
    return [str(folder / "a"), str(folder / "b")]


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
def test_a_merged_store_has_all_samples_in_order(parts, tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *args: (_ for _ in ()).throw(OSError("no links here")))
    temporary_path(tmp_path / "whole", 2**30).mkdir()  # no process has that number
    (temporary_path(tmp_path / "whole", 2**30) / "shard-00000.arrow").write_text("of a killed one")
    merge(parts, str(tmp_path / "whole"))
    verify_files(tmp_path / "whole")
    whole, own = FeatureStore(tmp_path / "whole"), [FeatureStore(part) for part in parts]
    assert whole.ids == own[0].ids + own[1].ids and whole.manifest.tokens == sum(o.manifest.tokens for o in own)
    assert torch.equal(whole[len(own[0])].features, own[1][0].features)
    assert torch.equal(whole.embed_head().head, own[0].embed_head().head)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    again = tmp_path / "again"
    merge([str(tmp_path / "whole")], str(again))  # a merged store is a store
    assert len(FeatureStore(again)) == len(whole)


def test_what_does_not_belong_together_is_refused(parts, tmp_path):
    chats = [Conversation(f"c{chat.id}", chat.messages) for chat in make_conversations(6)]
    write_store(tmp_path / "other", tiny_target(1), chats, **SIZES)
    write_store(tmp_path / "short", tiny_target(0), chats, **SIZES | {"max_length": 32})
    before = contents(tmp_path)
    for stores, words in (
        ([parts[0], str(tmp_path / "other")], "other and .* are of different targets: fingerprint"),
        ([parts[0], str(tmp_path / "short")], "differ in max_length: 32 and 64"),
        ([parts[0], parts[1], parts[0]], "conversation 'a.*' is in .*a and in"),
        ([parts[0], str(tmp_path / "nowhere")], "no finished feature store"),
        ([], "stores is empty"),
    ):
        with pytest.raises((StoreError, ValueError), match=words):
            merge(stores, str(tmp_path / "whole"))
    with pytest.raises(FileExistsError, match="is there already"):
        merge(parts, str(tmp_path / "short"))
    assert contents(tmp_path) == before and not Path(tmp_path / "whole").exists()
