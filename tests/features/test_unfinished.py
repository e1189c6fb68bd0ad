"""An unfinished store: shared by ranks, made good after a kill, and always the bytes of one process."""

import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from poss_lightning.extract import extract
from poss_lightning.features import manifest, shards
from poss_lightning.features import writing as extraction
from poss_lightning.features.manifest import verify_files
from poss_lightning.features.shards import write_shard
from poss_lightning.features.writing import UNFINISHED, write_store
from poss_lightning.files import sha256
from poss_lightning.ranks import Rank, local_rank, order, this_rank
from poss_lightning.target.model import Target
from poss_lightning.work import Work
from tests.support.processes import SECONDS, fork
from tests.support.stores import ROLES, SIZES, WORDS, contents, dies_after, make_conversations


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory) -> Path:
    """A store that one process wrote in one go."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    write_store(folder, target, make_conversations(), **SIZES)
    return folder


def stop_within_a_shard(half, environment: dict[str, str], *arguments, **options) -> None:
    """Extract as a rank that stands still in the middle of its first shard."""
    os.environ.update(environment)
    read = shards.read_batch

    def slow(*given):
        if list(Path(arguments[1]).glob(".poss.*.tmp/shard-00001.arrow")):
            half.set()
            time.sleep(60)
        return read(*given)

    shards.read_batch = slow
    extract(*arguments, **options)


@pytest.mark.nightly
def test_a_rank_dies_by_sigkill_and_the_others_go_on(tiny_folder, tmp_path, monkeypatch, capsys):
    """Rank 1 of 2 is killed in the middle of its first shard, while rank 0 writes all the others."""
    corpus = tmp_path / "corpus.jsonl"
    long = [" ".join(WORDS * 8) + f" {i}" for i in range(60)]
    records = [{"messages": [{"role": role, "content": text} for role in ROLES]} for text in long]
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    sizes = {"dtype": "float32", "batch_tokens": 2000, "shard_mb": 1}
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    half, given = fork.Event(), (str(corpus), str(killed), tiny_folder)
    process = fork.Process(target=stop_within_a_shard, args=(half, ranks, *given), kwargs=sizes, daemon=True)
    process.start()
    assert half.wait(SECONDS)
    for name, value in (ranks | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    extract(str(corpus), str(killed), tiny_folder, **sizes)
    assert re.search(r"1 of \d+ shards are with other processes", capsys.readouterr().out)
    process.kill()
    process.join()
    assert list(killed.glob(".poss.*.tmp/shard-00001.arrow")) and "manifest.json" not in contents(killed)
    extract(str(corpus), str(killed), tiny_folder, **sizes)
    monkeypatch.undo()
    extract(str(corpus), str(whole), tiny_folder, **sizes)
    assert contents(killed) == contents(whole) and len(contents(whole)) > 4
    verify_files(killed)


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 9))])
def test_ranks_write_the_bytes_of_one(whole, target, tmp_path, world):
    """All at once, as threads: the locks are the operating system's, and hold between open files."""
    with ThreadPoolExecutor(world) as threads:
        work = [
            threads.submit(write_store, tmp_path, target, make_conversations(), **SIZES, rank=Rank(rank, world))
            for rank in range(world)
        ]
    assert [done.result() for done in work] == [None] * world
    assert contents(tmp_path) == contents(whole) and not (tmp_path / "unfinished").exists()


def test_a_shard_that_others_left_at_the_last_moment_is_seen(whole, target, tmp_path, monkeypatch):
    """Rank 1 is at it while rank 0 looks; it then ends, and rank 0 sees no receipt: late, or never to come."""
    work = Work(tmp_path / UNFINISHED)
    with work.exclusive():
        other = work.part("shard-00001")
    other.__enter__()
    monkeypatch.setattr(extraction.time, "sleep", lambda _: other.__exit__(None, None, None))
    write_store(tmp_path, target, make_conversations(), **SIZES, rank=Rank(0, 2))
    assert contents(tmp_path) == contents(whole)


def test_who_waits_for_the_one_that_finishes_is_not_hurt_by_its_clearing(tmp_path):
    def wait() -> bool:
        with Work(tmp_path / UNFINISHED).exclusive():
            return True

    with ThreadPoolExecutor(1) as thread:
        with Work(tmp_path / UNFINISHED).exclusive():
            waiting = thread.submit(wait)
            time.sleep(0.1)
            shutil.rmtree(tmp_path / UNFINISHED)
        assert waiting.result(timeout=5)


def test_a_rank_alone_does_the_work_of_all(whole, target, tmp_path):
    """As in a SLURM batch script without srun, or where the others died."""
    write_store(tmp_path, target, make_conversations(), **SIZES, rank=Rank(1, 3))
    assert contents(tmp_path) == contents(whole)


def test_what_is_there_is_not_read_again(whole, target, tmp_path, monkeypatch):
    dies_after(monkeypatch, target, 4)
    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path, target, make_conversations(), **SIZES)
    monkeypatch.undo()
    there, written, hashed = {path.name for path in tmp_path.glob("shard-*")}, [], []
    monkeypatch.setattr(manifest, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    monkeypatch.setattr(
        extraction, "write_shard", lambda path, *rest: written.append(path.name) or write_shard(path, *rest)
    )
    write_store(tmp_path, target, make_conversations(), **SIZES)
    assert there and written and not there & set(written) and hashed == [*written, "ends.safetensors"]
    assert contents(tmp_path) == contents(whole)


def test_a_shard_that_is_not_as_its_note_says_is_written_again(whole, target, tmp_path, monkeypatch):
    dies_after(monkeypatch, target, 4)
    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path, target, make_conversations(), **SIZES)
    monkeypatch.undo()
    (tmp_path / "shard-00000.arrow").write_bytes(b"cut")
    write_store(tmp_path, target, make_conversations(), **SIZES)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize(("count", "world"), [(7, 3), (3, 5), (1, 1), (8, 2)])
def test_every_rank_begins_with_its_share_and_goes_on_with_what_is_left(count, world):
    orders = [order(count, Rank(rank, world)) for rank in range(world)]
    assert all(sorted(numbers) == list(range(count)) for numbers in orders)
    shares = [numbers[: len(range(rank, count, world))] for rank, numbers in enumerate(orders)]
    assert sorted(number for share in shares for number in share) == list(range(count))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}, (3, 8, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, (2, 4, 0)),
        (
            {"LOCAL_RANK": "3", "WORLD_SIZE": "8", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
            (0, 1, 0),
        ),  # Lightning's
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
    for name, value in (("RANK", 7 % world), ("WORLD_SIZE", world), ("LOCAL_RANK", 3 % world)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    asked = []
    monkeypatch.setattr(Target, "load", lambda *arguments, **options: asked.append(arguments))
    monkeypatch.setattr("poss_lightning.extract.write_store", lambda *arguments, **options: None)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"messages": make_conversations(1)[0].messages}) + "\n")
    extract(str(tmp_path / "corpus.jsonl"), str(tmp_path / "out"), device=device)
    assert asked == [("embedded", "auto", expected, "none")]
