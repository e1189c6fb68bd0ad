"""`poss benchmark`: decode suites with several methods, which take turns, and record every answer."""

import hashlib
import logging
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from poss_lightning.decoding.autoregressive import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoder, new_token_limits
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.decoding.plans import Plan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.provenance import describe_method
from poss_lightning.evaluation.record import record
from poss_lightning.evaluation.rounds import BASELINES, PLAIN, RUN, RUN_FILES, AnswerRow, check_method_names
from poss_lightning.evaluation.streaming import pieces_of
from poss_lightning.evaluation.suites import Question, digest, read_suites
from poss_lightning.files import check_folder, read_json
from poss_lightning.ranges import Count, Lookups, Seed, Temperature, Tokens, TopK, TopP, check_numbers
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target.graphs import Graphs
from poss_lightning.target.model import Target
from poss_lightning.target.placement import Parallel

logger = logging.getLogger(__name__)


@check_numbers
def benchmark(
    out: str,
    *,
    drafts: dict[str, str] | None = None,
    target: str = "embedded",
    suites: list[str] | str | None = None,
    limit: Count | None = None,
    max_new_tokens: Tokens = 128,
    tree: Literal["fixed", "auto"] = "fixed",
    lookup: Lookups = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
    baselines: list[Literal["plain", "generate", "lookup"]] | None = None,
    repeats: Count = 1,
    graphs: bool | None = None,
    dtype: str = "auto",
    device: str = "auto",
    parallel: Parallel = "none",
    exact: bool | None = None,
    **plan: Any,
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
        target: "embedded", a local folder or a hub id.
        suites: files or folders of JSON lines, the project's own by name, or `hub:mt_bench` and the like, which
            `poss list` shows; all of the project's own by default.
        limit: decode at most this many questions of each suite, the first; by default all of a file, and 80 of most
            data sets of the hub.
        max_new_tokens: most tokens of an answer.
        tree: fixed, or auto: chosen for the most tokens per second, within depth and nodes.
        lookup: decode with each draft once more, as `NAME+lookup`: up to this many tokens that followed the same words
            earlier in the text join its trees; 0 for no such methods.
        temperature: sampling temperature; 0 is greedy. Drafts and our own loop draw alike.
        top_k: sample among the k most likely tokens; 0 for all.
        top_p: sample among the most likely tokens that hold this probability.
        seed: seed of sampling.
        chat_template_kwargs: variables of the target's chat template, as '{"enable_thinking": false}'.
        baselines: besides `plain` (our own loop), which gives the target's own answer: `generate` (transformers'), the
            default, and `lookup` (our loop with 10 looked-up tokens and no draft).
        repeats: how often each answer is decoded.
        graphs: run the steps of drafts and of our own loop as CUDA graphs; by default on CUDA.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        parallel: none, where the target fits one device; layers spreads it over all GPUs of this process.
        exact: draft the tokens of plain decoding, bit for bit, in any dtype; by default on a CPU where a trial agrees.
        **plan: sizes of trees; see `Plan`.
    """
    suites = [suites] if isinstance(suites, str) else suites
    config = {name: value for name, value in dict(locals()).items() if name not in ("out", "drafts", "plan")}
    sizes = Plan(lookup=lookup, **plan)
    check_folder(out, *RUN_FILES)
    drafts = drafts or {}
    check_method_names(drafts)
    loaded = {name: load_draft(folder) for name, folder in drafts.items()}
    sampling = Sampling(temperature, top_k, top_p)
    questions = read_suites(suites, limit)
    model = Target.load(target, dtype, device, parallel, chat_template_kwargs=chat_template_kwargs, exact=exact)
    earlier = read_json(note) if (note := Path(out, RUN)).is_file() else {}
    model.chat.template.freeze(earlier.get("config", {}).get("chat_template_kwargs") or {})
    for question in questions:  # a prompt that is too long is refused before anything is written
        try:
            new_token_limits(model, [question.first_prompt(model.chat)], limit=1)
        except ValueError as error:
            raise ValueError(f"{question}, turn 0: {error}") from error
    graphs = Graphs(model.device, graphs, model.has_graphs).enabled  # then one that fails is an error
    lookups = Speculative.from_draft(model, None, Plan(lookup=DEFAULT_LOOKUP), graphs=graphs)
    known = {PLAIN: Autoregressive(model, graphs), "generate": Generate(model), "lookup": lookups}
    beside = ["generate"] if baselines is None else baselines
    methods: dict[str, Decoder] = {name: known[name] for name in dict.fromkeys([PLAIN, *beside])}
    for (name, draft), count in product(loaded.items(), [0, lookup] if lookup else [0]):
        method = f"{name}+lookup" if count else name
        try:
            methods[method] = Speculative.from_draft(model, draft, replace(sizes, lookup=count), tree, graphs)
        except ValueError as error:
            raise ValueError(f"draft {drafts[name]}: {error}") from error
    config |= {
        **asdict(sizes),
        "chat_template_kwargs": model.chat.template.variables or None,
        "graphs": graphs,
        "dtype": model.dtype_name,
        "exact": model.exact,
        "device": str(model.device),
        "fingerprint": model.spec.fingerprint,
        "questions": digest(questions),
    }
    facts = {
        "command": sys.argv,
        "config": config,
        "drafts": drafts,
        "methods": {name: describe_method(method) for name, method in methods.items()},
        "suites": {question.suite: question.source for question in questions},
    }
    decode = partial(decode_question, model, methods, repeats=repeats, seed=seed, limit=max_new_tokens)
    parts = {f"question-{i:05d}": partial(decode, each, sampling=sampling) for i, each in enumerate(questions)}
    first = questions[0].first_prompt(model.chat)
    record(Path(out), facts, parts, model.device, begin=partial(_warm_up, methods, first, max_new_tokens, sampling))


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
            place, answers = f"{seed} {question.suite} {question.id} {turn} {repeat}", {}
            own_seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:6])  # the same for all methods
            for name in random.Random(own_seed).sample(names, len(names)):
                generator = torch.Generator().manual_seed(own_seed)
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
                    pieces=pieces_of(chat.text, decoded.tokens),
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


def _warm_up(methods: Mapping[str, Decoder], prompt: list[int], limit: int, sampling: Sampling) -> None:
    """Decode a few tokens with every method."""
    for method in methods.values():
        method.decode([prompt], min(limit, 16), sampling=sampling, generator=torch.Generator())
