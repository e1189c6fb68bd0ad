"""Write the feature store of a corpus.

The work is planned first (order, batches, shards) from the corpus alone. So any number of processes may share the
shards, a killed process is replaced by giving the command again, and the bytes are always the same.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from tqdm import tqdm

from poss_lightning.corpus.readers import Conversation
from poss_lightning.corpus.records import CorpusError, report_left_out
from poss_lightning.features.encoding import vector_bytes
from poss_lightning.features.manifest import (
    EMBED_HEAD,
    MANIFEST,
    FileEntry,
    Manifest,
    StoreError,
    check,
    is_finished,
)
from poss_lightning.features.reading import Reader, TargetReader
from poss_lightning.features.shards import TokenizedText, write_shard
from poss_lightning.files import ANYWHERE, atomic, check_folder, remove_leftovers
from poss_lightning.ranks import Rank, order
from poss_lightning.target.fingerprints import same_weights
from poss_lightning.target.model import Target
from poss_lightning.work import Work, differences

Shard = list[list[TokenizedText]]  # batches of texts
UNFINISHED = "unfinished"  # folder of the work, inside the store
OURS = (UNFINISHED, MANIFEST)  # one of them is in every store, begun or finished
KWARGS = "chat_template_kwargs"
LATE = 2.0  # seconds by which a shared file system may show another machine's receipt
logger = logging.getLogger(__name__)


def write_store(
    folder: Path,
    target: Target,
    conversations: list[Conversation],
    *,
    max_length: int = 2048,
    batch_tokens: int = 4096,
    shard_bytes: int = 2**29,
    stored: str = "exact",
    layers: tuple[int, ...] = (),
    strict: bool = False,
    rank: Rank = Rank(),  # noqa: B008, it is a tuple
    reader: Callable[[Target, tuple[int, ...]], Reader] = TargetReader,
) -> None:
    """Write the store of conversations, or this rank's share of it; see `poss extract`.

    Args:
        reader: makes what reads the texts, of target and layers, when there is something to read.

    Raises:
        FileExistsError: `folder` holds something else.
        StoreError: it holds another store.
        CorpusError: no conversation has an assistant's turn within max_length tokens.
        ValueError: an unknown way to store, a layer that the target does not have, or a store begun otherwise.
    """
    vector = vector_bytes(target.spec.hidden_size, target.dtype, stored)
    target.check_layers(layers)
    max_length = min(max_length, target.spec.context)
    work = Work(folder / UNFINISHED)
    begun = Manifest.load(folder).chat_template_kwargs if is_finished(folder) else work.settings.get(KWARGS, {})
    target.chat.template.freeze(begun)
    texts = tokenize(target, conversations, max_length, tell=rank.rank == 0, strict=strict)
    shards = plan_shards(texts, batch_tokens, shard_bytes // (vector * (1 + len(layers))))
    key = store_key(target, stored=stored, layers=layers, max_length=max_length, corpus=_digest(texts))
    if is_finished(folder):
        _check_same(folder, key)
        return work.clear()  # the process that finished it may have been killed before it did
    check_folder(folder, *OURS)
    work.claim(key | {"batch_tokens": batch_tokens, "shard_bytes": shard_bytes})
    made = reader(target, layers)
    _write_shards(folder, work, made, shards, stored, rank)
    if not is_finished(folder) and None in _entries(folder, work, shards):
        time.sleep(LATE)  # else each of two machines might think that the other is not finished
        _write_shards(folder, work, made, shards, stored, rank, again=True)
    entries = [entry for entry in _entries(folder, work, shards) if entry]
    if (missing := len(shards) - len(entries)) and not is_finished(folder):
        others = f"{missing} of {len(shards)} shards are with other processes, the last of which finishes it"
        return print(f"{folder}: {others}; if one of them died, give the command again")
    with work.exclusive():
        if not is_finished(folder):
            remove_leftovers(folder, ANYWHERE)  # of processes that were killed, on other machines perhaps
            Manifest(
                target=target.spec,
                dtype=target.dtype_name,
                max_length=max_length,
                corpus=key["corpus"],
                samples=len(texts),
                tokens=sum(len(text.tokens) for text in texts),
                embed_head=_write_embed_head(folder, target),
                shards=tuple(entries),
                stored=stored,
                layers=layers,
                chat_template_kwargs=target.chat.template.variables,
            ).write(folder)
    work.clear()


# --- what is written, and by whom ---


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.arrow"


def store_key(target: Target, *, stored: str, layers: tuple[int, ...], max_length: int, corpus: str) -> dict:
    """What makes two stores the same."""
    return {
        "target": target.spec.fingerprint,
        "template": target.spec.template,
        KWARGS: target.chat.template.variables,
        "dtype": target.dtype_name,
        "stored": stored,
        "layers": list(layers),
        "max_length": max_length,
        "corpus": corpus,
    }


def _check_same(folder: Path, key: dict) -> None:
    """Raise StoreError where the finished store in `folder` is another one."""
    manifest = check(folder)
    stored = {"target": manifest.target.fingerprint, "template": manifest.target.template}
    stored |= {name: getattr(manifest, name) for name in ("dtype", "stored", "layers", "max_length", "corpus", KWARGS)}
    if same_weights(stored["target"], key["target"]):
        stored["target"] = key["target"]
    if changed := differences(stored, key):
        raise StoreError(
            f"{folder} holds a store of another kind ({'; '.join(changed)}): choose another folder or remove it"
        )


def _write_shards(
    folder: Path, work: Work, reader: Reader, shards: list[Shard], stored: str, rank: Rank, again: bool = False
) -> None:
    """Write this rank's share of the shards, and those that no other process is at; `again` is a second look."""
    sizes = [sum(len(text.tokens) for batch in shard for text in batch) for shard in shards]
    with tqdm(total=sum(sizes), unit="token", unit_scale=True, desc="extract", disable=again or rank.rank > 0) as bar:
        for number in order(len(shards), rank):
            if _is_done(folder, work, number):  # before the lock, which would leave a file in a finished store
                bar.update(sizes[number])
                continue
            path = shard_path(folder, number)
            with work.part(path.stem) as acquired:
                if acquired and not _is_done(folder, work, number):
                    entry = write_shard(path, reader, shards[number], stored, bar)
                    work.write_receipt(path.stem, asdict(entry))
                else:
                    bar.update(sizes[number])


