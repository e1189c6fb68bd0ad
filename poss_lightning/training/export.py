"""Write a draft's folder from a training checkpoint of any strategy, or from another draft, with a smaller vocabulary.

It takes neither a GPU nor a process group.
"""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from poss_lightning.corpus.readers import Conversation, read_conversations
from poss_lightning.corpus.tokens import count_tokens, most_frequent
from poss_lightning.draft.folder import CONFIG, TRAINED_ON, check_state, decode_digests
from poss_lightning.draft.specialists import DraftConfig, Specialists
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
    """Write the draft of a training checkpoint, or of another draft, as config.json and model.safetensors.

    With `vocabulary_size` it proposes only the most frequent tokens of a corpus' answers, the target's stop tokens
    always among them, and the share of the answers' tokens that they cover is printed. The head is the target's, so
    nothing is trained. The idea is FR-Spec's (arXiv 2502.14856); decoding stays lossless.

    Args:
        source: a .ckpt file that `poss fit` wrote, with any strategy; or a draft folder, hub id or shipped draft.
        out: folder to write.
        dtype: of the weights in the file. A 16-bit dtype loses nothing where decoding is in that dtype anyway.
        vocabulary_size: tokens that it may propose; as many as the target has for all; None for those of the source.
        corpus: for a smaller vocabulary: file of conversations, or a hub id of `datasets`.
        target: for a smaller vocabulary: "embedded", a local folder or a hub id; the one it was trained for.
        split: of a hub data set.
        limit: read only that many conversations.

    Raises:
        FileExistsError: there is something at `out`.
        FileNotFoundError: there is no such file.
        CorpusError: no such corpus, a malformed one, or one without an answer.
        ValueError: the file is not a checkpoint of `poss fit`, or its weights contradict its config; or the vocabulary
            does not fit the draft or its target.
    """
    check_new(out)
    is_checkpoint = Path(source).is_file() or source.endswith(".ckpt")
    draft = _load_draft(Path(source)) if is_checkpoint else Specialists.from_pretrained(source)
    if vocabulary_size is not None:
        draft = _cut(draft, source, vocabulary_size, corpus, target, split, limit)
    with announced(f"writing {out}"), atomic_folder(out) as folder:
        draft.to(getattr(torch, dtype)).save_pretrained(folder)
    print(f"{out}: allocation {list(draft.config.allocation)}, for {draft.config.target.name}, in {dtype}")


def _cut(
    draft: Specialists, source: str, size: int, corpus: str | None, target: str, split: str, limit: int | None
) -> Specialists:
    """The draft with the vocabulary that `export` describes."""
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
        raise ValueError(f"{source} was trained for another target: {difference}")
    stops = loaded.chat.stops
    if not len(stops) <= size <= total:
        raise ValueError(
            f"vocabulary_size is {size}; it must lie between {len(stops)}, as it holds the target's stop tokens "
            f"{sorted(stops)}, and the target's {total}"
        )
    counts = count_tokens(answers_of(loaded, conversations), total)
    chosen = most_frequent(counts, size, stops)
    covered = counts.sum() if chosen is None else counts[chosen.numpy()].sum()
    share = f"{100 * covered / counts.sum():.1f} %"
    print(f"{size} of {total} tokens cover {share} of {counts.sum()} answer tokens")
    return restrict_vocabulary(draft, chosen)


def restrict_vocabulary(draft: Specialists, vocabulary: Tensor | None) -> Specialists:
    """A copy with the same weights that proposes only `vocabulary`: (V,) token ids, ascending; None for all."""
    restricted = copy.deepcopy(draft)
    restricted.config = replace(draft.config, vocabulary_size=None if vocabulary is None else len(vocabulary))
    restricted.vocabulary = vocabulary
    return restricted


def answers_of(target: Target, conversations: list[Conversation]) -> Iterator[list[int]]:
    """Token ids of every answer that is in the loss, its stop token included."""
    texts = tokenize(target, conversations, max_length=target.spec.context)
    return (text.tokens[start:stop] for text in texts for start, stop in text.spans)


def _load_draft(checkpoint: Path) -> Specialists:
    stored = load_checkpoint(checkpoint)
    weights = {
        name.removeprefix(PREFIX): value for name, value in stored["state_dict"].items() if name.startswith(PREFIX)
    }
    config = DraftConfig.from_json(stored["draft"], checkpoint)
    try:
        check_state(weights)
        draft = Specialists(config, weights.get("vocabulary"))
        draft.load_state_dict(weights)
        draft.trained_on = decode_digests(stored.get(TRAINED_ON, ""))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{checkpoint}: its state_dict does not fit its draft's config: {error}") from error
    return draft


def load_checkpoint(path: Path) -> dict:
    """The content of a training checkpoint: tensors and plain values alone, so no code in the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint of `poss fit`.
    """
    if (path / CONFIG).is_file():
        raise ValueError(
            f"{path} is a draft's folder; give a training's checkpoints/last.ckpt, or `poss replay` the draft"
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and no draft's; give a .ckpt file, as `poss fit` writes it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with announced(f"reading {path}"):
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} is not a complete checkpoint of plain tensors: {str(error).splitlines()[0]}"
        ) from error
    for name in ("state_dict", "draft"):
        if not isinstance(stored, dict) or name not in stored:
            raise ValueError(f"{path} has no {name!r}: it is not a checkpoint of `poss fit`")
    return stored
