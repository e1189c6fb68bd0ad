"""Conversations that the target writes: `poss synthesize`."""

from typing import Any

from poss_lightning.corpus.dialogues import read_openings, write_dialogues
from poss_lightning.corpus.writer import CorpusWriter
from poss_lightning.evaluation.answers import answer_questions
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.ranges import Count, Rows, Seed, Temperature, Tokens, TopP, check_numbers
from poss_lightning.sampling import Sampling
from poss_lightning.target.model import Target
from poss_lightning.target.placement import Parallel

CONVERSATIONS, DIALOGUES, ANSWERS = 2000, 128, 32  # written by default; side by side, without and with prompts
MAY_DIFFER = ("out", "prompts", "conversations", "device", "parallel", "strict")  # in which a resumed run may differ


@check_numbers
def synthesize(
    out: str,
    *,
    target: str = "embedded",
    prompts: list[str] | str | None = None,
    conversations: Count | None = None,
    turns: Count = 1,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.95,
    answer_temperature: Temperature = 0.0,
    user_tokens: Tokens = 96,
    answer_tokens: Tokens = 256,
    chat_template_kwargs: dict[str, Any] | None = None,
    strict: bool = False,
    batch_size: Rows | None = None,
    openings: str | None = None,
    seed: Seed = 0,
    dtype: str = "auto",
    device: str = "auto",
    parallel: Parallel = "none",
) -> None:
    """Let the target answer prompts, or write whole conversations, as (compressed) JSON lines of chat messages.

    A draft learns best from its target's own answers. With `--prompts` the target answers these, turn by turn, in
    conversations named SUITE/ID. Without, it writes the user's messages too.

    If a run is killed, give the same command again: it resumes, and ends with the same file.

    Args:
        out: file to write, `.jsonl` or `.jsonl.gz`.
        target: "embedded", a local folder or a hub id.
        prompts: files, folders or suites of prompts, as for `poss benchmark --suites`. `hub:OWNER/NAME?split=train`
            names the split of a data set; by default it is `test`, else `validation`, else the only one.
        conversations: how many to write, 2000 by default; with prompts, how many of each suite, by default all, but 80
            of each of the papers' six.
        turns: user messages of a conversation; a prompt has its own number.
        temperature: sampling temperature of the user's messages.
        top_p: sample among the most likely tokens that hold this probability. 1 is fastest, as it sorts no tokens.
        answer_temperature: sampling temperature of the answers; 0 is greedy. A small target with greedy answers repeats
            itself, and a draft learns little from repetitions.
        user_tokens: most tokens of a user's message; a longer one is cut.
        answer_tokens: most tokens of an answer; a longer one is cut, which harms no draft.
        chat_template_kwargs: variables of the target's chat template, as '{"enable_thinking": false}'.
        strict: treat a malformed prompt, or one that the chat template refuses, as an error; otherwise such prompts
            are left out, counted and named, up to a tenth of all.
        batch_size: conversations that are written side by side; 128 by default, with prompts 32.
        openings: file with one text per line; each first message begins with one of them, chosen by the seed. Messages
            that a target begins itself are less varied than those of users.
        seed: the same seed, target and machine give the same file.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        parallel: none if the target fits on one device; layers spreads it over all GPUs of this process.
    """
    batch_size = batch_size or (DIALOGUES if prompts is None else ANSWERS)
    options = {name: value for name, value in locals().items() if name not in MAY_DIFFER}
    if not temperature:
        raise ValueError(f"temperature is {temperature}; it must be above 0, or every message is the same")
    user, answer = Sampling(temperature, top_p=top_p), Sampling(answer_temperature, top_p=top_p)
    corpus, first_words = CorpusWriter(out), read_openings(openings)
    questions = [] if prompts is None else read_suites(prompts, conversations, strict, hub_limit=None)
    model = Target.load(target, dtype, device, parallel, chat_template_kwargs=chat_template_kwargs)
    template = model.chat.template
    settings = options | {"dtype": model.dtype_name, "openings": first_words, "fingerprint": model.spec.fingerprint}
    settings |= {"chat_template_kwargs": template.variables}
    template.freeze(corpus.work.settings.get("chat_template_kwargs", {}))
    written = {"answer": (answer, answer_tokens), "batch_size": batch_size, "seed": seed, "settings": settings}
    if prompts is not None:
        return answer_questions(corpus, model, questions, strict=strict, **written)
    many = CONVERSATIONS if conversations is None else conversations
    write_dialogues(corpus, model, many, turns, user=(user, user_tokens), openings=first_words, **written)
