"""Precompute the target's features of a corpus: `poss extract`.

The work is planned first (order, batches, shards) from the corpus alone, so any number of processes may share the
shards, a killed one is made good by giving the command again, and the bytes are always the same.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from poss_lightning.corpus.readers import Conversation, CorpusError, read_conversations
from poss_lightning.features import unfinished
from poss_lightning.features.encoding import vector_bytes
from poss_lightning.features.manifest import ENDS, FileNote, Manifest
from poss_lightning.features.manifest import verify as verify_store
from poss_lightning.features.remote import local
from poss_lightning.features.shards import Text, write_shard
from poss_lightning.files import atomic
from poss_lightning.machine import choose_device
from poss_lightning.target.chat import Rendered
from poss_lightning.target.model import Target

Shard = list[list[Text]]  # batches of texts
logger = logging.getLogger(__name__)


def extract(
    corpus: str,
    out: str,
    target: str = "embedded",
    split: str = "train",
    limit: int | None = None,
    max_length: int = 2048,
    batch_tokens: int = 4096,
    shard_mb: int = 512,
    dtype: str = "auto",
    device: str = "auto",
    stored: Literal["exact", "float8"] = "exact",
    layers: list[int] | None = None,
    verify: bool = False,
) -> None:
    """Write the feature store of a corpus.

    A killed run goes on where it stopped when the command is given again, and ends with the same bytes. Started by
    torchrun or srun, every rank takes its share of the shards; the last to be done finishes the store.

    Args:
        corpus: `.jsonl`, `.jsonl.gz` or `.json` file of conversations, or a hub id of `datasets`.
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        split: of a hub data set.
        limit: read that many conversations only.
        max_length: tokens a conversation is cut at; the target's context at most.
        batch_tokens: tokens of a forward, padding included.
        shard_mb: size of a shard, in MiB of features.
        dtype: of the target and of the features when they are read back: auto (what this device multiplies fastest),
            bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these; with several ranks on a machine, cuda is each
            one's own GPU.
        stored: exact, or float8: e4m3 with one scale a token, half of bfloat16's bytes.
        layers: decoder layers, counted from 1, whose outputs are kept beside the features; EAGLE-3 takes 2, half of
            all, and all less 3.
        verify: only read the finished store `out`, or the address of one, and check every byte of it.
    """
    if verify:
        verify_store(local(out))
        return print(f"{out}: every file is as it was written")
    if "://" in out:
        raise ValueError(f"out is {out!r}; it must be a local folder, which may be copied to an address when finished")
    for name, value in (("max_length", max_length), ("batch_tokens", batch_tokens), ("shard_mb", shard_mb)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    rank, world, place = unfinished.this_rank(os.environ)
    if world > 1 and (choose_device() if device == "auto" else device) == "cuda":
        device = f"cuda:{place % max(1, torch.cuda.device_count())}"  # SLURM may show a task its own GPU only
    conversations = read_conversations(corpus, split, limit)
    model = Target.load(target, dtype, device)
    chosen = tuple(layers or ())
    write_store(
        Path(out), model, conversations, max_length, batch_tokens, shard_mb * 2**20, stored, chosen, rank, world
    )
    if rank == 0 and unfinished.finished(Path(out)):
        whole = Manifest.read(Path(out))
        print(f"{out}: {whole.samples:,} samples, {whole.tokens:,} tokens")


def write_store(
    folder: Path,
    target: Target,
    conversations: list[Conversation],
    max_length: int,
    batch_tokens: int,
    shard_bytes: int,
    stored: str = "exact",
    layers: tuple[int, ...] = (),
    rank: int = 0,
    world: int = 1,
) -> None:
    """Read conversations with the target and write their store, or this rank's share of it; see `extract`.

    Raises:
        StoreError: `folder` holds a store, or the beginning of one, of other settings.
        CorpusError: no conversation has an assistant's turn within max_length tokens.
        ValueError: an unknown way to store, or a layer that the target does not have.
    """
    vector = vector_bytes(target.spec.hidden_size, target.dtype, stored)
    target.check_layers(layers)
    max_length = min(max_length, target.spec.context)
    texts = read_texts(target, conversations, max_length, tell=rank == 0)
    shards = plan_shards(texts, batch_tokens, shard_bytes // (vector * (1 + len(layers))))
    dtype, corpus = target.dtype_name, _digest(texts)
    kind = unfinished.kind(target.spec, dtype, stored, layers, max_length, corpus)
    if not unfinished.claim(folder, kind, {"batch_tokens": batch_tokens, "shard_bytes": shard_bytes}):
        return unfinished.clear(folder)  # the run that finished it may have been killed before it did
    _share(folder, target, shards, stored, layers, rank, world)
    notes = [unfinished.note(folder, number) for number in range(len(shards))]
    if None in notes and not unfinished.finished(folder):
        others = f"{notes.count(None)} of {len(shards)} shards are with other processes, the last of which finishes it"
        return print(f"{folder}: {others}; if one of them died, give the command again")
    with unfinished.alone(folder):
        if not unfinished.finished(folder):
            ends, total = _write_ends(folder, target), sum(len(text.tokens) for text in texts)
            sizes = (len(texts), total, ends, tuple(notes))
            Manifest(target.spec, dtype, max_length, corpus, *sizes, stored, layers).write(folder)
    unfinished.clear(folder)


def _share(
    folder: Path, target: Target, shards: list[Shard], stored: str, layers: tuple[int, ...], rank: int, world: int
) -> None:
    """Write what of the shards is this rank's, and what no other process is at."""
    sizes = [sum(len(text.tokens) for batch in shard for text in batch) for shard in shards]
    with tqdm(total=sum(sizes), unit="token", unit_scale=True, desc="extract", disable=rank > 0) as bar:
        for number in unfinished.order(len(shards), rank, world):
            with unfinished.turn(folder, number) as mine:
                if mine:
                    path = unfinished.shard(folder, number)
                    note = write_shard(path, target, shards[number], stored, layers, bar)
                    unfinished.leave_note(folder, number, note)
                else:
                    bar.update(sizes[number])


