"""Writing a shard: the target reads batch after batch, and a thread hashes and writes what it read."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from poss_lightning.features.encoding import encode
from poss_lightning.features.manifest import FileEntry
from poss_lightning.features.store import schema
from poss_lightning.files import Hashed, atomic
from poss_lightning.target.generation import pad_right
from poss_lightning.target.model import Target


@dataclass(frozen=True)
class TokenizedText:
    """A conversation as the target will read it."""

    id: str
    tokens: list[int]
    spans: list[tuple[int, int]]


def write_shard(
    path: Path, target: Target, batches: list[list[TokenizedText]], stored: str, layers: tuple[int, ...], bar: tqdm
) -> FileEntry:
    """Read batches of texts with the target and write their shard, complete or not at all."""
    with atomic(path) as temporary, Hashed(temporary) as file:
        with pa.ipc.new_stream(file, schema(layers)) as writer, ThreadPoolExecutor(1) as thread:
            writing: Future[None] | None = None
            for batch in batches:
                rows = read_batch(target, batch, stored, layers)  # while the thread writes those before
                if writing:
                    writing.result()
                writing = thread.submit(writer.write_batch, rows)
                bar.update(sum(len(text.tokens) for text in batch))
            if writing:
                writing.result()
        return FileEntry.written(path.name, file)


@torch.inference_mode()
def read_batch(target: Target, batch: list[TokenizedText], stored: str, layers: tuple[int, ...]) -> pa.RecordBatch:
    """Rows of the store. On a GPU everything but the bytes to keep stays there."""
    tokens = pad_right([text.tokens for text in batch], target.device)
    if layers:
        features, outputs = target.text_layers(tokens, layers)
        vectors = {"features": features, "layers": outputs}
    else:
        features = target.text_features(tokens)
        vectors = {"features": features}
    lengths = [len(text.tokens) for text in batch]
    columns = {name: _without_padding(padded, lengths, stored) for name, padded in vectors.items()}
    greedy = _greedy(target, features, batch).cpu()  # (B, T); waits for all copies that were asked for before
    rows = {
        "id": [text.id for text in batch],
        "length": lengths,
        "tokens": [text.tokens for text in batch],
        "greedy": [row[:length].tolist() for row, length in zip(greedy, lengths, strict=True)],
        "spans": [[edge for span in text.spans for edge in span] for text in batch],
    } | {name: _binary(joined, lengths) for name, joined in columns.items()}
    return pa.RecordBatch.from_pydict(rows, schema=schema(layers))


def _without_padding(vectors: Tensor, lengths: list[int], stored: str) -> Tensor:
    """(B, T, …, D) -> (tokens, …, vector_bytes) uint8 on the CPU; from a GPU the copy may still be under way."""
    real = torch.cat([row[:length] for row, length in zip(vectors, lengths, strict=True)])
    return encode(real, stored).to("cpu", non_blocking=True)


def _binary(joined: Tensor, lengths: list[int]) -> pa.LargeBinaryArray:
    """One value a text, in the tensor's own memory."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64) * joined[0].numel()
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined.numpy())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)


def _greedy(target: Target, features: Tensor, batch: list[TokenizedText]) -> Tensor:
    """The target's likeliest next token after every slot that an assistant's token follows; -1 elsewhere."""
    greedy = torch.full(features.shape[:2], -1, device=features.device)
    for row, text in enumerate(batch):
        for start, stop in text.spans:
            slots = slice(start - 1, stop - 1)
            greedy[row, slots] = target.embed_head.logits(features[row, slots]).max(-1).indices
    return greedy
