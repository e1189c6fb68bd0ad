"""Conversations that the target writes: `poss synthesize`, alone or with prompts.

A draft should learn from its target's own answers, and be replayed on them: text that others wrote is different. An
answer is kept as the tokens that were written: tokenising its text again might give others.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.formats import report_left_out
from poss_lightning.evaluation.suites import Question, digest, read_suites
from poss_lightning.files import atomic, check_file, check_new
from poss_lightning.ranges import Count, PositiveFloat, Rows, Seed, Temperature, Tokens, TopP, check_numbers
from poss_lightning.sampling import Sampling, last_draws
from poss_lightning.target_model.generation import PlainDecoder
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.options import TargetOptions
from poss_lightning.target_model.template import Message
from poss_lightning.work import Work, begun_with

DEFAULT_CONVERSATIONS, NO_LIMIT = 2000, 10**9  # without and with prompts
SEEDS = 1_000_003  # of batches, between two seeds of the user's
DIALOGUE_ROWS, ANSWER_ROWS = 128, 32  # side by side, without and with prompts
BATCHES_PER_PART = 4  # finished together: rows that are free take the next prompts
PATIENCE = 10  # batches in a row without a new conversation, after which it gives up
# Options of messages that the target writes as the user.
UNPROMPTED = ("turns", "user_temperature", "user_tokens", "openings")
RESUMABLE = ("out", "prompts", "conversations", "target", "strict")  # options in which a resumed run may differ
NO_ROOM = "the answer is empty, or {} tokens of context have no room for prompt and answer"
Messages = list[Message]
Choice = tuple[Sampling, int]  # how tokens are chosen, and how many at most
Write = Callable[[int, list[Question]], list[Messages]]  # a numbered batch: a conversation per question


@check_numbers
def synthesize(
    out: str,
    *,
    prompts: list[str] | str | None = None,
    conversations: Count | None = None,
    turns: Count = 1,
    temperature: Temperature = 0.0,
    user_temperature: PositiveFloat = 1.0,
    top_p: TopP = 0.95,
    user_tokens: Tokens = 96,
    answer_tokens: Tokens = 256,
    strict: bool = False,
    batch_size: Rows | None = None,
    openings: str | None = None,
    seed: Seed = 0,
    **target: Any,
) -> None:
    """Let the target answer prompts, or write whole conversations, as (compressed) JSON lines of chat messages.

    A draft learns best from its target's own answers. With `--prompts` the target answers these, turn by turn, in
    conversations named SUITE/ID. Without, it writes the user's messages too.

    If a run is killed, give the same command again: it resumes, and ends with the same file.

    Args:
        out: file to write, `.jsonl` or `.jsonl.gz`.
        prompts: files, folders or suites of prompts, as for `poss benchmark --suites`.
        conversations: how many to write, 2000 by default; with prompts, how many of each suite, by default all.
        turns: user messages of a conversation, at most; a prompt has its own number.
        temperature: sampling temperature of the answers; 0 is greedy. A small target with greedy answers repeats
            itself, and a draft learns little from repetitions.
        user_temperature: sampling temperature of the user's messages; above 0, or every message would be the same.
        top_p: sample among the most likely tokens that hold this probability. 1 is fastest, as it sorts no tokens.
        user_tokens: most tokens of a user's message; a longer one is cut.
        answer_tokens: most tokens of an answer; a longer one is cut, which harms no draft.
        strict: treat a malformed prompt, or one that the chat template refuses, as an error; otherwise such prompts
            are left out, counted and named, up to a tenth of all.
        batch_size: conversations that are written side by side; 128 by default, with prompts 32.
        openings: file with one text per line; each first message begins with one of them, chosen by the seed. Messages
            that a target begins itself are less varied than those of users.
        seed: the same seed, target and machine give the same file.
        **target: which target, and where and in what it computes; see `TargetOptions`.
    """
    batch_size = batch_size or (DIALOGUE_ROWS if prompts is None else ANSWER_ROWS)
    options = {name: value for name, value in locals().items() if name not in RESUMABLE}
    where = TargetOptions(**target)
    for name in UNPROMPTED if prompts is not None else ():
        if options[name] != signature(synthesize).parameters[name].default:
            raise ValueError(f"{name} is {options[name]}; it has no effect with prompts, which are the user's messages")
    check_file(out, ".jsonl", ".jsonl.gz")
    work, first_words = Work(f"{out}.parts", out=out), read_openings(openings)
    if not work.folder.exists():  # with both, an earlier run was killed at its very end
        check_new(out)
    questions = [] if prompts is None else read_suites(prompts, conversations or NO_LIMIT, strict)
    model = where.load()
    template, context = model.chat.template, model.spec.context
    settings = {"target": where.target, **options, "dtype": model.dtype_name, "fingerprint": model.spec.fingerprint}
    settings |= {"openings": first_words, "chat_template_kwargs": template.variables}
    template.freeze(begun_with(work.folder).get("chat_template_kwargs", {}))
    loop, answer = PlainDecoder(model), (Sampling(temperature, top_p=top_p), answer_tokens)
    user = (Sampling(user_temperature, top_p=top_p), user_tokens) if prompts is None else None

    def write(number: int, batch: list[Question]) -> list[Messages]:
        """Return the conversations of a batch, from a killed run or written now."""
        if (written := work.receipt(part := f"{number:06d}")) is None:
            draws = torch.Generator().manual_seed(seed * SEEDS + number)
            work.write_receipt(part, written := _write_batch(loop, batch, user, answer, batch_size, draws))
        return written

    if prompts is None:
        if turns * (user_tokens + answer_tokens) >= context:
            raise ValueError(
                f"{turns} turns of {user_tokens} + {answer_tokens} tokens do not fit the {context} that "
                f"{model.spec.name} reads: lower turns, user_tokens or answer_tokens"
            )
        chooser, total = random.Random(seed), conversations or DEFAULT_CONVERSATIONS
        beginnings = ([chooser.choice(first_words or [""]), *[""] * (turns - 1)] for _ in count())
        records = _new_conversations(model, beginnings, write, batch_size, seed)
        records = islice(tqdm(records, "synthesize", total, unit="conversation"), total)
        why = (
            f"the target wrote no new conversation in {PATIENCE} batches, after {{}} of them: ask for fewer, or change "
        )
        why += "its tokens or the openings"
    else:
        lengths, total = _prompt_lengths(model, questions, strict), 1
        settings["questions"] = digest([questions[i] for i in lengths])
        records = _answers(model, questions, lengths, write, BATCHES_PER_PART * batch_size)
        why = f"all {len(lengths)} questions are left out: {NO_ROOM.format(context)}"
    work.settings = settings
    written = _write_corpus(work, Path(out), records, total, why)
    print(f"{out}: {written} conversations")
    if prompts is not None and written < len(lengths):
        print(f"{out}: {len(lengths) - written} of {len(lengths)} questions are left out: {NO_ROOM.format(context)}")


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


def _write_corpus(work: Work, out: Path, records: Iterable[dict], fewest: int, why: str) -> int:
    """Write the records, and return their number; ValueError with `why` if there are fewer than that."""
    if not begun_with(work.folder):
        if out.exists():
            work.clear()  # an earlier run was killed while it did so
        check_new(out)  # another process may have just finished it
    with work.exclusive(wait=False):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        if len(lines) >= fewest:
            text = "".join(lines).encode()
            with atomic(out) as path:
                path.write_bytes(gzip.compress(text, 9, mtime=0) if out.suffix == ".gz" else text)
        work.clear()
    if len(lines) < fewest:
        raise ValueError(why.format(len(lines)))
    return len(lines)


def _prompt_lengths(target: Target, questions: list[Question], strict: bool) -> dict[int, int]:
    """Return the length in tokens of each question's first prompt, by its number, without those that are refused."""
    lengths, refused = {}, []
    for i, question in enumerate(questions):
        try:
            target.check_tokens(prompt := question.first_prompt(target.chat), "its prompt")
            lengths[i] = len(prompt)
        except ValueError as error:
            refused.append(f"{question}: {error}")
    report_left_out("{} questions that the target cannot read", refused, len(questions), strict)
    return lengths


