"""The target writes its own conversations: it samples a user's message, then answers it.

A draft should learn from its target's own answers, and this makes them. Nothing is downloaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.sampling import Draw, Sampling
from poss_lightning.target.generation import PlainLoop
from poss_lightning.target.model import Target
from poss_lightning.target.template import Message

Choice = tuple[Sampling, int]  # how tokens are chosen, and how many at most
_PATIENCE = 10  # batches in a row without a new conversation, after which it gives up


def write_dialogues(
    corpus: CorpusWriter,
    target: Target,
    conversations: int,
    turns: int,
    *,
    user: Choice,
    answer: Choice,
    openings: Sequence[str],
    batch_size: int,
    seed: int,
    settings: Mapping[str, Any],
) -> None:
    """Write a corpus of new conversations, no two with the same first message.

    Args:
        corpus: that is written.
        target: that writes it.
        conversations: how many.
        turns: user messages in each.
        user: how a user's tokens are chosen, and how many at most.
        answer: likewise of an answer.
        openings: one of them begins each first message.
        batch_size: conversations side by side.
        seed: of all that is sampled.
        settings: what the conversations depend on.

    Raises:
        ValueError: they do not fit the target's context, or it writes nothing new.
    """
    writer = _Writer(target, turns, user=user, answer=answer, openings=openings)
    given = {"chat_template_kwargs": settings["chat_template_kwargs"]} if settings["chat_template_kwargs"] else {}
    with corpus.claim(settings):
        records = (record | given for record in islice(_records(corpus, writer, batch_size, seed), conversations))
        corpus.finish(list(tqdm(records, total=conversations, unit="conversation", desc="synthesize")))


def _records(corpus: CorpusWriter, writer: "_Writer", batch_size: int, seed: int) -> Iterator[dict]:
    """Conversations without end, no two with the same first message, while the target writes new ones."""
    known: set[str] = set()
    without_new = 0  # batches in a row
    for number in count():
        before = len(known)
        for messages in corpus.batch(number, partial(writer.write, batch_size, seed * 1_000_003 + number)):
            if messages[0]["content"] not in known:
                yield {"id": f"{seed}-{len(known):06d}", "messages": messages}
                known.add(messages[0]["content"])
        without_new = 0 if len(known) > before else without_new + 1
        if without_new == _PATIENCE:
            corpus.work.clear()
            raise ValueError(
                f"the target wrote no new conversation in {_PATIENCE} batches, after {len(known)} of them: "
                + ("ask for fewer" if known else "change its tokens, or the openings")
            )


def read_openings(file: str | None) -> list[str]:
    """The lines of the file that are not blank, one at least."""
    if file is None:
        return []
    if not Path(file).is_file():
        raise FileNotFoundError(f"openings {file}: no such file; it must hold a text a line")
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # a mark of the encoding is not text
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"openings {file}, line {line}: not UTF-8 text ({error})") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"openings {file} is empty; it must hold a text a line")
    return lines


class _Writer:
    """Writes a batch of conversations side by side."""

    def __init__(
        self,
        target: Target,
        turns: int,
        *,
        user: Choice,
        answer: Choice,
        openings: Sequence[str] = (),
    ):
        if turns * (user[1] + answer[1]) >= target.spec.context:
            raise ValueError(
                f"{turns} turns of {user[1]} + {answer[1]} tokens do not fit the {target.spec.context} that "
                f"{target.spec.name} reads: lower turns, user_tokens or answer_tokens"
            )
        self.target, self.turns, self.openings = target, turns, openings
        self.loop = PlainLoop(target)
        self.roles = (("user", *user), ("assistant", *answer))

    @torch.inference_mode()
    def write(self, size: int, seed: int) -> list[Messages]:
        """`size` conversations, less those that have an empty message, or special tokens inside a message.

        One that fills the target's context ends with the last answer that has room.
        """
        generator = torch.Generator().manual_seed(seed)
        conversations: list[Messages] = [[] for _ in range(size)]
        full: list[Messages] = []
        beginnings = [""] * size
        if self.openings:
            chosen: list[int] = torch.randint(len(self.openings), (size,), generator=generator).tolist()
            beginnings = [self.openings[i] for i in chosen]
        for _ in range(self.turns):
            for role, sampling, limit in self.roles:
                prompts = [self._prompt(*pair, role) for pair in zip(conversations, beginnings, strict=True)]
                written = self._generate(prompts, limit, sampling, generator)
                full += [messages for messages, (row, _) in zip(conversations, written, strict=True) if not row]
                continued = []
                for messages, opening, (row, draw) in zip(conversations, beginnings, written, strict=True):
                    if row and (message := self._message(role, opening, row)):
                        known = {"drawn": draw.values()} if role == "assistant" and draw else {}
                        continued.append([*messages, message | known])
                conversations, beginnings = continued, [""] * len(continued)
                if not conversations:
                    break
        answered = (messages[: len(messages) // 2 * 2] for messages in full)
        return conversations + [messages for messages in answered if messages]

    def _generate(
        self, prompts: list[list[int]], limit: int, sampling: Sampling, generator: torch.Generator
    ) -> list[tuple[list[int], Draw | None]]:
        """Each prompt's new tokens, as many as the target's context has room for, and how they were drawn."""
        rooms = [self.target.spec.context - len(prompt) for prompt in prompts]
        rows = [row for row, room in enumerate(rooms) if room > 0]
        if not rows:
            return [([], None) for _ in prompts]
        asked, limits = [prompts[row] for row in rows], [min(limit, rooms[row]) for row in rows]
        texts = dict(
            zip(rows, self.loop.generate(asked, limits, self.target.chat.stops, sampling, generator), strict=True)
        )
        draws = dict(zip(rows, self.loop.sampler.draws, strict=False))
        return [(texts.get(row, []), draws.get(row)) for row in range(len(prompts))]

    def _prompt(self, messages: list[dict], opening: str, role: str) -> list[int]:
        """Tokens of the template up to the place where `role` continues the opening."""
        if role == "assistant":
            return self.target.chat.prompt(messages)
        return self.target.chat.user_prompt(messages, opening)

    def _message(self, role: str, opening: str, tokens: list[int]) -> Message | None:
        """What `role` wrote behind an opening; None where it is empty, or has special tokens inside."""
        chat = self.target.chat
        if not chat.is_plain(tokens):
            return None
        message = chat.message(tokens)
        if role == "user":
            message = {"role": role, "content": (opening + message["content"]).strip()}
        return message if message["content"].strip() else None
