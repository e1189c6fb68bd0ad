"""`poss benchmark`: decode suites with several methods, which take turns, and record every answer."""

import hashlib
import logging
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from poss_lightning.decoding.baselines import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoder, new_token_limits
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.options import DecodingOptions
from poss_lightning.evaluation.provenance import describe_method
from poss_lightning.evaluation.record import record
from poss_lightning.evaluation.rounds import BASELINES, PLAIN, RUN, RUN_FILES, AnswerRow, check_method_names
from poss_lightning.evaluation.streaming import text_per_token
from poss_lightning.evaluation.suites import Question, digest, read_suites
from poss_lightning.files import check_folder, read_json
from poss_lightning.ranges import Count, Lookups, Tokens, check_numbers
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target_model.graphs import Graphs
from poss_lightning.target_model.model import Target

logger = logging.getLogger(__name__)


@check_numbers
def benchmark(
    out: str,
    *,
    drafts: dict[str, str] | None = None,
    suites: list[str] | str | None = None,
    limit: Count | None = None,
    max_new_tokens: Tokens = 128,
    lookup: Lookups = 0,
    baselines: list[Literal["plain", "generate", "lookup"]] | None = None,
    repeats: Count = 1,
    graphs: bool | None = None,
    **decoding: Any,
) -> None:
    """Decode suites of prompts with every method and write rounds.parquet, answers.parquet and run.json.

    Every method is warmed up. Then the methods take turns prompt by prompt, in an order that is drawn for each answer
    from the seed. All methods get the same context: a later turn of a conversation follows the target's own answers to
    the earlier turns. A conversation ends where the target's context is full. If a run is killed, give the same command
    again on the same machine and device with the same number of threads: it resumes with the first unfinished question.

    Args:
        out: folder to write.
        drafts: name and draft (folder, hub id or shipped draft) of each method, e.g. --drafts.hass
            runs/hass/draft-best.
        suites: files or folders of JSON lines, the project's own by name, or `hub:mt_bench` and the like, which
            `poss list` shows; all of the project's own by default.
        limit: decode at most this many questions of each suite, the first; by default all of a file, and 80 of most
            data sets of the hub.
        max_new_tokens: most tokens of an answer.
        lookup: decode with each draft once more, as `NAME+lookup`: up to this many tokens that followed the same words
            earlier in the text join its trees; 0 for no such methods.
        baselines: besides `plain` (our own loop), which gives the target's own answer: `generate` (transformers'), the
            default, and `lookup` (our loop with 10 looked-up tokens and no draft).
        repeats: how often each answer is decoded.
        graphs: run the steps of drafts and of our own loop as CUDA graphs; by default on CUDA.
        **decoding: target, sizes of trees and sampling; see `DecodingOptions`.
    """
    suites = [suites] if isinstance(suites, str) else suites
    config = {name: value for name, value in dict(locals()).items() if name not in ("out", "drafts", "decoding")}
    options = DecodingOptions(lookup=lookup, **decoding)
    check_folder(out, *RUN_FILES)
    drafts = drafts or {}
    check_method_names(drafts)
    loaded = {name: load_draft(folder) for name, folder in drafts.items()}
    questions = read_suites(suites, limit)
    target = options.load(options.exact)
    earlier = read_json(note) if (note := Path(out, RUN)).is_file() else {}
    target.chat.template.freeze(earlier.get("config", {}).get("chat_template_kwargs") or {})
    for question in questions:  # a prompt that is too long is refused before anything is written
        try:
            new_token_limits(target, [question.first_prompt(target.chat)], limit=1)
        except ValueError as error:
            raise ValueError(f"{question}, turn 0: {error}") from error
    graphs = Graphs(target.device, graphs, target.has_graphs).enabled  # then one that fails is an error
    methods = make_baselines(target, ["generate"] if baselines is None else baselines, graphs)
    for (name, draft), count in product(loaded.items(), [0, lookup] if lookup else [0]):
        plan = replace(options.plan, lookup=count)
        try:
            methods[f"{name}+lookup" if count else name] = Speculative.from_draft(target, draft, plan, graphs)
        except ValueError as error:
            raise ValueError(f"draft {drafts[name]}: {error}") from error
    config |= {
        **asdict(options),
        "chat_template_kwargs": target.chat.template.variables or None,
        "graphs": graphs,
        "dtype": target.dtype_name,
        "exact": target.exact,
        "device": str(target.device),
        "fingerprint": target.spec.fingerprint,
        "questions": digest(questions),
    }
    facts = {
        "command": sys.argv,
        "config": config,
        "drafts": drafts,
        "methods": {name: describe_method(method) for name, method in methods.items()},
        "suites": {question.suite: question.source for question in questions},
    }
    sampling = options.sampling
    decode = partial(
        decode_question, target, methods, repeats=repeats, seed=options.seed, limit=max_new_tokens, sampling=sampling
    )
    parts = {f"question-{i:05d}": partial(decode, each) for i, each in enumerate(questions)}

    def warm_up() -> None:
        for method in methods.values():
            prompt, limit = questions[0].first_prompt(target.chat), min(max_new_tokens, 16)
            method.decode([prompt], limit, sampling=sampling, generator=torch.Generator())

    record(Path(out), facts, parts, target.device, begin=warm_up)


