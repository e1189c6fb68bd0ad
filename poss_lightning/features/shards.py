"""Writing a shard: batch after batch is read, and a thread writes what was read."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from poss_lightning.features.checks import schema
from poss_lightning.features.encoding import encode
from poss_lightning.features.manifest import FileEntry
from poss_lightning.features.reading import Reader
from poss_lightning.files import atomic
from poss_lightning.target.spec import EmbedHead


@dataclass(frozen=True)
class TokenizedText:
    """A conversation, or its beginning, as the target will read it."""

    id: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    conversation: str = ""  # digest of what is said in all of it
    draws: tuple[dict[str, float] | None, ...] = ()  # how each span was drawn, see `Draw`; () where none was


def write_shard(path: Path, reader: Reader, batches: list[list[TokenizedText]], stored: str, bar: tqdm) -> FileEntry:
    """Read batches of texts and write their shard, complete or not at all."""
    with atomic(path) as temporary:
        with (
            temporary.open("wb") as file,
            pa.ipc.new_stream(file, schema(reader.layers)) as writer,
            ThreadPoolExecutor(1) as thread,
        ):
            writing: Future[None] | None = None
            for batch in batches:
                rows = read_batch(reader, batch, stored)  # while the thread writes those before
                if writing:
                    writing.result()
                writing = thread.submit(writer.write_batch, rows)
                bar.update(sum(len(text.tokens) for text in batch))
            if writing:
                writing.result()
        return FileEntry.of(temporary)


@torch.inference_mode()
def read_batch(reader: Reader, batch: list[TokenizedText], stored: str) -> pa.RecordBatch:
    """Rows of the store. On a GPU everything but the bytes to keep stays there."""
    lengths = [len(text.tokens) for text in batch]
    read = reader.read([text.tokens for text in batch])
    vectors = {"features": read.features, "layers": read.layers} if reader.layers else {"features": read.features}
    columns = {name: encode(joined, stored).to("cpu", non_blocking=True) for name, joined in vectors.items()}
    greedy = _greedy(reader.target.embed_head, read.features, batch).cpu()  # waits for the copies asked for before
    rows = {
        "id": [text.id for text in batch],
        "conversation": [text.conversation for text in batch],
        "length": lengths,
        "tokens": [text.tokens for text in batch],
        "greedy": [row.tolist() for row in greedy.split(lengths)],
        "spans": [[edge for span in text.spans for edge in span] for text in batch],
        "draws": [[json.dumps(draw) for draw in text.draws] for text in batch],
    } | {name: _binary(joined, lengths) for name, joined in columns.items()}
    return pa.RecordBatch.from_pydict(rows, schema=schema(reader.layers))


def _binary(joined: Tensor, lengths: list[int]) -> pa.LargeBinaryArray:
    """One value a text, in the tensor's own memory."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64) * joined[0].numel()
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined.numpy())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)


def _greedy(embed_head: EmbedHead, features: Tensor, batch: list[TokenizedText]) -> Tensor:
    """(tokens,): the target's most likely next token after every slot that an assistant's token follows; else -1."""
    greedy = torch.full(features.shape[:1], -1, device=features.device)
    for text, first in zip(batch, accumulate((len(text.tokens) for text in batch), initial=0), strict=False):
        for start, stop in text.spans:
            slots = slice(first + max(start, 1) - 1, first + stop - 1)  # before a text's first token stands nothing
            greedy[slots] = embed_head.logits(features[slots]).max(-1).indices
    return greedy