def _answers(
    target: Target, questions: list[Question], lengths: dict[int, int], write: Write, size: int
) -> Iterator[dict]:
    """Yield records of the target's answers, in the order of the questions, `size` of which are a batch."""
    # Each of a batch costs as much as the longest. The longest go first: what does not fit the memory fails at once.
    order, written = sorted(lengths, key=lambda i: lengths[i], reverse=True), dict[int, Messages]()
    for number, start in enumerate(tqdm(range(0, len(order), size), unit="part", desc="answer")):
        part = order[start : start + size]
        written |= zip(part, write(number, [questions[i] for i in part]), strict=True)
    for i in lengths:
        if written[i]:
            yield _record(target, f"{questions[i].suite}/{questions[i].id}", written[i], questions[i].template)


def _new_conversations(
    target: Target, beginnings: Iterator[list[str]], write: Write, size: int, seed: int
) -> Iterator[dict]:
    """Yield records of conversations with distinct first messages for as long as the target writes new ones.

    `beginnings` are of the user's messages, which the target continues.
    """
    firsts: set[str] = set()
    without_new = 0  # batches in a row
    for number in count():
        before = len(firsts)
        for messages in write(number, [Question("", i, "", turns) for i, turns in enumerate(islice(beginnings, size))]):
            if messages and messages[0]["content"] not in firsts:
                yield _record(target, f"{seed}-{len(firsts):06d}", messages, {})
                firsts.add(messages[0]["content"])
        without_new = 0 if len(firsts) > before else without_new + 1
        if without_new == PATIENCE:
            return


