"""Precompute the target's features of a corpus: `poss extract`.

The work is planned first (order, batches, shards) from the corpus alone, so a killed run goes on with the first shard
that is not there, and ends with the same bytes.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from poss_lightning.corpus.readers import Conversation, CorpusError, read_conversations
from poss_lightning.features import store
from poss_lightning.features.store import ENDS, MANIFEST, SCHEMA, FileNote, Manifest, StoreError
from poss_lightning.files import atomic
from poss_lightning.target.chat import Rendered
from poss_lightning.target.generation import pad
from poss_lightning.target.model import Target


@dataclass(frozen=True)
class _Text:
    id: str
    tokens: list[int]
    spans: list[tuple[int, int]]


def extract(
    corpus: str,
    out: str,
    target: str = "embedded",
    split: str = "train",
    limit: int | None = None,
    max_length: int = 2048,
    batch_tokens: int = 4096,
    shard_mb: int = 512,
    dtype: str = "bfloat16",
    device: str = "cpu",
    verify: bool = False,
) -> None:
    """Write the feature store of a corpus.

    A killed run goes on where it stopped when the command is given again, and ends with the same bytes.

    Args:
        corpus: `.jsonl`, `.jsonl.gz` or `.json` file of conversations, or a hub id of `datasets`.
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        split: of a hub data set.
        limit: read that many conversations only.
        max_length: tokens a conversation is cut at; the target's context at most.
        batch_tokens: tokens of a forward, padding included.
        shard_mb: size of a shard, in MiB of features.
        dtype: bfloat16, float16 or float32, of the target and the features.
        device: cpu or cuda.
        verify: only read the finished store `out` and check every byte of it.
    """
    if verify:
        store.verify(Path(out))
        return print(f"{out}: every file is as it was written")
    for name, value in (("max_length", max_length), ("batch_tokens", batch_tokens), ("shard_mb", shard_mb)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    conversations = read_conversations(corpus, split, limit)
    model = Target.load(target, dtype, device)
    write_store(Path(out), model, conversations, max_length, batch_tokens, shard_mb * 2**20)


def write_store(
    folder: Path,
    target: Target,
    conversations: list[Conversation],
    max_length: int,
    batch_tokens: int,
    shard_bytes: int,
) -> None:
    """Read conversations with the target and write their store; see `extract`.

    Raises:
        StoreError: `folder` holds a store, or the beginning of one, of other settings.
        CorpusError: no conversation has an assistant's turn within max_length tokens.
    """
    max_length = min(max_length, target.spec.context)
    texts = _texts(target, conversations, max_length)
    per_token = target.spec.hidden_size * target.dtype.itemsize
    shards = _plan(texts, batch_tokens, shard_bytes // per_token)
    if not _claim(folder, _settings(target, texts, max_length, batch_tokens, shard_bytes)):
        return
    total = sum(len(text.tokens) for text in texts)
    notes = []
    with tqdm(total=total, unit="token", unit_scale=True, desc="extract") as bar:
        for number, batches in enumerate(shards):
            path = folder / f"shard-{number:05d}.arrow"
            if not path.exists():
                with atomic(path) as temporary:
                    _write_shard(temporary, target, batches, bar)
            else:
                bar.update(sum(len(text.tokens) for batch in batches for text in batch))
            notes.append(FileNote.of(path))
    ends = _write_ends(folder, target)
    digest = _digest(texts)
    name = str(target.dtype).removeprefix("torch.")
    Manifest(target.spec, name, max_length, digest, len(texts), total, ends, tuple(notes)).write(folder)
    (folder / PLAN).unlink()


PLAN = "unfinished.json"


def _texts(target: Target, conversations: list[Conversation], max_length: int) -> list[_Text]:
    """Render and cut; leave out what has no two tokens of one assistant span; order by length."""
    texts = []
    for conversation in tqdm(conversations, desc="render", unit="conversation", leave=False):
        whole = _render(target, conversation)
        spans = [(start, min(stop, max_length)) for start, stop in whole.spans if start < max_length]
        if any(stop - start >= 2 for start, stop in spans):
            texts.append(_Text(conversation.id, whole.tokens[:max_length], spans))
    if not texts:
        raise CorpusError(f"none of the {len(conversations)} conversations has an answer within {max_length} tokens")
    return sorted(texts, key=lambda text: len(text.tokens))


def _render(target: Target, conversation: Conversation) -> Rendered:
    try:
        return target.chat.render(conversation.messages)
    except ValueError as error:
        raise CorpusError(f"conversation {conversation.id}: {error}") from error


def _plan(texts: list[_Text], batch_tokens: int, shard_tokens: int) -> list[list[list[_Text]]]:
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


def _digest(texts: list[_Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.id, text.tokens, text.spans]).encode())
    return digest.hexdigest()


def _settings(target: Target, texts: list[_Text], max_length: int, batch_tokens: int, shard_bytes: int) -> dict:
    return {
        "target": target.spec.fingerprint,
        "template": target.spec.template,
        "dtype": str(target.dtype),
        "max_length": max_length,
        "corpus": _digest(texts),
        "batch_tokens": batch_tokens,
        "shard_bytes": shard_bytes,
    }


def _claim(folder: Path, settings: dict) -> bool:
    """Note the settings; False where the same store is finished; refuse to mix with another."""
    note, finished = folder / PLAN, (folder / MANIFEST).exists()
    if not finished and not note.exists():
        if any(folder.glob("shard-*")):
            raise StoreError(f"{folder} holds shards of an unknown store: choose another folder or remove it")
        with atomic(note) as path:
            path.write_text(json.dumps(settings, indent=1))
    there = _finished(folder) if finished else json.loads(note.read_text())
    changed = [f"{name} {there[name]} (now {settings[name]})" for name in there if there[name] != settings[name]]
    if changed:
        words = ", ".join(changed)
        raise StoreError(f"{folder} holds a store of another kind, {words}: choose another folder or remove it")
    if finished:
        note.unlink(missing_ok=True)  # a run may have been killed between the two
    return not finished


def _finished(folder: Path) -> dict:
    manifest = store.check(folder)
    return {
        "target": manifest.target.fingerprint,
        "template": manifest.target.template,
        "dtype": f"torch.{manifest.dtype}",
        "max_length": manifest.max_length,
        "corpus": manifest.corpus,
    }


def _write_shard(path: Path, target: Target, batches: list[list[_Text]], bar: tqdm) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(_read_batch(target, batch))
            bar.update(sum(len(text.tokens) for text in batch))


@torch.inference_mode()
def _read_batch(target: Target, batch: list[_Text]) -> pa.RecordBatch:
    tokens = pad([text.tokens for text in batch], target.device)
    features = target.read(tokens)  # (B, T, D)
    greedy = _greedy(target, features, batch).cpu()  # (B, T)
    features = features.cpu()
    rows = {
        "id": [text.id for text in batch],
        "length": [len(text.tokens) for text in batch],
        "tokens": [text.tokens for text in batch],
        "greedy": [row[: len(text.tokens)].tolist() for row, text in zip(greedy, batch, strict=True)],
        "spans": [[edge for span in text.spans for edge in span] for text in batch],
        "features": [_bytes(row[: len(text.tokens)]) for row, text in zip(features, batch, strict=True)],
    }
    return pa.RecordBatch.from_pydict(rows, schema=SCHEMA)


def _greedy(target: Target, features: Tensor, batch: list[_Text]) -> Tensor:
    """The target's likeliest next token after every slot from which an assistant's token follows; -1 elsewhere."""
    greedy = torch.full(features.shape[:2], -1, device=features.device)
    for row, text in enumerate(batch):
        for start, stop in text.spans:
            here = slice(start - 1, stop - 1)
            greedy[row, here] = target.ends.logits(features[row, here]).max(-1).indices
    return greedy


def _bytes(features: Tensor) -> bytes:
    return features.contiguous().view(torch.uint8).numpy().tobytes()


def _write_ends(folder: Path, target: Target) -> FileNote:
    state = {"embedding": target.ends.embedding.cpu().contiguous()}
    if not target.ends.tied:
        state["head"] = target.ends.head.cpu().contiguous()
    with atomic(folder / ENDS) as path:
        save_file(state, path)
    return FileNote.of(folder / ENDS)
