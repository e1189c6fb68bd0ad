"""Write a draft's folder from a training checkpoint of any strategy, or from a draft, with a smaller vocabulary.

It needs neither a GPU nor a process group.
"""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.corpus.tokens import count_tokens, most_frequent
from poss_lightning.draft.candidates import low_rank
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import TRAINED_ON, check_state, decode_digests
from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import counted_passes
from poss_lightning.features.writing import tokenize
from poss_lightning.files import atomic_folder, check_new
from poss_lightning.ranges import Count, Size, check_numbers
from poss_lightning.target.model import Target
from poss_lightning.terminal import announced

MOMENT_VECTORS = 2**16  # that the head reads, of all positions
PREFIX = "draft."  # of the draft's tensors in the state of `SpecialistTraining`


@check_numbers
def export(
    source: str,
    out: str,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    vocabulary_size: Size | None = None,
    corpus: str | None = None,
    head_rank: Size | None = None,
    head_rows: Size = DraftConfig.head_rows,
    store: str | None = None,
    target: str = "embedded",
    split: str = "train",
    limit: Count | None = None,
) -> None:
    """Write the draft of a training checkpoint, or a draft, as config.json and model.safetensors.

    With `vocabulary_size` it proposes only the most frequent tokens of a corpus's answers, and always the target's stop
    tokens; the share of the answers' tokens that they cover is printed. The head is the target's, so nothing is trained
    (the idea is FR-Spec's, arXiv 2502.14856). With `head_rank`, a draft step reads less of the head: a product of
    that rank finds candidates, and their rows are read. Decoding stays lossless.

    Args:
        source: a .ckpt file that `poss fit` wrote, with any strategy; or a draft folder, hub id or shipped draft.
        out: folder to write.
        dtype: of the weights. A 16-bit dtype loses nothing if decoding uses the same.
        vocabulary_size: number of tokens to propose, up to all of the target's; None keeps those of the source.
        corpus: for a smaller vocabulary: a file of conversations, or a hub id of `datasets`.
        head_rank: rank of the product that finds candidates, e.g. a third of the target's width; None as in the source.
        head_rows: candidates of each node, whose logits are exact.
        store: for a head_rank: features; the draft runs on their answers, as what its head reads counts.
        target: for a smaller vocabulary: "embedded", a local folder or a hub id; the target of the draft.
        split: of a hub data set.
        limit: maximum number of conversations to read.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: there is no such source.
        CorpusError: there is no such corpus, or it is malformed or without an answer.
        ValueError: the file is not a checkpoint of `poss fit`, its weights contradict its config, or the vocabulary
            does not fit the draft or its target.
    """
    check_new(out)
    is_checkpoint = Path(source).is_file() or source.endswith(".ckpt")
    draft = _load_draft(Path(source)) if is_checkpoint else load_draft(source)
    if vocabulary_size is not None:
        draft = _cut(draft, source, vocabulary_size, corpus, target, split, limit)
    if head_rank is not None:
        draft = _find_candidates(draft, source, head_rank, head_rows, store)
    with announced(f"writing {out}"), atomic_folder(out) as folder:
        draft.to(getattr(torch, dtype)).save_pretrained(folder)
    print(f"{out}: allocation {list(draft.config.allocation)}, for {draft.config.target.name}, in {dtype}")