@torch.inference_mode()
def _write_batch(
    loop: PlainDecoder,
    questions: list[Question],
    user: Choice | None,
    answer: Choice,
    size: int,
    generator: torch.Generator,
) -> list[Messages]:
    """Write a conversation per question, up to `size` side by side; an empty one if it has no answer.

    With `user` the target continues the turns of the questions. A conversation ends before a message that is empty or
    has no room in the context. It also ends before a user's message, and with an answer, that has special tokens
    inside, since the target would read these as part of the chat.
    """
    chat = loop.target.chat
    conversations: list[Messages] = [[] for _ in questions]
    unfinished = list(range(len(questions)))
    for turn in range(max(len(question.turns) for question in questions)):
        texts = {row: questions[row].turns[turn] for row in unfinished if turn < len(questions[row].turns)}
        if user:
            prompts = [chat.user_prompt(conversations[row], text) for row, text in texts.items()]
            written = zip(texts, _write_turn(loop, prompts, user, generator, size), strict=True)
            whole = {row: texts[row] + one["content"] for row, one in written if one and chat.is_plain(one["tokens"])}
            texts = {row: text.strip() for row, text in whole.items() if text.strip()}
        asked = {
            row: [*(conversations[row] or questions[row].opening), {"role": "user", "content": text}]
            for row, text in texts.items()
        }
        prompts = [chat.prompt(messages, questions[row].template) for row, messages in asked.items()]
        unfinished = []
        for row, message in zip(asked, _write_turn(loop, prompts, answer, generator, size), strict=True):
            if message and message["content"].strip():
                conversations[row] = [*asked[row], message]
                unfinished += [row] if chat.is_plain(message["tokens"]) else []
    return conversations


def _write_turn(
    loop: PlainDecoder, prompts: list[list[int]], choice: Choice, generator: torch.Generator, size: int
) -> list[Message | None]:
    """Write the message after each prompt, cut where the context is full; None where there is no room for any."""
    target, (sampling, limit) = loop.target, choice
    rooms = [target.spec.context - len(prompt) for prompt in prompts]
    rows = [row for row, room in enumerate(rooms) if room > 0]
    limits, fitting = [min(limit, rooms[row]) for row in rows], [prompts[row] for row in rows]
    texts = loop.generate(fitting, limits, target.chat.stops, sampling, generator, size) if rows else []
    messages: list[Message | None] = [None] * len(prompts)
    for row, tokens, draw in zip(rows, texts, last_draws(loop.sampler, len(rows)), strict=True):
        messages[row] = target.chat.message(tokens) | ({"drawn": draw.values()} if draw else {})
    return messages


def _record(target: Target, name: str, messages: Messages, variables: dict[str, Any]) -> dict:
    """Return a line of the corpus, including what the chat template was given."""
    variables = target.chat.template.variables | variables
    tools = {"tools": variables.pop("tools")} if "tools" in variables else {}
    return {"id": name, "messages": messages, **tools} | ({"chat_template_kwargs": variables} if variables else {})
