"""`poss answer`: the target's own greedy answers to prompts of yours, as a corpus.

A draft should learn, and be replayed on, what its target says; others' answers to the same prompts are not that.
"""

import hashlib
import json
from functools import partial

import torch
from tqdm import tqdm

from poss_lightning.corpus.writer import CorpusWriter, Messages
from poss_lightning.evaluation.suites import Question, read_suites
from poss_lightning.target.generation import generate
from poss_lightning.target.model import Target


def answer(
    out: str,
    suites: list[str] | None = None,
    target: str = "embedded",
    limit: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Let the target answer suites of prompts, turn by turn, as (compressed) JSON lines of chat messages.

    Conversations are named SUITE/ID. A killed run goes on where it stopped when the command is given again.

    Args:
        out: file to write, `.jsonl` or `.jsonl.gz`.
        suites: prompts, as `poss benchmark` takes them; the project's own by default.
        target: "embedded", a local folder or a hub id.
        limit: the first so many questions of each suite.
        max_new_tokens: an answer is cut there.
        batch_size: conversations answered side by side.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    given = dict(locals())
    for name in ("max_new_tokens", "batch_size"):
        if given[name] < 1:
            raise ValueError(f"{name} is {given[name]}; it must be at least 1")
    corpus, questions = CorpusWriter(out), read_suites(suites, limit)
    model = Target.load(target, dtype, device)
    names = [f"{question.suite}/{question.id}" for question in questions]
    asked = hashlib.sha256(json.dumps([question.turns for question in questions]).encode()).hexdigest()[:16]
    settings = {name: given[name] for name in ("target", "max_new_tokens", "batch_size")}
    own = {"dtype": model.dtype_name, "questions": names, "asked": asked, "fingerprint": model.spec.fingerprint}
    corpus.claim(settings | own)
    conversations: list[Messages] = []
    with tqdm(total=len(questions), unit="conversation", desc="answer") as bar:
        for number, start in enumerate(range(0, len(questions), batch_size)):
            some = questions[start : start + batch_size]
            conversations += corpus.batch(number, partial(_answered, model, some, max_new_tokens))
            bar.update(len(some))
    kept = [(name, messages) for name, messages in zip(names, conversations, strict=True) if messages]
    corpus.finish({"id": name, "messages": messages} for name, messages in kept)
    if left_out := len(names) - len(kept):
        print(f"{out}: {left_out} of {len(names)} questions are left out: the target says nothing, or has no room to")


@torch.inference_mode()
def _answered(target: Target, questions: list[Question], max_new_tokens: int) -> list[Messages]:
    """A conversation a question; it ends before an answer that is empty or for which there is no room."""
    conversations: list[Messages] = [[] for _ in questions]
    going = list(range(len(questions)))
    for turn in range(max(len(question.turns) for question in questions)):
        asked = {
            row: [*conversations[row], {"role": "user", "content": questions[row].turns[turn]}]
            for row in going
            if turn < len(questions[row].turns)
        }
        prompts = {row: target.chat.prompt(messages) for row, messages in asked.items()}
        going = [row for row, prompt in prompts.items() if len(prompt) + max_new_tokens < target.spec.context]
        if not going:
            break
        tokens = generate(target, [prompts[row] for row in going], max_new_tokens, target.chat.stops)
        texts = dict(zip(going, map(target.chat.text, tokens), strict=True))
        going = [row for row, text in texts.items() if text.strip()]
        for row in going:
            conversations[row] = [*asked[row], {"role": "assistant", "content": texts[row]}]
    return conversations
