"""An unfinished store: killed and resumed, shared by ranks, and always the bytes of one uninterrupted process."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch

from poss_lightning.extraction import extract
from poss_lightning.features import manifest, writing
from poss_lightning.features.manifest import StoreError
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import UNFINISHED, write_store
from poss_lightning.files import sha256
from poss_lightning.ranks import Rank, local_rank, order, this_rank
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work
from tests.support.stores import SIZES, contents, dies_after, dies_at, make_conversations
from tests.support.tiny import CHATML, tiny_model, tiny_tokenizer


def kill(folder: Path, target: Target) -> None:
    """Begin a store, and die after some forwards of the target."""
    with dies_after(target, "text_layers", 4):
        write_store(folder, target, make_conversations(), **SIZES)


def test_a_killed_run_resumes_and_reads_again_only_what_is_torn(finished, target, tmp_path, monkeypatch):
    """A shard of another size than its receipt says is torn."""
    kill(tmp_path, target)
    with pytest.raises(
        StoreError, match=r"not a finished feature store: it has no manifest\.json; `poss extract` writes it"
    ):
        FeatureStore(tmp_path)
    torn = tmp_path / "shard-00000.arrow"
    whole = {path.name for path in tmp_path.glob("shard-*") if path != torn}
    torn.write_bytes(b"cut")
    written = []  # files are hashed once, where they are written
    monkeypatch.setattr(
        manifest,
        "sha256",
        lambda path: written.append(path.name[15:-4] if path.suffix == ".tmp" else path.name) or sha256(path),
    )
    write_store(tmp_path, target, make_conversations(), **SIZES)
    assert whole and torn.name in written and not whole & set(written) and len(written) == len(set(written))
    assert contents(tmp_path) == contents(finished)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["manifest.json", "ends.safetensors", "shard-00001.arrow", "settings.json"])
def test_a_run_killed_at_any_file_resumes(finished, target, tmp_path, monkeypatch, name, when):
    """With the file half written under its temporary name, and with the file just there."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        dies_at(patch, name, when)
        write_store(tmp_path, target, make_conversations(), **SIZES)
    write_store(tmp_path, target, make_conversations(), **SIZES)
    assert contents(tmp_path) == contents(finished)


@pytest.mark.parametrize("is_finished", [True, False])
def test_stores_of_other_settings_are_not_mixed(finished, target, tmp_path, is_finished):
    """All that differs is named, in one line."""
    other = Target(tiny_model(seed=1), tiny_tokenizer(CHATML.replace("\n{% endfor", "\n\n{% endfor")), "tiny")
    changes = {"max_length": 59, "stored": "float8", "layers": (1,)}
    folder = finished if is_finished else tmp_path
    if not is_finished:
        kill(folder, target)
    before = contents(folder)
    with pytest.raises(ValueError, match="begun with other settings") as error:
        write_store(folder, other, make_conversations(23), **SIZES | changes)
    named = ("target ", "template ", "max_length 60, now 59", "stored 'exact', now 'float8'", "layers [], now [1]")
    assert all(setting in str(error.value) for setting in (*named, "corpus ")) and "\n" not in str(error.value)
    assert contents(folder) == before


def test_the_same_command_reads_no_corpus_again_until_that_changes(tmp_path, tiny_folder, monkeypatch, capsys):
    """Nor the target; it says what the store holds, and a changed corpus is refused."""
    corpus, out = tmp_path / "corpus.jsonl", str(tmp_path / "store")
    lines = [json.dumps({"messages": talk.messages}) + "\n" for talk in make_conversations(6)]
    corpus.write_text("".join(lines[:5]))
    extract(str(corpus), out, target=tiny_folder, dtype="float32")
    said = capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("poss_lightning.extraction.read_conversations", None)
        extract(str(corpus), out, target=tiny_folder, dtype="float32")
    assert capsys.readouterr().out == said and ": 5 samples" in said
    for change in {"strict": True}, {"max_length": 50}:  # the first changes nothing
        with pytest.raises(ValueError, match="begun with") if "max_length" in change else nullcontext():
            extract(str(corpus), out, target=tiny_folder, dtype="float32", **change)
    corpus.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"begun with other settings \(corpus "):
        extract(str(corpus), out, target=tiny_folder, dtype="float32")