def _is_done(folder: Path, work: Work, number: int) -> bool:
    return _entry(folder, work, number) is not None or is_finished(folder)  # in this order: receipts go last


def _entries(folder: Path, work: Work, shards: list[Shard]) -> list[FileEntry | None]:
    return [_entry(folder, work, number) for number in range(len(shards))]


def _entry(folder: Path, work: Work, number: int) -> FileEntry | None:
    """A shard that is there, and of the size that its receipt says; else None."""
    path = shard_path(folder, number)
    if (receipt := work.receipt(path.stem)) is None or not path.exists():
        return None
    entry = FileEntry(**receipt)
    return entry if path.stat().st_size == entry.bytes else None


def _write_embed_head(folder: Path, target: Target) -> FileEntry:
    state = {"embedding": target.embed_head.embedding.cpu().contiguous()}
    if not target.embed_head.tied:
        state["head"] = target.embed_head.head.cpu().contiguous()
    with atomic(folder / EMBED_HEAD) as path:
        save_file(state, path)
    return FileEntry.of(folder / EMBED_HEAD)


# --- the plan ---


def tokenize(
    target: Target, conversations: list[Conversation], max_length: int, tell: bool = True, strict: bool = False
) -> list[TokenizedText]:
    """Render conversations, cut them and order them by length; texts without two tokens of an answer are left out.

    A conversation is one text, or several where the chat template rewrites earlier answers once the chat goes on.

    Args:
        tell: warn of how many are left out, and why.
        strict: a conversation that the template refuses is an error; see `report_left_out`.
    """
    texts, refused, short, taken = [], [], 0, {conversation.id for conversation in conversations}
    for conversation in tqdm(conversations, desc="render", unit="conversation", leave=False):
        try:
            rendered = target.chat.texts(conversation.messages, conversation.template)
            for text in rendered:
                target.check_tokens(text.tokens, "its text")
        except ValueError as error:
            refused.append(f"conversation {conversation.id}: {error}")
            continue
        short += not rendered  # all answers are kept out of the loss
        for number, text in enumerate(rendered, 1):
            spans = [(start, min(stop, max_length)) for start, stop in text.spans if start < max_length]
            draws = tuple(conversation.messages[i].get("drawn") for i in text.answers[: len(spans)])
            kept = any(stop - start >= 2 for start, stop in spans)
            short += not kept
            if kept:
                name = conversation.id if len(rendered) == 1 else f"{conversation.id}/{number}"
                while len(rendered) > 1 and name in taken:
                    name += "'"
                taken.add(name)
                draws = draws if any(draws) else ()
                texts.append(TokenizedText(name, text.tokens[:max_length], spans, conversation.digest, draws))
    if refused and (tell or strict):
        report_left_out("{} conversations that the target cannot read", refused, len(conversations), strict)
    if not texts:
        raise CorpusError(f"none of the {len(conversations)} conversations has an answer within {max_length} tokens")
    said = {conversation.digest for conversation in conversations}
    if tell and len(said) < len(conversations):
        logger.warning("%d conversations are there more than once", len(conversations) - len(said))
    if tell and short:
        logger.warning(
            "left out %d texts without two tokens of an answer for the loss among the first %d", short, max_length
        )
    return sorted(texts, key=lambda text: len(text.tokens))


def plan_shards(texts: list[TokenizedText], batch_tokens: int, shard_tokens: int) -> list[Shard]:
    """Shards of batches of texts; neighbours in length share a batch."""
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


def _digest(texts: list[TokenizedText]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.id, text.tokens, text.spans, *text.draws]).encode())
    return digest.hexdigest()