def _cut(
    draft: Specialists, source: str, size: int, corpus: str | None, target: str, split: str, limit: int | None
) -> Specialists:
    """Return the draft with the vocabulary that `export` describes."""
    total = draft.config.target.vocab_size
    if draft.config.own_head:
        raise ValueError(f"{source} has a head of its own, whose vocabulary is chosen when it is trained")
    if size == total:
        return restrict_vocabulary(draft, None)
    if corpus is None:
        raise ValueError(f"vocabulary_size is {size} of {total} tokens; give the --corpus that says which")
    conversations = read_conversations(corpus, split, limit)
    loaded = Target.load(target, dtype=None, device="cpu")  # for its template: nothing is computed
    if difference := draft.config.target.difference(loaded.spec):
        raise ValueError(f"{source} was trained for a different target: {difference}")
    stops = loaded.chat.stops
    if not len(stops) <= size <= total:
        raise ValueError(
            f"vocabulary_size is {size}; it must lie between {len(stops)}, as it holds the target's stop tokens "
            f"{sorted(stops)}, and the target's {total}"
        )
    texts = tokenize(loaded, conversations, max_length=loaded.spec.context)
    counts = count_tokens((text.tokens[start:stop] for text in texts for start, stop in text.spans), total)
    chosen = most_frequent(counts, size, stops)
    covered = counts.sum() if chosen is None else counts[chosen.numpy()].sum()
    share = f"{100 * covered / counts.sum():.1f} %"
    print(f"{size} of {total} tokens cover {share} of {counts.sum()} answer tokens")
    return restrict_vocabulary(draft, chosen)


def _find_candidates(draft: Specialists, source: str, rank: int, rows: int, store: str | None) -> Specialists:
    """The draft with a candidate head, for what its head reads at all positions of the store's answers."""
    if store is None:
        raise ValueError(f"head_rank is {rank}; give a --store of features")
    features = FeatureStore(store).select(draft.config.aux_layers)
    if difference := draft.config.target.difference(features.target):
        raise ValueError(f"{source} was trained for a different target than that of {store}: {difference}")
    embed_head = features.embed_head().to("cpu", torch.float32)
    config = replace(draft.config, head_rank=rank, head_rows=rows)
    head = draft.lm_head.weight if config.own_head else embed_head.restrict(draft.vocabulary).head
    moments, count = torch.zeros(2 * [config.target.hidden_size], dtype=torch.float64), 0
    with torch.inference_mode():
        for i in range(len(features)):
            sample = features[i]
            counts = counted_passes(len(sample.tokens), np.array(sample.spans))[:-1]  # (T,), T slots
            embedded, draft_input = embed_head.embed(sample.tokens[None, 1:]), sample.draft_input[None, :-1].float()
            for k, predicted in enumerate(draft(embedded, draft_input, config.depth)):
                read = draft.head_input(predicted[0, counts > k]).double()
                moments, count = moments + read.T @ read, count + len(read)
            if count > MOMENT_VECTORS:
                break
        up, down = low_rank(head, moments / max(count, 1), rank)
    with_head = make_draft(config, draft.vocabulary)
    with_head.load_state_dict(draft.state_dict() | {"head_up": up, "head_down": down})
    with_head.trained_on = draft.trained_on
    return with_head


def restrict_vocabulary(draft: Specialists, vocabulary: Tensor | None) -> Specialists:
    """Return a copy with the same weights that proposes only `vocabulary`: (V,) token ids, ascending; None for all."""
    restricted = copy.deepcopy(draft)
    restricted.config = replace(draft.config, vocabulary_size=None if vocabulary is None else len(vocabulary))
    restricted.vocabulary = vocabulary
    return restricted


def _load_draft(checkpoint: Path) -> Specialists:
    stored = load_checkpoint(checkpoint)
    state = stored["state_dict"].items()
    weights = {name.removeprefix(PREFIX): value for name, value in state if name.startswith(PREFIX)}
    config = DraftConfig.from_json(stored["draft"], checkpoint)
    try:
        check_state(weights)
        draft = make_draft(config, weights.get("vocabulary"))
        draft.load_state_dict(weights)
        draft.trained_on = decode_digests(stored.get(TRAINED_ON, ""))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{checkpoint}: its state_dict does not fit its draft's config: {error}") from error
    return draft


def load_checkpoint(path: Path) -> dict:
    """Load a training checkpoint: only tensors and plain values, so no code in the file runs.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint of `poss fit`.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a .ckpt file that `poss fit` wrote, as checkpoints/last.ckpt")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with announced(f"reading {path}"):
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a complete checkpoint of plain tensors: {reason}") from error
    for name in ("state_dict", "draft"):
        if not isinstance(stored, dict) or name not in stored:
            raise ValueError(f"{path} has no {name!r}: it is not a checkpoint of `poss fit`")
    return stored