def make_baselines(target: Target, names: Iterable[str], graphs: bool) -> dict[str, Decoder]:
    """Return plain decoding, and the other baselines of these names."""
    lookups = Speculative.from_draft(target, None, TreePlan(lookup=DEFAULT_LOOKUP, tree="fixed"), graphs)
    every = {PLAIN: Autoregressive(target, graphs), "generate": Generate(target), "lookup": lookups}
    return {name: every[name] for name in dict.fromkeys([PLAIN, *names])}


def decode_question(
    target: Target,
    methods: Mapping[str, Decoder],
    question: Question,
    *,
    repeats: int,
    seed: int,
    limit: int,
    sampling: Sampling = GREEDY,
) -> list[AnswerRow]:
    """Return all turns of a question with all methods, in an order drawn for each answer; `plain` gives the context."""
    rows: list[AnswerRow] = []
    messages, names, chat = list(question.opening), list(methods), target.chat
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        prompt = chat.prompt(messages, question.template)
        if turn and len(prompt) >= (context := target.spec.context):  # the first turn was checked
            logger.warning("%s ends before turn %d: %d of %d tokens", question, turn, len(prompt), context)
            break
        for repeat in range(repeats):
            key, answers = f"{seed} {question.suite} {question.id} {turn} {repeat}", {}
            answer_seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6])  # the same for all methods
            for name in random.Random(answer_seed).sample(names, len(names)):
                generator = torch.Generator().manual_seed(answer_seed)
                (decoded,) = methods[name].decode([prompt], limit, sampling=sampling, generator=generator)
                answers[name] = AnswerRow(
                    method=name,
                    suite=question.suite,
                    id=str(question.id),
                    turn=turn,
                    repeat=repeat,
                    prompt_tokens=len(prompt),
                    new_tokens=len(decoded.tokens),
                    accepted=[] if name in BASELINES else decoded.accepted,
                    seconds={part: round(seconds, 6) for part, seconds in decoded.seconds.items()},
                    tokens=decoded.tokens,
                    category=question.category or None,
                    question=text,
                    pieces=text_per_token(chat.text, decoded.tokens),
                )
            rows += [answers[name] for name in names]
        plain = next(row["tokens"] for row in rows if (row["turn"], row["method"]) == (turn, PLAIN))
        if not chat.is_plain(plain) and turn + 1 < len(question.turns):
            logger.warning(
                "%s ends after turn %d: its answer has special tokens, so no message can repeat it", question, turn
            )
            break
        messages.append({"role": "assistant", "content": chat.text(plain)})
    return rows
