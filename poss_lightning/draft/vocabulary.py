"""A smaller vocabulary for a trained draft: `poss vocabulary`.

The head is the target's and no part of the draft, so nothing is trained: the draft only uses fewer of the head's rows.
The idea is FR-Spec's (arXiv 2502.14856). Tokens left out are never drafted, but the target still emits them: decoding
stays lossless.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor
from tqdm import tqdm

from poss_lightning.corpus.readers import Conversation, read_conversations
from poss_lightning.corpus.records import CorpusError
from poss_lightning.corpus.tokens import count_tokens, most_frequent
from poss_lightning.draft.specialists import Specialists
from poss_lightning.files import atomic_folder, check_new
from poss_lightning.ranges import Count, Size, check_numbers
from poss_lightning.target.chat import Chat
from poss_lightning.target.model import Target


@check_numbers
def vocabulary(
    draft: str,
    corpus: str,
    out: str,
    size: Size | None = 8192,
    target: str = "embedded",
    split: str = "train",
    limit: Count | None = None,
) -> None:
    """Write a copy of a draft that proposes only the most frequent tokens of a corpus' answers.

    The target's stop tokens are always among them. Prints which share of the answers' tokens they cover.

    Args:
        draft: draft folder, hub id or shipped draft, whatever vocabulary it has.
        corpus: `.jsonl`, `.jsonl.gz` or `.json` file of conversations, or a hub id of `datasets`.
        out: folder to write.
        size: number of tokens the copy may propose; null for all of the target's.
        target: "embedded", a local folder or a hub id; the one the draft was trained for.
        split: of a hub data set.
        limit: read only that many conversations.

    Raises:
        FileExistsError: there is something at `out`.
        FileNotFoundError: no such draft or target.
        CorpusError: no such corpus, a malformed one, or one without an answer.
        ValueError: the draft has another target or a head of its own, or size does not fit the target's vocabulary.
    """
    check_new(out)
    trained, conversations = Specialists.from_pretrained(draft), read_conversations(corpus, split, limit)
    loaded = Target.load(target, dtype=None, device="cpu")  # for its template: nothing is computed
    if trained.config.own_head:
        raise ValueError(f"{draft} has a head of its own, whose vocabulary is chosen when it is trained")
    if difference := trained.config.target.difference(loaded.spec):
        raise ValueError(f"{draft} was trained for another target: {difference}")
    total, stops = loaded.spec.vocab_size, loaded.chat.stops
    _check_size(size, total, stops)
    answers = render_answers(loaded.chat, conversations)
    counts = count_tokens(answers, total)  # (total,), and never all 0: see `Conversation`
    chosen = None if size is None else most_frequent(counts, size, stops)
    with atomic_folder(out) as folder:
        restrict_vocabulary(trained, chosen).save_pretrained(folder)
    covered = counts.sum() if chosen is None else counts[chosen.numpy()].sum()
    share = f"{100 * covered / counts.sum():.1f} %"
    print(f"{size or total} of {total} tokens cover {share} of {counts.sum()} answer tokens")


def restrict_vocabulary(draft: Specialists, vocabulary: Tensor | None) -> Specialists:
    """A copy with the same weights that proposes only `vocabulary`: (V,) token ids, ascending; None for all."""
    restricted = copy.deepcopy(draft)
    restricted.config = replace(draft.config, vocabulary_size=None if vocabulary is None else len(vocabulary))
    restricted.vocabulary = vocabulary
    return restricted


def _check_size(size: int | None, total: int, stops: frozenset[int]) -> None:
    least = max(1, len(stops))
    if size is not None and not least <= size <= total:
        why = f"{least}, as it holds the target's stop tokens {sorted(stops)}," if least > 1 else "1"
        raise ValueError(f"size is {size}; it must lie between {why} and the target's {total}, or be null for all")


def render_answers(chat: Chat, conversations: list[Conversation]) -> Iterator[list[int]]:
    """Token ids of every answer, its stop token included."""
    for conversation in tqdm(conversations, desc="count", unit="conversation", leave=False):
        try:
            texts = chat.texts(conversation.messages, conversation.template)
        except ValueError as error:
            raise CorpusError(f"conversation {conversation.id}: {error}") from error
        yield from (text.tokens[start:stop] for text in texts for start, stop in text.spans)