def read_texts(target: Target, conversations: list[Conversation], max_length: int, tell: bool = True) -> list[Text]:
    """Render and cut; leave out what has no two tokens of one assistant span, and tell how much; order by length."""
    texts, given, otherwise, behind = [], 0, 0, 0  # answers: all, rendered otherwise, cut off
    for conversation in tqdm(conversations, desc="render", unit="conversation", leave=False):
        whole = _render(target, conversation)
        spans = [(start, min(stop, max_length)) for start, stop in whole.spans if start < max_length]
        said = sum(message["role"] == "assistant" for message in conversation.messages)
        left = sum(stop - start >= 2 for start, stop in spans)
        given, otherwise, behind = given + said, otherwise + said - len(whole.spans), behind + len(whole.spans) - left
        if left:
            texts.append(Text(conversation.id, whole.tokens[:max_length], spans))
    if not texts:
        raise CorpusError(f"none of the {len(conversations)} conversations has an answer within {max_length} tokens")
    if tell and (otherwise or behind):
        logger.warning(
            "left out %d of %d answers: %d that the chat template writes otherwise once the chat goes on, %d with less "
            "than two tokens of the first %d; and so %d of %d conversations",
            *(otherwise + behind, given, otherwise, behind),
            *(max_length, len(conversations) - len(texts), len(conversations)),
        )
    return sorted(texts, key=lambda text: len(text.tokens))


def _render(target: Target, conversation: Conversation) -> Rendered:
    try:
        return target.chat.render(conversation.messages)
    except ValueError as error:
        raise CorpusError(f"conversation {conversation.id}: {error}") from error


def plan_shards(texts: list[Text], batch_tokens: int, shard_tokens: int) -> list[Shard]:
    """Shards of batches of texts: neighbours in length share a batch."""
    shards, batch, filled = [[]], [], 0
    for text in texts:  # ascending: the newest is the longest, so it sets the padding
        if batch and (len(batch) + 1) * len(text.tokens) > batch_tokens:
            shards[-1].append(batch)
            batch = []
        size = len(text.tokens)
        if not batch and shards[-1] and filled + size > shard_tokens:
            shards.append([])
            filled = 0
        batch.append(text)
        filled += size
    shards[-1].append(batch)
    return shards


def _digest(texts: list[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.id, text.tokens, text.spans]).encode())
    return digest.hexdigest()


def _write_ends(folder: Path, target: Target) -> FileNote:
    state = {"embedding": target.ends.embedding.cpu().contiguous()}
    if not target.ends.tied:
        state["head"] = target.ends.head.cpu().contiguous()
    with atomic(folder / ENDS) as path:
        save_file(state, path)
    return FileNote.of(folder / ENDS)
