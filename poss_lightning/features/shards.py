"""A shard of a store: who computes its columns, and how it is written."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from poss_lightning.features.manifest import FileEntry, encode, schema
from poss_lightning.files import atomic
from poss_lightning.target_model.model import Target

LOGIT_SLOTS = 256  # slots whose logits exist at once


class TextFeatures(NamedTuple):
    """A target's outputs for some texts, concatenated without padding, on the device of its head."""

    features: Tensor  # (tokens, D)
    layers: Tensor  # (tokens, n, D), outputs of inner layers; n is 0 where none are kept


class Reader(Protocol):
    """Computes the features of texts: the target itself here, a serving engine in `serving/features.py`."""

    target: Target
    layers: tuple[int, ...]  # inner layers that are kept too, as `Target.text_layers` counts them

    def read(self, texts: list[list[int]]) -> TextFeatures:
        """Compute the features of token lists, each of which the target sees alone and in full."""
        ...


class TargetReader:
    """Reads a batch of texts in one forward of the target."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def read(self, texts: Sequence[list[int] | Tensor]) -> TextFeatures:
        padded = pad_sequence([torch.as_tensor(text) for text in texts], batch_first=True)  # (B, T)
        read = self.target.text_layers(padded.to(self.target.device), self.layers)  # (B, T, …) each
        return TextFeatures(
            *(torch.cat([row[: len(text)] for row, text in zip(rows, texts, strict=True)]) for rows in read)
        )


# --- writing ---


@dataclass(frozen=True)
class TokenizedText:
    """A conversation, or its beginning, as the target will read it."""

    id: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    conversation: str = ""  # digest of all that is said in it
    draws: tuple[dict[str, float] | None, ...] = ()  # how each span was drawn, see `Draw`; () where none was


def write_shard(
    path: Path, reader: Reader, batches: list[list[TokenizedText]], stored: str, bar: tqdm
) -> tuple[FileEntry, list[str]]:
    """Read batches of texts and write their shard, whole or not at all; return its entry and the texts left out."""
    left_out: list[str] = []
    with atomic(path) as temporary:
        with (
            temporary.open("wb") as file,
            pa.ipc.new_stream(file, schema(reader.layers)) as writer,
            ThreadPoolExecutor(1) as thread,
        ):
            writing: Future[None] | None = None
            for batch in batches:
                rows = read_batch(reader, batch, stored)  # while the thread writes the batch before
                finite_ids = set(rows["id"].to_pylist())
                left_out += [text.id for text in batch if text.id not in finite_ids]
                if writing:
                    writing.result()
                writing = thread.submit(writer.write_batch, rows) if finite_ids else None
                bar.update(sum(len(text.tokens) for text in batch))
            if writing:
                writing.result()
        return FileEntry.of(temporary, path.name), left_out


@torch.inference_mode()
def read_batch(reader: Reader, batch: list[TokenizedText], stored: str) -> pa.RecordBatch:
    """Return the rows of texts whose features are finite. On a GPU, only the stored bytes leave it."""
    lengths = [len(text.tokens) for text in batch]
    read = reader.read([text.tokens for text in batch])
    vectors = {"features": read.features, "layers": read.layers} if reader.layers else {"features": read.features}
    columns = {name: encode(joined, stored).to("cpu", non_blocking=True) for name, joined in vectors.items()}
    found = greedy_tokens(reader.target, read, lengths, [text.spans for text in batch])
    greedy, finite = torch.stack(found).cpu()  # waits for the copies above, too
    rows = {
        "id": [text.id for text in batch],
        "conversation": [text.conversation for text in batch],
        "length": lengths,
        "tokens": [text.tokens for text in batch],
        "greedy": [row.tolist() for row in greedy.split(lengths)],
        "spans": [[edge for span in text.spans for edge in span] for text in batch],
        "draws": [[json.dumps(draw) for draw in text.draws] for text in batch],
    } | {name: _binary(joined, lengths) for name, joined in columns.items()}
    written, kept = pa.RecordBatch.from_pydict(rows, schema=schema(reader.layers)), finite.split(lengths)
    return written if finite.all() else written.filter(pa.array([bool(row.all()) for row in kept]))


def _binary(joined: Tensor, lengths: list[int]) -> pa.LargeBinaryArray:
    """Wrap the tensor's memory as one value per text."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64) * joined[0].numel()
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined.numpy())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)


def greedy_tokens(
    target: Target, read: TextFeatures, lengths: Iterable[int], spans: Iterable[list[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """Return the most likely next token at every slot before an assistant's token, elsewhere -1: (tokens,)

    And whether all that the target computed at a slot is finite: (tokens,)

    Args:
        read: of texts, one after another.
        lengths: their tokens.
        spans: what the assistant wrote in each.
    """
    features = read.features
    greedy = torch.full(features.shape[:1], -1, device=features.device)
    finite = features.isfinite().all(-1) & read.layers.isfinite().flatten(1).all(-1)
    for first, written in zip(accumulate(lengths, initial=0), spans, strict=False):
        for start, stop in written:  # no slot lies before a text's first token
            end = first + stop - 1
            for begin in range(first + max(start, 1) - 1, end, LOGIT_SLOTS):
                slots = slice(begin, min(begin + LOGIT_SLOTS, end))
                best = target.logits(features[slots]).max(-1)
                greedy[slots] = best.indices
                finite[slots] &= best.values.isfinite()
    return greedy, finite
