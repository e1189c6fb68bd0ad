"""Precompute the target's features of a corpus: `poss extract`."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.features.manifest import Stored, check_files, is_finished, verify_files
from poss_lightning.features.shards import TargetReader
from poss_lightning.features.writing import STORE_FILES, write_store
from poss_lightning.files import atomic, check_folder, read_json
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.ranges import BatchTokens, Count, Layer, Mebibytes, Tokens, check_numbers
from poss_lightning.ranks import device_of, this_rank
from poss_lightning.target_model.options import TargetOptions

ASKED = "asked.json"  # in a finished store: what it was asked for, so that the same command need not read the corpus


@check_numbers
def extract(
    corpus: str,
    out: str,
    split: str = "train",
    limit: Count | None = None,
    max_length: Tokens = 2048,
    strict: bool = False,
    batch_tokens: BatchTokens = 4096,
    shard_mb: Mebibytes = 512,
    stored: Stored = "exact",
    layers: list[Layer] | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    tensor_parallel: Count = 1,
    verify: bool = False,
    **target: Any,
) -> None:
    """Write the feature store of a corpus.

    If a run is killed, give the same command again: it resumes, and ends with the same bytes. Started by torchrun or
    srun, every rank takes its share of the shards; the last one finishes the store.

    Args:
        corpus: file of conversations (JSON lines, a JSON array, parquet), a folder, or a hub id of `datasets`, with
            options as in `ID?config=NAME&revision=COMMIT`.
        out: folder to write.
        split: split of a folder or hub data set.
        limit: number of conversations to read; all by default.
        max_length: tokens at which a conversation is cut; the target's context at most.
        strict: treat a malformed record, or one that the chat template refuses, as an error; otherwise such records
            are left out, counted and named, up to a tenth of all.
        batch_tokens: tokens of a forward pass, padding included.
        shard_mb: size of a shard, in MiB of features.
        stored: exact, or float8: e4m3 with one scale per token, half of bfloat16's bytes.
        layers: decoder layers, counted from 1, whose outputs are kept beside the features; EAGLE-3 takes 2, half of
            all, and all less 3.
        engine: what runs the target: transformers, in this process; or vllm, which must be installed, for a target that
            does not fit on one GPU. The features are the same up to rounding.
        tensor_parallel: number of GPUs over which vLLM splits the target.
        verify: write nothing, but check every byte of the finished store `out`.
        **target: whose features, and where and in what it computes; see `TargetOptions`.
    """
    asked = {name: value for name, value in locals().items() if name not in ("out", "verify")}
    options = TargetOptions(**target)
    folder = Path(out)
    if verify:
        verify_files(folder)
        return print(f"{out}: every file is as it was written")
    check_folder(out, *STORE_FILES)
    asked |= {"files": stamps(corpus) | stamps(options.target)}
    if is_finished(folder) and (folder / ASKED).exists() and read_json(folder / ASKED) == asked:
        return tell(folder)
    rank = this_rank()
    if engine == "vllm" and rank.world > 1:
        raise ValueError(f"engine is vllm in one of {rank.world} processes; it starts its own: give the command once")
    if engine != "vllm" and tensor_parallel > 1:
        raise ValueError(f"tensor_parallel is {tensor_parallel}; it must be 1 without --engine vllm")
    conversations = read_conversations(corpus, split, limit, strict)
    if engine == "vllm":
        from poss_lightning.serving.features import vllm_reader

        where = choose_device(options.device)
        model = replace(options, dtype=choose_dtype(options.dtype, where), device="cpu", parallel="none").load(
            exact=False
        )
        reader = partial(vllm_reader, max_length=max_length, tensor_parallel=tensor_parallel, device=where)
    else:
        model, reader = replace(options, device=device_of(rank, options.device)).load(exact=False), TargetReader
    write_store(
        folder,
        model,
        conversations,
        max_length=max_length,
        batch_tokens=batch_tokens,
        shard_bytes=shard_mb * 2**20,
        stored=stored,
        layers=tuple(layers or ()),
        strict=strict,
        rank=rank,
        reader=reader,
    )
    if rank.rank == 0 and is_finished(folder):
        with atomic(folder / ASKED) as path:
            path.write_text(json.dumps(asked, indent=1) + "\n")
        tell(folder)


def stamps(source: str) -> dict[str, list[int]]:
    """Return size and time of each file of a source: they differ once one has changed. Empty for a hub id."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def tell(folder: Path) -> None:
    """Print what a finished store holds; StoreError if a file is missing."""
    manifest = check_files(folder)
    print(f"{folder}: {manifest.samples:,} samples, {manifest.tokens:,} tokens")
