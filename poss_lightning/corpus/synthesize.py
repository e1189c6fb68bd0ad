"""The target writes its own conversations: it samples a user's message, then answers it.

A draft should learn from its target's own answers, and this makes them. Nothing is downloaded.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.ranges import Count, Rows, Seed, Temperature, Tokens, TopP, check_numbers
from poss_lightning.sampling import Draw, Sampling
from poss_lightning.target.generation import PlainLoop
from poss_lightning.target.model import Target
from poss_lightning.target.placement import Parallel
from poss_lightning.target.template import Message

_PATIENCE = 10  # batches in a row without a new conversation, after which it gives up


@check_numbers
def synthesize(
    out: str,
    *,
    target: str = "embedded",
    conversations: Count = 2000,
    turns: Count = 1,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.95,
    answer_temperature: Temperature = 0.0,
    user_tokens: Tokens = 96,
    answer_tokens: Tokens = 256,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: Rows = 128,
    openings: str | None = None,
    seed: Seed = 0,
    dtype: str = "auto",
    device: str = "auto",
    parallel: Parallel = "none",
) -> None:
    """Let the target write conversations with itself, as (compressed) JSON lines of chat messages.

    If a run is killed, give the same command again: it goes on where it stopped, and ends with the same file.

    Args:
        out: file to write, `.jsonl` or `.jsonl.gz`.
        target: "embedded", a local folder or a hub id.
        conversations: how many to write.
        turns: user messages in a conversation.
        temperature: of the user's messages.
        top_p: sample among the likeliest tokens that hold this probability. 1 is the fastest, as tokens need not be
            sorted.
        answer_temperature: of the answers; 0 is greedy. A small target with greedy answers repeats itself, and a draft
            learns little from repetitions.
        user_tokens: most tokens of a user's message; a longer one is cut.
        answer_tokens: most tokens of an answer; a longer one is cut, which harms no draft.
        chat_template_kwargs: variables of the target's chat template, as '{"enable_thinking": false}'.
        batch_size: conversations that are written side by side.
        openings: file of texts, one a line; each first message begins with one of them, chosen by the seed. Messages
            that a target begins itself are less varied than those of users.
        seed: the same seed, target and machine give the same file.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        parallel: none, where the target fits one device; layers spreads it over all GPUs of this process.
    """
    options = dict(locals())
    if not temperature:
        raise ValueError(f"temperature is {temperature}; it must be above 0, or every message is the same")
    user, answer = Sampling(temperature, top_p=top_p), Sampling(answer_temperature, top_p=top_p)
    corpus, first_words = CorpusWriter(out), _read_openings(openings)
    model = Target.load(target, dtype, device, parallel, chat_template_kwargs=chat_template_kwargs)
    variables = model.chat.template.variables
    model.chat.template.freeze(corpus.work.settings.get("chat_template_kwargs", {}))
    writer = _Writer(model, turns, user=(user, user_tokens), answer=(answer, answer_tokens), openings=first_words)
    unlike = ("out", "conversations", "device", "parallel")  # in which the same corpus may be written
    settings = {name: value for name, value in options.items() if name not in unlike}
    settings |= {"dtype": model.dtype_name, "openings": first_words, "fingerprint": model.spec.fingerprint}
    settings |= {"chat_template_kwargs": variables}
    given = {"chat_template_kwargs": variables} if variables else {}
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


def _read_openings(file: str | None) -> list[str]:
    """The lines of the file that are not blank, one at least."""
    if file is None:
        return []
    if not Path(file).is_file():
        raise FileNotFoundError(f"openings {file}: no such file; it must hold a text a line")
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # a mark of the encoding is no text
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
        user: tuple[Sampling, int],  # how its tokens are chosen, and how many at most
        answer: tuple[Sampling, int],
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
        texts: list[list[int]] = [[] for _ in prompts]
        if not rows:
            return [(text, None) for text in texts]
        limits = [min(limit, rooms[row]) for row in rows]
        asked = [prompts[row] for row in rows]
        for tokens in self.loop.steps(asked, limits, self.target.chat.stops, sampling, generator):
            for place, token in tokens.items():
                texts[rows[place]].append(token)
        draws = dict(zip(rows, self.loop.sampler.draws, strict=False))
        return [(text, draws.get(row)) for row, text in enumerate(texts)]

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
