"""The target's own answers to prompts, as a corpus: `poss synthesize --prompts`.

A draft should learn from its target's own answers, and be replayed on them; answers of others are different text. An
answer is kept as the tokens that were written: tokenising its text again might give others.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from poss_lightning.corpus.draws import last_draws
from poss_lightning.corpus.formats import report_left_out
from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.evaluation.suites import Question, digest
from poss_lightning.sampling import Sampling
from poss_lightning.target.generation import PlainLoop
from poss_lightning.target.model import Target


def answer_questions(
    corpus: CorpusWriter,
    target: Target,
    questions: list[Question],
    *,
    answer: tuple[Sampling, int],
    batch_size: int,
    seed: int,
    settings: Mapping[str, Any],
    strict: bool,
) -> None:
    """Write a corpus of the target's answers, in the order of the questions.

    Args:
        answer: how the tokens of an answer are chosen, and its most tokens.
        batch_size: conversations side by side.
        settings: everything else that the conversations depend on.
        strict: a question that the chat template refuses is an error; otherwise it is left out.
    """
    lengths = _prompt_lengths(target, questions, strict)
    # Each of a batch costs as much as the longest. The longest go first: what does not fit the memory fails at once.
    order = sorted(lengths, key=lambda place: lengths[place], reverse=True)
    with corpus.claim({**settings, "questions": digest([questions[place] for place in order])}):
        written: dict[int, Messages] = {}
        loop = PlainLoop(target)
        with tqdm(total=len(order), unit="conversation", desc="answer") as bar:
            for number, start in enumerate(range(0, len(order), batch_size)):
                places = order[start : start + batch_size]
                batch, draws = [questions[place] for place in places], seed * 1_000_003 + number
                conversations = corpus.batch(number, partial(_answer_batch, loop, batch, *answer, draws))
                written |= zip(places, conversations, strict=True)
                bar.update(len(batch))
        kept = [_record(questions[place], written[place], target) for place in lengths if written[place]]
        why = f"the answer is empty, or {target.spec.context} tokens of context have no room for prompt and answer"
        if not kept:
            corpus.work.clear()
            raise ValueError(f"all {len(order)} questions are left out: {why}")
        corpus.finish(kept)
        if left_out := len(order) - len(kept):
            print(f"{corpus.out}: {left_out} of {len(order)} questions are left out: {why}")


def _prompt_lengths(target: Target, questions: list[Question], strict: bool) -> dict[int, int]:
    """The length of the first prompt of each question, by its place, without those that the template refuses."""
    lengths, refused = {}, []
    for place, question in enumerate(questions):
        try:
            prompt = question.first_prompt(target.chat)
            target.check_tokens(prompt, "its prompt")
            lengths[place] = len(prompt)
        except ValueError as error:
            refused.append(f"{question}: {error}")
    report_left_out("{} questions that the target cannot read", refused, len(questions), strict)
    return lengths


def _record(question: Question, messages: Messages, target: Target) -> dict[str, Any]:
    """A line of the corpus, including what the chat template was given."""
    given = {name: value for name, value in question.template.items() if name != "tools"}
    variables = target.chat.template.variables | given
    record = {"id": f"{question.suite}/{question.id}", "messages": messages}
    record |= {"tools": question.template["tools"]} if "tools" in question.template else {}
    return record | ({"chat_template_kwargs": variables} if variables else {})


@torch.inference_mode()
def _answer_batch(
    loop: PlainLoop, questions: list[Question], sampling: Sampling, limit: int, seed: int
) -> list[Messages]:
    """A conversation per question.

    It ends before an answer that is empty or does not fit the context, and with an answer that has special tokens
    inside, since the target would read these as part of the chat.
    """
    chat, context = loop.target.chat, loop.target.spec.context
    generator = torch.Generator().manual_seed(seed)
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
        fitting = [row for row, prompt in prompts.items() if len(prompt) + limit < context]
        if not fitting:
            break
        written = loop.generate([prompts[row] for row in fitting], limit, chat.stops, sampling, generator)
        unfinished = []
        draws = last_draws(loop.sampler, len(fitting))
        for row, tokens, draw in zip(fitting, written, draws, strict=True):
            answer: dict[str, Any] = chat.message(tokens) | ({"drawn": draw.values()} if draw else {})
            if answer["content"].strip():
                conversations[row] = [*asked[row], answer]
                unfinished += [row] if chat.is_plain(tokens) else []
    return conversations
