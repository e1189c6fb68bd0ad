"""Write a draft's folder from a training checkpoint of any strategy, or from a draft, with a smaller vocabulary.

It needs neither a GPU nor a process group.
"""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import TRAINED_ON, check_state, decode_digests
from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.texts import count_tokens, most_frequent
from poss_lightning.features.writing import tokenize
from poss_lightning.files import atomic_folder, check_new
from poss_lightning.ranges import Count, Size, check_numbers
from poss_lightning.target.model import Target
from poss_lightning.terminal import announced

PREFIX = "draft."  # of the draft's tensors in the state of `SpecialistTraining`


@check_numbers
def export(
    source: str,
    out: str,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    vocabulary_size: Size | None = None,
    corpus: str | None = None,
    target: str = "embedded",
    split: str = "train",
    limit: Count | None = None,
) -> None:
    """Write the draft of a training checkpoint, or a draft, as config.json and model.safetensors.

    With `vocabulary_size` it proposes only the most frequent tokens of a corpus's answers, and always the target's stop
    tokens; the share of the answers' tokens that they cover is printed. The head is the target's, so nothing is trained
    (the idea is FR-Spec's, arXiv 2502.14856). Decoding stays lossless.

    Args:
        source: a .ckpt file that `poss fit` wrote, with any strategy; or a draft folder, hub id or shipped draft.
        out: folder to write.
        dtype: of the weights. A 16-bit dtype loses nothing if decoding uses the same.
        vocabulary_size: number of tokens to propose, up to all of the target's; None keeps those of the source.
        corpus: for a smaller vocabulary: a file of conversations, or a hub id of `datasets`.
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
    if not path.exists():
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
