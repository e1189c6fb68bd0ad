"""Conversations that the target writes: `poss synthesize`, alone or with prompts.

A draft should learn from its target's own answers, and be replayed on them: text that others wrote is different. An
answer is kept as the tokens that were written: tokenising its text again might give others.
"""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.dialogues import Choice, read_openings, write_dialogues, write_turn
from poss_lightning.corpus.formats import report_left_out
from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.evaluation.suites import Question, digest, read_suites
from poss_lightning.ranges import Count, Rows, Seed, Temperature, Tokens, TopP, check_numbers
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.generation import PlainDecoder
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.options import TargetOptions
from poss_lightning.work import begun_with

DEFAULT_CONVERSATIONS, NO_LIMIT = 2000, 10**9  # without and with prompts
DIALOGUE_ROWS, ANSWER_ROWS = 128, 32  # side by side, without and with prompts
BATCHES_PER_PART = 4  # finished together: rows that are free take the next prompts
# Options of messages that the target writes as the user.
UNPROMPTED = ("turns", "user_temperature", "user_tokens", "openings")
RESUMABLE = ("out", "prompts", "conversations", "target", "strict")  # options in which a resumed run may differ


@check_numbers
def synthesize(
    out: str,
    *,
    prompts: list[str] | str | None = None,
    conversations: Count | None = None,
    turns: Count = 1,
    temperature: Temperature = 0.0,
    user_temperature: Temperature = 1.0,
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
        turns: user messages of a conversation; a prompt has its own number.
        temperature: sampling temperature of the answers; 0 is greedy. A small target with greedy answers repeats
            itself, and a draft learns little from repetitions.
        user_temperature: sampling temperature of the user's messages.
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
    if not user_temperature:
        raise ValueError(f"user_temperature is {user_temperature}; it must be above 0, or every message is the same")
    for name in UNPROMPTED if prompts is not None else ():
        if options[name] != signature(synthesize).parameters[name].default:
            raise ValueError(f"{name} is {options[name]}; it has no effect with prompts, which are the user's messages")
    user, answer = Sampling(user_temperature, top_p=top_p), Sampling(temperature, top_p=top_p)
    corpus, first_words = CorpusWriter(out), read_openings(openings)
    questions = [] if prompts is None else read_suites(prompts, conversations or NO_LIMIT, strict)
    model = where.load()
    template = model.chat.template
    settings = {"target": where.target, **options, "dtype": model.dtype_name, "fingerprint": model.spec.fingerprint}
    settings |= {"openings": first_words, "chat_template_kwargs": template.variables}
    template.freeze(begun_with(corpus.work.folder).get("chat_template_kwargs", {}))
    written = {"answer": (answer, answer_tokens), "batch_size": batch_size, "seed": seed, "settings": settings}
    if prompts is not None:
        return answer_questions(corpus, model, questions, strict=strict, **written)
    write_dialogues(
        corpus,
        model,
        conversations or DEFAULT_CONVERSATIONS,
        turns,
        user=(user, user_tokens),
        openings=first_words,
        **written,
    )


def answer_questions(
    corpus: CorpusWriter,
    target: Target,
    questions: list[Question],
    *,
    answer: Choice,
    batch_size: int,
    seed: int,
    settings: Mapping[str, Any],  # everything else that the conversations depend on
    strict: bool,  # a question that the chat template refuses is an error; otherwise it is left out
) -> None:
    """Write a corpus of the target's answers, in the order of the questions."""
    lengths, refused = {}, []
    for i, question in enumerate(questions):
        try:
            target.check_tokens(prompt := question.first_prompt(target.chat), "its prompt")
            lengths[i] = len(prompt)
        except ValueError as error:
            refused.append(f"{question}: {error}")
    report_left_out("{} questions that the target cannot read", refused, len(questions), strict)
    # Each of a batch costs as much as the longest. The longest go first: what does not fit the memory fails at once.
    order = sorted(lengths, key=lambda i: lengths[i], reverse=True)
    with corpus.claim({**settings, "questions": digest([questions[i] for i in order])}):
        written: dict[int, Messages] = {}
        loop = PlainDecoder(target)
        size = BATCHES_PER_PART * batch_size
        for number, start in enumerate(tqdm(range(0, len(order), size), unit="part", desc="answer")):
            part = order[start : start + size]
            batch, draws = [questions[i] for i in part], seed * 1_000_003 + number
            conversations = corpus.batch(number, partial(_answer_batch, loop, batch, answer, draws, batch_size))
            written |= zip(part, conversations, strict=True)
        records = [_record(questions[i], written[i], target) for i in lengths if written[i]]
        why = f"the answer is empty, or {target.spec.context} tokens of context have no room for prompt and answer"
        if not records:
            corpus.work.clear()
            raise ValueError(f"all {len(order)} questions are left out: {why}")
        corpus.finish(records)
        if left_out := len(order) - len(records):
            print(f"{corpus.out}: {left_out} of {len(order)} questions are left out: {why}")


def _record(question: Question, messages: Messages, target: Target) -> dict[str, Any]:
    """Return a line of the corpus, including what the chat template was given."""
    variables = target.chat.template.variables | question.template
    tools = {"tools": variables.pop("tools")} if "tools" in variables else {}
    record = {"id": f"{question.suite}/{question.id}", "messages": messages, **tools}
    return record | ({"chat_template_kwargs": variables} if variables else {})


@torch.inference_mode()
def _answer_batch(
    loop: PlainDecoder, questions: list[Question], choice: Choice, seed: int, size: int
) -> list[Messages]:
    """Return a conversation per question.

    It ends before an answer that is empty or does not fit the context, and with an answer that has special tokens
    inside, since the target would read these as part of the chat.
    """
    chat = loop.target.chat
    generator = torch.Generator().manual_seed(seed)
    conversations: list[Messages] = [[] for _ in questions]
    unfinished = list(range(len(questions)))
    for turn in range(max(len(question.turns) for question in questions)):
        asked: dict[int, Messages] = {}
        for row in unfinished:
            if turn < len(questions[row].turns):
                text = {"role": "user", "content": questions[row].turns[turn]}
                asked[row] = [*(conversations[row] or questions[row].opening), text]
        prompts = [chat.prompt(messages, questions[row].template) for row, messages in asked.items()]
        unfinished = []
        for row, answer in zip(asked, write_turn(loop, prompts, choice, generator, size), strict=True):
            if answer and answer["content"].strip():
                conversations[row] = [*asked[row], answer]
                unfinished += [row] if chat.is_plain(answer["tokens"]) else []
    return conversations
