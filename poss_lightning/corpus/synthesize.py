"""The target writes its own conversations: it samples a user's message, then answers it.

A draft learns the target's own answers, so this is the data it should see; nothing is downloaded.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch
from tqdm import tqdm

from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.sampling import Sampling
from poss_lightning.target.generation import generate
from poss_lightning.target.model import Target

_MARK = "\u241f user message \u241f"
_PATIENCE = 10  # batches in a row without a new conversation, after which there is little hope


def synthesize(
    out: str,
    target: str = "embedded",
    conversations: int = 2000,
    turns: int = 1,
    temperature: float = 1.0,
    top_p: float = 0.95,
    answer_temperature: float = 0.0,
    user_tokens: int = 96,
    answer_tokens: int = 256,
    batch_size: int = 128,
    openings: str | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Let the target write conversations with itself, as (compressed) JSON lines of chat messages.

    A killed run goes on where it stopped when the command is given again, and ends with the same file.

    Args:
        out: file to write, `.jsonl` or `.jsonl.gz`.
        target: "embedded", a local folder or a hub id.
        conversations: how many to write.
        turns: user messages in a conversation.
        temperature: of the user's messages.
        top_p: of what is sampled. 1 is the fastest: no other needs the tokens in order.
        answer_temperature: of the answers; 0 is greedy. A small target that is greedy repeats itself, and a repetition
            teaches a draft little.
        user_tokens: a user's message is cut there.
        answer_tokens: an answer is cut there; features are the target's own all the same, so it harms no draft.
        batch_size: conversations written side by side.
        openings: file of texts, one a line; each first message begins with one of them, drawn by the seed. What a
            target writes of itself is less varied than what it is asked.
        seed: same seed, target and machine: same file.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    given = dict(locals())
    for name in ("conversations", "turns", "user_tokens", "answer_tokens", "batch_size"):
        if given[name] < 1:
            raise ValueError(f"{name} is {given[name]}; it must be at least 1")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0, or every message is the same")
    user, answer = Sampling(temperature, top_p=top_p), Sampling(answer_temperature, top_p=top_p)
    corpus, first_words = CorpusWriter(out), _lines(openings)
    model = Target.load(target, dtype, device)
    writer = _Writer(model, turns, (user, user_tokens), (answer, answer_tokens), first_words)
    settings = {name: value for name, value in given.items() if name not in ("out", "conversations", "device")}
    own = {"dtype": model.dtype_name, "openings": first_words, "fingerprint": model.spec.fingerprint}
    corpus.claim(settings | own)
    records = islice(_records(corpus, writer, batch_size, seed), conversations)
    corpus.finish(list(tqdm(records, total=conversations, unit="conversation", desc="synthesize")))


def _records(corpus: CorpusWriter, writer: "_Writer", batch_size: int, seed: int) -> Iterator[dict]:
    """Conversations without end, each with a first message of its own.

    Raises:
        ValueError: the target writes nothing new any more.
    """
    known: set[str] = set()
    barren = 0
    for number in count():
        before = len(known)
        for messages in corpus.batch(number, partial(writer.write, batch_size, seed * 1_000_003 + number)):
            if messages[0]["content"] not in known:
                yield {"id": f"{seed}-{len(known):06d}", "messages": messages}
                known.add(messages[0]["content"])
        barren = 0 if len(known) > before else barren + 1
        if barren == _PATIENCE:
            raise ValueError(
                f"the target wrote no new conversation in {_PATIENCE} batches, after {len(known)} of them: ask for fewer"
            )


def _lines(file: str | None) -> list[str]:
    """Its lines that say something.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it has no such line.
    """
    if file is None:
        return []
    if not Path(file).is_file():
        raise FileNotFoundError(f"openings {file}: no such file; it must hold a text a line")
    lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"openings {file} is empty; it must hold a text a line")
    return lines


class _Writer:
    """Writes a batch of conversations side by side."""

    def __init__(
        self,
        target: Target,
        turns: int,
        user: tuple[Sampling, int],  # how it is drawn, and how many tokens at most
        answer: tuple[Sampling, int],
        openings: Sequence[str] = (),
    ):
        if turns * (user[1] + answer[1]) >= target.spec.context:
            raise ValueError(
                f"{turns} turns of {user[1]} + {answer[1]} tokens do not fit the {target.spec.context} that "
                f"{target.spec.name} reads: lower turns, user_tokens or answer_tokens"
            )
        self.target, self.turns, self.openings = target, turns, openings
        self.roles = (("user", *user), ("assistant", *answer))
        self.special = set(target.tokenizer.all_special_ids)

    @torch.inference_mode()
    def write(self, size: int, seed: int) -> list[Messages]:
        """`size` conversations less those thrown away: with an empty message or special tokens inside one."""
        generator = torch.Generator().manual_seed(seed)
        conversations: list[list[dict]] = [[] for _ in range(size)]
        beginnings = [""] * size
        if self.openings:
            drawn = torch.randint(len(self.openings), (size,), generator=generator)
            beginnings = [self.openings[i] for i in drawn.tolist()]
        for _ in range(self.turns):
            for role, sampling, limit in self.roles:
                prompts = [self._open(*opening, role) for opening in zip(conversations, beginnings, strict=True)]
                texts = self._complete(prompts, limit, sampling, generator)
                whole = [
                    None if text is None else (opening + text).strip()
                    for opening, text in zip(beginnings, texts, strict=True)
                ]
                conversations = [
                    [*messages, {"role": role, "content": text}]
                    for messages, text in zip(conversations, whole, strict=True)
                    if text
                ]
                if not conversations:
                    return []
                beginnings = [""] * len(conversations)
        return conversations

    def _open(self, messages: list[dict], opening: str, role: str) -> list[int]:
        """Tokens of the template up to where `role` goes on with the opening."""
        if role == "assistant":
            return self.target.chat.prompt(messages)
        template = self.target.tokenizer.apply_chat_template
        text = template([*messages, {"role": "user", "content": _MARK}], tokenize=False)
        return self.target.tokenizer(text.split(_MARK)[0] + opening, add_special_tokens=False).input_ids

    def _complete(self, prompts: list[list[int]], limit: int, sampling: Sampling, generator) -> list[str | None]:
        """Each prompt's text up to its stop token; None where it is not fit to keep."""
        tokens = generate(self.target, prompts, limit, self.target.chat.stops, sampling, generator)
        return [self._text(row) for row in tokens]

    def _text(self, tokens: list[int]) -> str | None:
        body = tokens[:-1] if tokens[-1] in self.target.chat.stops else tokens
        return None if self.special & set(body) else self.target.chat.text(body)
