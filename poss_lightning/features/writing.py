"""Write the feature store of a corpus.

Order, batches and shards are planned first, from the corpus alone. So any number of processes can share the shards, the
same command resumes a killed run, and the bytes are always the same.
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

from poss_lightning.corpus.formats import CorpusError, report_left_out, unique_name
from poss_lightning.corpus.readers import Conversation
from poss_lightning.features.manifest import (
    EMBED_HEAD,
    MANIFEST,
    FileEntry,
    Manifest,
    check_files,
    is_finished,
    vector_bytes,
)
from poss_lightning.features.shards import Reader, TargetReader, TokenizedText, write_shard
from poss_lightning.files import atomic, check_folder
from poss_lightning.ranks import Rank, order
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work, begun_with, check_same

Shard = list[list[TokenizedText]]  # batches of texts
UNFINISHED = "unfinished"  # folder of the work, inside the store
STORE_FILES = (UNFINISHED, MANIFEST)  # every store, finished or not, has one of them
KWARGS, LEFT_OUT = "chat_template_kwargs", "left_out"
NAMED = 8  # texts that a message names
NFS_DELAY_S = 2.0  # seconds by which a shared file system may show another machine's receipt
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

    `reader` is called with target and layers once there is something to read.

    Raises:
        FileExistsError: `folder` holds something else.
        CorpusError: no conversation has an assistant's turn within max_length tokens.
        ValueError: a layer that the target does not have, or a store begun with other settings.
    """
    vector = vector_bytes(target.spec.hidden_size, target.dtype, stored)
    target.check_layers(layers)
    max_length = within_context(target, max_length, tell=rank.rank == 0)
    earlier = vars(check_files(folder)) if is_finished(folder) else begun_with(folder / UNFINISHED)
    target.chat.template.freeze(earlier.get(KWARGS, {}))
    texts = tokenize(target, conversations, max_length, tell=rank.rank == 0, strict=strict)
    features = {
        "dtype": target.dtype_name,
        "stored": stored,
        "layers": layers,
        "max_length": max_length,
        "corpus": _digest(texts),
        KWARGS: target.chat.template.variables,
    }
    settings = {"target": target.spec.fingerprint, "template": target.spec.template} | features
    work = Work(folder / UNFINISHED, settings | {"batch_tokens": batch_tokens, "shard_bytes": shard_bytes})
    if is_finished(folder):
        spec = check_files(folder).target
        check_same(folder, earlier | {"target": spec.fingerprint, "template": spec.template}, settings)
        return work.clear()  # the process that finished it may have been killed before it did
    check_folder(folder, *STORE_FILES)
    work.begin()
    plan = plan_shards(texts, batch_tokens, shard_bytes // (vector * (1 + len(layers))))
    shards = {folder / f"shard-{number:05d}.arrow": batches for number, batches in enumerate(plan)}
    entries = _write_shards(shards, work, reader(target, layers), stored, rank)
    if (missing := len(shards) - len(entries)) and not is_finished(folder):
        others = f"{missing} of {len(shards)} shards are with other processes, the last of which finishes it"
        return print(f"{folder}: {others}; if one of them died, give the command again")
    with work.exclusive():
        if not is_finished(folder):
            receipts = [work.receipt(path.stem) or {} for path in shards]
            left_out = [name for receipt in receipts for name in receipt[LEFT_OUT]]
            if left_out:
                message = describe_overflow(left_out, len(texts), target.dtype_name)
                if strict or len(left_out) == len(texts):
                    raise CorpusError(message)
                logger.warning("left out %s", message)
            lengths = {text.id: len(text.tokens) for text in texts}
            stored_ids = lengths.keys() - left_out
            Manifest(
                target=target.spec,
                embed_head=_write_embed_head(folder, target),
                shards=entries,
                samples=len(stored_ids),
                tokens=sum(lengths[name] for name in stored_ids),
                left_out=tuple(left_out),
                **features,
            ).write(folder)
    work.clear()


def describe_overflow(names: list[str], total: int, dtype: str) -> str:
    """Say how many texts, and which, have features that are not finite in a target's dtype; and what to do."""
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    cause = "use --dtype bfloat16 or float32" if dtype == "float16" else "are the target's files damaged?"
    return f"{len(names)} of {total} texts whose features are not finite in {dtype}: {shown}; {cause}"


# --- shards, which several processes may write ---


def _write_shards(
    shards: dict[Path, Shard], work: Work, reader: Reader, stored: str, rank: Rank
) -> tuple[FileEntry, ...]:
    """Write this rank's shards, then those that no other process is writing; return the entries of all so far."""
    items = list(shards.items())
    for delay in (0, NFS_DELAY_S):  # else each of two machines might think that the other has not finished
        missing = [items[number] for number in order(len(items), rank) if not _is_done(items[number][0], work)]
        if missing and delay:
            time.sleep(delay)
        total = sum(len(text.tokens) for _, batches in missing for batch in batches for text in batch)
        with tqdm(
            total=total, unit="token", unit_scale=True, desc="extract", disable=rank.rank > 0 or not total
        ) as bar:
            for path, batches in missing:
                if not _is_done(path, work):  # asked before the lock, which would leave a file in a finished store
                    with work.part(path.stem) as acquired:
                        if acquired and not _is_done(path, work):
                            entry, left_out = write_shard(path, reader, batches, stored, bar)
                            work.write_receipt(path.stem, asdict(entry) | {LEFT_OUT: left_out})
    return tuple(entry for path in shards if (entry := _entry(path, work)))


def _is_done(path: Path, work: Work) -> bool:
    return _entry(path, work) is not None or is_finished(path.parent)  # in this order: receipts go last


def _entry(path: Path, work: Work) -> FileEntry | None:
    """Return the entry of a shard whose size is that of its receipt; else None."""
    if (receipt := work.receipt(path.stem)) is None or not path.exists():
        return None
    del receipt[LEFT_OUT]
    entry = FileEntry(**receipt)
    return entry if path.stat().st_size == entry.bytes else None


def _write_embed_head(folder: Path, target: Target) -> FileEntry:
    state = {"embedding": target.embed_head.embedding.cpu().contiguous()}
    if not target.embed_head.tied:
        state["head"] = target.embed_head.head.cpu().contiguous()
    with atomic(folder / EMBED_HEAD) as path:
        save_file(state, path)
    return FileEntry.of(folder / EMBED_HEAD, EMBED_HEAD)


# --- the plan ---


def within_context(target: Target, max_length: int, tell: bool = True) -> int:
    """Limit `max_length` to the target's context, and log it if that is shorter."""
    if tell and max_length > target.spec.context:
        logger.warning("max_length is lowered to %d, all that %s reads", target.spec.context, target.spec.name)
    return min(max_length, target.spec.context)


def tokenize(
    target: Target, conversations: list[Conversation], max_length: int, tell: bool = True, strict: bool = False
) -> list[TokenizedText]:
    """Render conversations, cut them and sort them by length; texts without two tokens of an answer are left out.

    A conversation is one text, or several where the chat template rewrites earlier answers in later turns.

    Args:
        target: its chat template renders them.
        conversations: to render.
        max_length: tokens a text is cut at.
        tell: log how many are left out, and why.
        strict: a conversation that the template refuses is an error; see `report_left_out`.
    """
    texts, refused, short, used = [], [], 0, {conversation.id: 1 for conversation in conversations}
    ends: list[bool] = []  # of each answer, whether it is a stop token
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
            if not any(stop - start >= 2 for start, stop in spans):
                short += 1
                continue
            name = unique_name(f"{conversation.id}/{number}", used) if len(rendered) > 1 else conversation.id
            ended = zip(text.spans, text.answers, strict=True)
            whole = [stop for (_, stop), i in ended if conversation.messages[i].get("finish_reason") != "length"]
            ends += [text.tokens[stop - 1] in target.chat.stops for stop in whole]
            draws = tuple(conversation.messages[i].get("drawn") for i in text.answers[: len(spans)])
            draws = draws if any(draws) else ()
            texts.append(TokenizedText(name, text.tokens[:max_length], spans, conversation.digest, draws))
    if tell or strict:
        report_left_out("{} conversations that the target cannot read", refused, len(conversations), strict)
    if not texts:
        raise CorpusError(f"none of the {len(conversations)} conversations has an answer within {max_length} tokens")
    if tell and short:
        logger.warning(
            "left out %d texts without two tokens of an answer for the loss among the first %d", short, max_length
        )
    if tell and not all(ends):
        logger.warning(
            "%d of %d answers end without a stop token: a draft does not learn where they end",
            ends.count(False),
            len(ends),
        )
    return sorted(texts, key=lambda text: len(text.tokens))


def plan_shards(texts: list[TokenizedText], batch_tokens: int, shard_tokens: int) -> list[Shard]:
    """Plan shards of batches of texts; neighbours in length share a batch."""
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
