"""Conversations that the target writes by itself: it samples a user's message, then answers it.

A draft learns best from its target's own answers, and this needs no data.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.sampling_record import last_draws
from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.chat import Chat
from poss_lightning.target_model.generation import PlainDecoder
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.template import Message

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
        corpus: to write.
        target: writes the messages.
        conversations: how many.
        turns: user messages in each.
        user: how a user's tokens are chosen, and how many at most.
        answer: the same for an answer.
        openings: each first message begins with one of them.
        batch_size: conversations side by side.
        seed: of all sampling.
        settings: what the conversations depend on.

    Raises:
        ValueError: they do not fit the target's context, or it writes nothing new.
    """
    if turns * (user[1] + answer[1]) >= target.spec.context:
        raise ValueError(
            f"{turns} turns of {user[1]} + {answer[1]} tokens do not fit the {target.spec.context} that "
            f"{target.spec.name} reads: lower turns, user_tokens or answer_tokens"
        )
    write = partial(_write_batch, PlainDecoder(target), turns, user, answer, openings, batch_size)
    variables = settings["chat_template_kwargs"]
    template = {"chat_template_kwargs": variables} if variables else {}
    with corpus.claim(settings):
        records = (record | template for record in islice(_records(corpus, write, seed), conversations))
        corpus.finish(list(tqdm(records, total=conversations, unit="conversation", desc="synthesize")))


def read_openings(file: str | None) -> list[str]:
    """Read the non-blank lines of a text file; ValueError if there are none."""
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"openings {file} is not UTF-8 text: {error}") from None
    if not (openings := [line for line in lines if line.strip()]):
        raise ValueError(f"openings {file} is empty; it must hold one text per line")
    return openings


def _records(corpus: CorpusWriter, write: "partial[list[Messages]]", seed: int) -> Iterator[dict]:
    """Yield conversations with distinct first messages for as long as the target writes new ones."""
    firsts: set[str] = set()
    without_new = 0  # batches in a row
    for number in count():
        before = len(firsts)
        for messages in corpus.batch(number, partial(write, seed * 1_000_003 + number)):
            if messages[0]["content"] not in firsts:
                yield {"id": f"{seed}-{len(firsts):06d}", "messages": messages}
                firsts.add(messages[0]["content"])
        without_new = 0 if len(firsts) > before else without_new + 1
        if without_new == _PATIENCE:
            corpus.work.clear()
            raise ValueError(
                f"the target wrote no new conversation in {_PATIENCE} batches, after {len(firsts)} of them: "
                + ("ask for fewer" if firsts else "change its tokens, or the openings")
            )


@torch.inference_mode()
def _write_batch(
    loop: PlainDecoder, turns: int, user: Choice, answer: Choice, openings: Sequence[str], size: int, seed: int
) -> list[Messages]:
    """Write `size` conversations; drop those with an empty message or special tokens inside one.

    One that fills the target's context ends with the last answer that has room.
    """
    chat = loop.target.chat
    generator = torch.Generator().manual_seed(seed)
    conversations: list[Messages] = [[] for _ in range(size)]
    full: list[Messages] = []
    chosen: list[int] = torch.randint(len(openings), (size,), generator=generator).tolist() if openings else []
    beginnings = [openings[i] for i in chosen] or [""] * size
    for role, choice in (("user", user), ("assistant", answer)) * turns:
        if role == "user":
            prompts = [chat.user_prompt(*pair) for pair in zip(conversations, beginnings, strict=True)]
        else:
            prompts = [chat.prompt(messages) for messages in conversations]
        continued: list[Messages] = []
        for messages, opening, written in zip(
            conversations, beginnings, write_turn(loop, prompts, choice, generator, size), strict=True
        ):
            if written is None:
                full.append(messages)
            elif message := _message(chat, role, opening, written):
                continued.append([*messages, message])
        conversations, beginnings = continued, [""] * len(continued)
    answered = (messages[: len(messages) // 2 * 2] for messages in full)
    return conversations + [messages for messages in answered if messages]


def write_turn(
    loop: PlainDecoder, prompts: list[list[int]], choice: Choice, generator: torch.Generator, size: int
) -> list[Message | None]:
    """Write the answer to each prompt, cut where the target's context is full; None where there is no room for any.

    Up to `size` are written side by side.
    """
    target, (sampling, limit) = loop.target, choice
    rooms = [target.spec.context - len(prompt) for prompt in prompts]
    rows = [row for row, room in enumerate(rooms) if room > 0]
    limits, fitting = [min(limit, rooms[row]) for row in rows], [prompts[row] for row in rows]
    texts = loop.generate(fitting, limits, target.chat.stops, sampling, generator, size) if rows else []
    answers: list[Message | None] = [None] * len(prompts)
    for row, tokens, draw in zip(rows, texts, last_draws(loop.sampler, len(rows)), strict=True):
        answers[row] = target.chat.message(tokens) | ({"drawn": draw.values()} if draw else {})
    return answers


def _message(chat: Chat, role: str, opening: str, written: Message) -> Message | None:
    """Return what `role` wrote after an opening, or None if it is empty or has special tokens inside."""
    text = (opening if role == "user" else "") + written["content"]
    if not text.strip() or not chat.is_plain(written["tokens"]):
        return None
    return {"role": role, "content": text.strip()} if role == "user" else written
