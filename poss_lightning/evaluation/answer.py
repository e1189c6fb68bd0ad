"""`poss answer`: the target's own greedy answers to prompts of yours, as a corpus.

A draft should learn from, and be replayed on, its target's own answers; others' answers to the same prompts differ.
An answer is kept as the tokens that were written: its text alone would be tokenised, and its turn closed, anew.
"""

import hashlib
import json
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.readers import report_left_out
from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.evaluation.suites import Question, read_suites
from poss_lightning.ranges import Count, Rows, Tokens, check_numbers
from poss_lightning.target.generation import PlainLoop
from poss_lightning.target.model import Target
from poss_lightning.target.placement import Parallel


@check_numbers
def answer(
    out: str,
    *,
    suites: list[str] | str | None = None,
    target: str = "embedded",
    limit: Count | None = None,
    max_new_tokens: Tokens = 256,
    chat_template_kwargs: dict[str, Any] | None = None,
    strict: bool = False,
    batch_size: Rows = 32,
    dtype: str = "auto",
    device: str = "auto",
    parallel: Parallel = "none",
) -> None:
    """Let the target answer suites of prompts, turn by turn, and write (compressed) JSON lines of chat messages.

    Conversations are named SUITE/ID. If a run is killed, give the same command again: it goes on where it stopped.

    Args:
        out: file to write, `.jsonl` or `.jsonl.gz`.
        suites: prompts, as for `poss benchmark`; the project's own by default.
        target: "embedded", a local folder or a hub id.
        limit: answer only the first questions of each suite, this many.
        max_new_tokens: most tokens of an answer; a longer one is cut.
        chat_template_kwargs: variables of the target's chat template, as '{"enable_thinking": false}'.
        strict: a malformed question, or one that the chat template refuses, is an error; otherwise one is left out,
            counted and named, up to a tenth of them.
        batch_size: conversations that are answered side by side.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        parallel: none, where the target fits one device; layers spreads it over all GPUs of this process.
    """
    corpus, read = CorpusWriter(out), read_suites(suites, limit, strict)
    model = Target.load(target, dtype, device, parallel, chat_template_kwargs=chat_template_kwargs)
    model.chat.template.freeze(corpus.work.settings.get("chat_template_kwargs", {}))
    asked, lengths = _first_prompts(model, read, strict)
    _check_room(model, min(lengths), max_new_tokens)
    # Side by side, each pays for the longest. Longest first: what does not fit the memory shows at once.
    order = sorted(range(len(asked)), key=lambda place: lengths[place], reverse=True)
    questions = [asked[place] for place in order]
    names = [f"{question.suite}/{question.id}" for question in questions]
    said = [[question.opening, question.turns, question.template] for question in questions]
    turns = hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:16]
    settings = {"target": target, "max_new_tokens": max_new_tokens, "batch_size": batch_size, "questions": names}
    settings |= {"turns": turns, "dtype": model.dtype_name, "fingerprint": model.spec.fingerprint}
    settings |= {"chat_template_kwargs": model.chat.template.variables}
    with corpus.claim(settings):
        conversations, loop = [], PlainLoop(model)
        with tqdm(total=len(questions), unit="conversation", desc="answer") as bar:
            for number, start in enumerate(range(0, len(questions), batch_size)):
                batch = questions[start : start + batch_size]
                conversations += corpus.batch(number, partial(_answer_questions, loop, batch, max_new_tokens))
                bar.update(len(batch))
        answered = sorted(zip(order, questions, conversations, strict=True), key=lambda one: one[0])
        kept = [(question, messages) for _, question, messages in answered if messages]
        if not kept:
            corpus.work.clear()
            raise ValueError(f"every answer to the {len(names)} questions is empty")
        corpus.finish(_record(question, messages, model) for question, messages in kept)
        if left_out := len(names) - len(kept):
            why = "the answer is empty, or the context has no room for it"
            print(f"{out}: {left_out} of {len(names)} questions are left out: {why}")


def _first_prompts(target: Target, questions: list[Question], strict: bool) -> tuple[list[Question], list[int]]:
    """The questions that the chat template takes, and the lengths of their first prompts."""
    asked, lengths, refused = [], [], []
    for question in questions:
        try:
            prompt = target.chat.prompt(question.first, question.template)
            target.check_tokens(prompt, "its prompt")
            lengths.append(len(prompt))
            asked.append(question)
        except ValueError as error:
            refused.append(f"question {question.id} of {question.suite}: {error}")
    report_left_out("{} questions that the target cannot read", refused, len(questions), strict)
    return asked, lengths


def _record(question: Question, messages: Messages, target: Target) -> dict[str, Any]:
    """A line of the corpus, with what the chat template was given."""
    given = {name: value for name, value in question.template.items() if name != "tools"}
    variables = target.chat.template.variables | given
    record = {"id": f"{question.suite}/{question.id}", "messages": messages}
    record |= {"tools": question.template["tools"]} if "tools" in question.template else {}
    return record | ({"chat_template_kwargs": variables} if variables else {})


def _check_room(target: Target, least: int, max_new_tokens: int) -> None:
    """Raise ValueError where not even a prompt of `least` tokens leaves the context room for an answer."""
    if least + max_new_tokens >= (context := target.spec.context):
        most = f"at most {context - least - 1}" if least < context - 1 else "shorter prompts"
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, and no prompt leaves room for it: {target.spec.name} reads {context} "
            f"tokens, and the shortest prompt has {least}; give {most}"
        )


@torch.inference_mode()
def _answer_questions(loop: PlainLoop, questions: list[Question], max_new_tokens: int) -> list[Messages]:
    """A conversation a question.

    It ends before an answer that is empty or does not fit the context, and with one that has special tokens inside: how
    the target would read these as a part of the chat, nobody knows.
    """
    chat, context = loop.target.chat, loop.target.spec.context
    conversations: list[Messages] = [[] for _ in questions]
    unfinished = list(range(len(questions)))
    for turn in range(max(len(question.turns) for question in questions)):
        asked = {
            row: [
                *(conversations[row] or questions[row].opening),
                {"role": "user", "content": questions[row].turns[turn]},
            ]
            for row in unfinished
            if turn < len(questions[row].turns)
        }
        prompts = {row: chat.prompt(messages, questions[row].template) for row, messages in asked.items()}
        fitting = [row for row, prompt in prompts.items() if len(prompt) + max_new_tokens < context]
        if not fitting:
            break
        written = loop.generate([prompts[row] for row in fitting], max_new_tokens, chat.stops)
        unfinished = []
        for row, tokens in zip(fitting, written, strict=True):
            answer = chat.message(tokens)
            if answer["content"].strip():
                conversations[row] = [*asked[row], answer]
                unfinished += [row] if chat.is_plain(tokens) else []
    return conversations