# --- ranks ---


def test_a_shard_that_another_rank_holds_is_written_once_that_ends(finished, target, tmp_path, monkeypatch, capsys):
    """Even while this one waits for a last look. The operating system frees what a dead rank held."""
    work = Work(tmp_path / UNFINISHED)
    with work.exclusive():
        part = work.part("shard-00001")
    with ExitStack() as other:
        other.enter_context(part)
        monkeypatch.setattr(writing.time, "sleep", lambda _: None)
        write_store(tmp_path, target, make_conversations(), **SIZES, rank=Rank(0, 2))
        assert re.search(r"1 of \d+ shards are with other processes", capsys.readouterr().out)
        assert "manifest.json" not in contents(tmp_path)
        monkeypatch.setattr(writing.time, "sleep", lambda _: other.close())
        write_store(tmp_path, target, make_conversations(), **SIZES, rank=Rank(0, 2))
    assert contents(tmp_path) == contents(finished)


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 9))])
def test_ranks_write_the_bytes_of_one(finished, target, tmp_path, world):
    """All at once, as threads: the locks are the operating system's, and hold between open files."""

    def write(rank: int) -> None:
        write_store(tmp_path, target, make_conversations(), **SIZES, rank=Rank(rank, world))

    with ThreadPoolExecutor(world) as threads:
        list(threads.map(write, range(world)))
    assert contents(tmp_path) == contents(finished) and not (tmp_path / UNFINISHED).exists()


def test_clearing_the_work_does_not_hurt_a_process_that_waits_for_its_lock(tmp_path):
    def wait() -> bool:
        with Work(tmp_path / UNFINISHED).exclusive():
            return True

    with ThreadPoolExecutor(1) as thread:
        with Work(tmp_path / UNFINISHED).exclusive():
            waiting = thread.submit(wait)
            time.sleep(0.1)
            shutil.rmtree(tmp_path / UNFINISHED)
        assert waiting.result()


@pytest.mark.parametrize(("count", "world"), [(7, 3), (3, 5)])
def test_every_rank_begins_with_its_share_and_continues_with_the_rest(count, world):
    orders = [order(count, Rank(rank, world)) for rank in range(world)]
    assert all(sorted(numbers) == list(range(count)) for numbers in orders)
    shares = [numbers[: len(range(rank, count, world))] for rank, numbers in enumerate(orders)]
    assert sorted(number for share in shares for number in share) == list(range(count))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}, (3, 8, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, (2, 4, 0)),
        ({"LOCAL_RANK": "3", "WORLD_SIZE": "8", "NODE_RANK": "0"}, (0, 1, 0)),  # as Lightning's own launcher
        ({}, (0, 1, 0)),
    ],
)
def test_a_rank_is_read_from_the_environment(environment, expected):
    assert this_rank(environment) == expected
    assert local_rank(environment) == int(environment.get("LOCAL_RANK", 0))


@pytest.mark.parametrize(
    ("device", "gpus", "world", "expected"),
    [("cuda", 4, 8, "cuda:3"), ("cuda", 1, 8, "cuda:0"), ("cuda", 4, 1, "cuda"), ("cpu", 4, 8, "cpu")],
)
def test_every_rank_has_its_own_gpu(tmp_path, monkeypatch, device, gpus, world, expected):
    def load(name, dtype, device, *others, **options):
        raise InterruptedError(device)

    monkeypatch.setattr("poss_lightning.extraction.this_rank", lambda: Rank(7 % world, world, 3 % world))
    monkeypatch.setattr("poss_lightning.extraction.read_conversations", lambda *given: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(Target, "load", load)
    with pytest.raises(InterruptedError, match=f"^{expected}$"):
        extract("corpus.jsonl", str(tmp_path / "out"), device=device)
