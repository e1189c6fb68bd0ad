"""`poss doctor`: why a draft accepts less than it should."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.corpus.writer import CorpusWriter
from poss_lightning.doctor.files import ForeignDraft, facts, load
from poss_lightning.doctor.measure import (
    SURE,
    Counts,
    above_chance,
    as_read,
    compare,
    read,
    replayed,
    served_counts,
    unrolled,
)
from poss_lightning.doctor.readings import HYPOTHESES, Reading, others
from poss_lightning.evaluation.answers import answer_questions
from poss_lightning.evaluation.suites import Question, digest, read_suites
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.shards import TokenizedText
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.features.writing import tokenize
from poss_lightning.files import check_folder, check_new, sha256
from poss_lightning.interop.checkpoints import write_folder
from poss_lightning.interop.layouts import check_expressible, find_layout
from poss_lightning.interop.settings import publish
from poss_lightning.ranges import Count, Position, Tokens, check_numbers
from poss_lightning.reports.statistics import interval, mean_over
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target.model import Target
from poss_lightning.work import Work

LEAST, MOST = 0.02, 4  # gain in τ above which a cause is named, as a share; causes that are looked for
SOME, FEW = 3, 8  # a third of the texts shows which readings may be better, and an eighth which pairs of them
MEASURED, ANSWERS, CHAIN = "measured", "answers", "chain"
NOTHING = "nothing found: no other reading accepts significantly more than what the files say"
FOREIGN = "not this target's draft, by any reading tried"


@check_numbers
def doctor(
    draft: str,
    target: str = "embedded",
    input_format: Literal["ours", "eagle", "hass", "poss", "eagle3", "speed", "speculators", "dflash"] = "ours",
    allocation: list[Position] | None = None,
    prompts: list[str] | str | None = None,
    store: str | None = None,
    served: str | None = None,
    fix: str | None = None,
    out: str | None = None,
    limit: Count = 24,
    answer_tokens: Tokens = 128,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Find out why a draft accepts less than it should.

    It lists what the draft's files say beside the target; measures acceptance step by step, from what a training
    validates to what an engine serves; and reads the files in other ways, one assumption changed at a time. What
    accepts significantly more than what the files say is named, with what to change.

    If a run is killed, give the same command again: it resumes.

    Args:
        draft: folder or hub id; in our format also the name of a shipped draft.
        target: "embedded", a local folder or a hub id; the one that the draft is served with.
        input_format: format of the draft, as for `poss convert`.
        allocation: positions served by each specialist where the files do not state it, as for `poss convert`.
        prompts: files, folders or suites of prompts, as for `poss benchmark --suites`; the project's own by default.
            The target answers their first turns.
        store: features of the target's own answers instead, as for `poss replay`.
        served: an engine's counters: vLLM's /metrics, or responses with the acceptance of each.
        fix: folder to write: the draft in our format, read as it accepts most.
        out: folder to write; by default one in runs/doctor/ for this draft, this target and these texts.
        limit: prompts or conversations.
        answer_tokens: most tokens of an answer.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    if fix:
        check_new(fix)
    counted, questions = served_counts(served) if served else None, [] if store else _first_turns(prompts, limit)
    model = Target.load(target, dtype, device)
    try:
        found = load(draft, input_format, allocation, model)
    except ForeignDraft as error:
        return print(f"{error}\n{FOREIGN}")
    print("\n".join(facts(found)))
    made_of = {
        "draft": _digest(found.reading),
        "target": [model.spec.fingerprint, model.spec.template],
        "texts": sha256(Path(store, MANIFEST)) if store else digest(questions),
        "sizes": [limit, answer_tokens, model.dtype_name],
    }
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
    folder = Path(out or f"runs/doctor/{Path(draft).name}-{key}")
    check_folder(folder, MEASURED)
    work = Work(folder / MEASURED)
    with work.exclusive(wait=False):
        work.claim(made_of)
        case = Case(work, model, questions, store, limit, answer_tokens)
        _climb(case, found.reading, counted)
        reading = _find_causes(case, found.reading, found.refused)
    if fix and reading:
        if not reading.is_written():
            raise ValueError(f"fix is {fix}; config and weights of a draft cannot say what was found")
        write_folder(Path(fix), dict(reading.state), reading.config.to_json())
        print(f"{fix}: the draft, read as it accepts most")


@dataclass(frozen=True, eq=False)
class Case:
    """What drafts are examined on: the target, and its own answers, greedy ones by default."""

    work: Work
    target: Target
    questions: list[Question]
    store: str | None
    limit: int
    answer_tokens: int

    def once(self, name: str, measure: Callable[[], Counts]) -> Counts:
        """What is measured under a name, now or before the command was killed."""
        if (receipt := self.work.receipt(name)) is None:
            receipt = [counts.tolist() for counts in measure()]
            self.work.write_receipt(name, receipt)
        return Counts(*map(np.array, receipt))

    @cache  # noqa: B019, there is one in a process
    def samples(self, name: str = ANSWERS, sampling: Sampling = GREEDY, thinking: bool | None = None) -> list[Sample]:
        """The answers, with all that a reading may read of the target."""
        if self.store:
            stored = FeatureStore(self.store)
            numbers = range(min(self.limit, len(stored)))
            texts = [TokenizedText(stored.ids[i], stored.tokens(i).tolist(), stored[i].spans) for i in numbers]
        else:
            path = self.work.folder.parent / f"{name}.jsonl"
            if not path.exists():
                given = {} if thinking is None else {"enable_thinking": thinking}
                asked = [replace(question, template=question.template | given) for question in self.questions]
                options = {"batch_size": 32, "seed": 0, "settings": {}, "strict": False}
                corpus, answer = CorpusWriter(str(path)), (sampling, self.answer_tokens)
                answer_questions(corpus, self.target, asked, answer=answer, **options)
            texts = tokenize(self.target, read_conversations(str(path)), self.target.spec.context)
        found = {text.id: read(self.target, text) for text in tqdm(texts, desc=f"read {name}", leave=False)}
        return [*found.values()] if name == ANSWERS else [found.get(one.id, one) for one in self.samples()]

    def measured(self, reading: Reading, every: int = 1) -> Counts:
        """What a reading accepts, of all texts or of some."""
        thinking = reading.thinking
        samples = self.samples() if thinking is None else self.samples(f"thinking-{thinking}", thinking=thinking)
        return unrolled(reading, as_read(samples[::every], reading))


def _first_turns(prompts: list[str] | str | None, limit: int) -> list[Question]:
    """The first turns of prompts, of all suites alike."""
    suites: dict[str, list[Question]] = {}
    for question in read_suites(prompts):
        suites.setdefault(question.suite, []).append(replace(question, turns=question.turns[:1]))
    return [question for row in zip_longest(*suites.values()) for question in row if question][:limit]


def _digest(reading: Reading) -> str:
    digest = hashlib.sha256(reading.config.to_json().encode())
    for name, value in sorted({**reading.state, **reading.frozen}.items()):
        digest.update(name.encode() + value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- the ladder: from what a training validates to what an engine serves ---


def _rungs(case: Case, reading: Reading) -> Iterator[tuple[str, str, Callable[[], Counts]]]:
    """Name of a step, the one that it is compared with, and what measures it."""
    if case.store:
        stored = FeatureStore(case.store, reading.config.aux_layers)
        samples = [stored[i] for i in range(min(case.limit, len(stored)))]
    else:
        samples = as_read(case.samples(), reading)
    yield "teacher-forced", "", lambda: unrolled(reading, samples)
    yield CHAIN, "", lambda: replayed(reading, samples)
    yield "tree of 60", CHAIN, lambda: replayed(reading, samples, 60, 10)
    coarse = [one._replace(features=one.features.bfloat16(), layers=one.layers.bfloat16()) for one in samples]
    yield "chain in bfloat16", CHAIN, lambda: replayed(reading.to(torch.bfloat16), coarse)
    if not case.store:
        drawn = Sampling(1.0)
        yield "chain, temperature 1", CHAIN, lambda: replayed(reading, as_read(case.samples("drawn", drawn), reading))
        for number, other in others(reading):
            if other.thinking is not None:
                yield f"chain, {HYPOTHESES[number][0]}", CHAIN, lambda other=other: case.measured(other)


def _climb(case: Case, reading: Reading, counted: Counts | None) -> None:
    """Print what each step accepts, and which one is the first that loses more than its interval."""
    rungs: dict[str, Counts] = {}
    losses = []
    print(f"\n{'step':24} {'τ':20} acceptance by position")
    for name, than, measure in _rungs(case, reading):
        rungs[name] = own = case.once(f"rung-{len(rungs)}", measure)
        _print_rung(name, own)
        losses += [name] if than and compare({0: own}, rungs[than])[0].direction == "smaller" else []
    if counted:
        _print_rung("the engine", counted)
        expected = interval(mean_over([rungs[CHAIN].up_to(counted.reached.shape[1]).tau()]))
        losses += ["the engine"] if counted.tau().values[0] < expected.low else []
    print(f"accepts less than a {CHAIN}: {', '.join(losses)}" if losses else f"no step accepts less than a {CHAIN}")


def _print_rung(name: str, counts: Counts) -> None:
    tau = interval(mean_over([counts.tau()])).with_interval()
    print(f"{name:24} {tau:20} {' '.join(f'{rate:.2f}' for rate in counts.rates()[0])}", flush=True)


# --- counterfactuals, and what follows from them ---


def _find_causes(case: Case, said: Reading, refused: list[str]) -> Reading | None:
    """Print what accepts significantly more, one after the other; the last reading, None if it accepts by chance."""
    reading, causes, base = said, list[str](), case.once("base", lambda: case.measured(said))
    while len(causes) < MOST:
        found = _best(case, reading, base, f"{len(causes)}")
        if found is None and not causes and not above_chance(base, case.samples()):
            found = _best_pair(case, reading, base)
        if found is None:
            break
        *steps, counts = found
        before, after = (own.rates()[0, 0] for own in (base, counts))
        gain = compare({0: counts}, base)[0].with_interval("+.2f")
        for number, other in steps:
            causes.append(_describe(HYPOTHESES[number][0], reading, other))
            reading = other
        causes[-1] += f": position 1 from {before:.2f} to {after:.2f}, τ {gain}"
        base = counts
    if not above_chance(base, case.samples()):
        return print(f"\n{FOREIGN}")
    print("", *([*refused, *causes] or [NOTHING]), *(_keys(said, reading) if causes else ()), sep="\n")
    return reading


def _best(case: Case, reading: Reading, base: Counts, name: str) -> Any:
    """The hypothesis that accepts most, its reading and what that accepts; None if none accepts significantly more."""
    counts, readings, some = {}, dict(others(reading)), Counts(*(part[::SOME] for part in base))
    for i, other in tqdm(readings.items(), desc="hypotheses", leave=False):
        few = case.once(f"{name}-{i}-some", lambda other=other: case.measured(other, SOME))
        better = compare({0: few}, some)[0].value > 0
        counts[i] = case.once(f"{name}-{i}", lambda other=other: case.measured(other)) if better else base
    gains = compare(counts, base)
    sure = [i for i in gains if gains[i].p < SURE and gains[i].value > LEAST * base.tau().values[0]]
    best = max(sure, key=lambda i: gains[i].value, default=None)
    return None if best is None else ((best, readings[best]), counts[best])


def _best_pair(case: Case, reading: Reading, base: Counts) -> Any:
    """Two hypotheses that help only together, as two faults that each prevent all acceptance; None if none do."""
    few, most, found = case.samples()[::FEW], 0, None
    singles = list(others(reading))
    for i, first in tqdm(singles, desc="pairs", leave=False):
        for j, second in others(first):
            if j > i and first.thinking is None is second.thinking:
                passed = unrolled(second, as_read(few, second), 1).passed.sum()
                if passed > most:
                    most, found = passed, ((i, first), (j, second))
    if found is None:
        return None
    counts = case.once("pair", lambda: case.measured(found[1][1]))
    gain = compare({n: counts if n == 0 else base for n in range(len(singles) ** 2 // 2)}, base)[0]
    return (*found, counts) if gain.p < SURE and above_chance(counts, case.samples()) else None


def _describe(words: str, before: Reading, after: Reading) -> str:
    """What is read differently, with the values of the config that change."""
    olds, news = (vars(each.config) | {"inner_layers": each.sources} for each in (before, after))
    changed = [f"{name} {_plain(olds[name])} → {_plain(news[name])}" for name in olds if olds[name] != news[name]]
    return f"{words}, {', '.join(changed)}" if changed else words


def _plain(value: Any) -> str:
    return "the target's" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _keys(before: Reading, after: Reading) -> Iterator[str]:
    """Keys of an engine's config that change."""
    for engine in ("vllm", "sglang"):
        with suppress(ValueError):
            old, new = (_published(engine, each) for each in (before, after))
            if changed := {name: value for name, value in new.items() if old.get(name) != value}:
                yield f"config.json for {engine}: {json.dumps(changed)[1:-1]}"


def _published(engine: str, reading: Reading) -> dict[str, Any]:
    layout = find_layout(engine, reading.config)
    check_expressible(reading.config, layout)
    return publish(reading.config, layout, dict(reading.state), reading.embed_head.tied)
