"""`poss demo`: the main job from end to end, by the functions behind the commands.

shipped corpus --extract--> features --fit, from random weights--> hass, poss2 --replay--> held-out τ
                                              hass, poss2, a shipped draft --benchmark--> records --> table, report
"""

import json
import sys
import textwrap
import time
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.replay import replay
from poss_lightning.evaluation.rounds import PLAIN, read_rounds
from poss_lightning.extract import extract
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import atomic, check_folder, public_name
from poss_lightning.machine import best_seconds, choose_device, choose_precision
from poss_lightning.ranges import Amount, check_numbers
from poss_lightning.reports.compare import WIDTH, show
from poss_lightning.reports.findings import find
from poss_lightning.reports.measures import TAU_MICRO
from poss_lightning.reports.page import write_page
from poss_lightning.reports.scalars import read_scalars
from poss_lightning.reports.summary import split_methods
from poss_lightning.reports.tables import overview, verdict
from poss_lightning.target.model import Target, causal_ancestors
from poss_lightning.training.fit import fit_once

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"
CONVERSATION_TOKENS = 280  # of a conversation of the shipped corpus
HELD_OUT, HELD_OUT_TOKENS = 24, 128  # conversations, the corpus's last, and where they are cut; for validation
VALIDATIONS = 4  # of a training, besides the first; all five take as long as `VALIDATION_STEPS` steps
VALIDATION_STEPS = 60
STEP_TOKENS = 500  # tokens read by the embedded target in the time of a training step
TIMING_TOKENS = 220  # tokens written by it in the time in which `auto` times the trees of a method
SUITES, METHODS = 6, 8  # plain decoding, prompt lookup, and three drafts, each with and without lookup
VOCABULARY = 4096  # most tokens that the trained drafts may propose: the most common in the corpus
TREE: dict[str, Any] = {"nodes": 20, "tree_width": 4}  # on which held-out τ is measured, as in conf/demo.yaml
TRAINED = {"HASS": "hass", "PosS-2": "poss2"}  # folders of the trainings
MINUTES = {"gpu": 3, "bfloat16": 6, "float32": 15}  # on a GPU, on a CPU that multiplies bfloat16 fast, on another
SPARE = 0.85  # share of these minutes that is planned with
OVERHEAD = 60  # seconds to load the target a few times, measure trees and write the page
NOTE = "demo.json"
SHOWN = {PLAIN: "plain decoding", "lookup": "prompt lookup (no training)"}
CURVES = "localhost:6006/#custom_scalars"


class Sizes(NamedTuple):
    """Says how much the demo does."""

    conversations: int  # of the shipped corpus, to train on
    steps: int  # of the training of each draft, a multiple of `VALIDATIONS`
    limit: int  # questions of each suite
    max_new_tokens: int  # of an answer, at most

    def seconds(self, read: float, write: float) -> float:
        """Estimate how long the demo takes with a target that reads and writes so many tokens a second."""
        extracting = 1.3 * (self.conversations * CONVERSATION_TOKENS + HELD_OUT * HELD_OUT_TOKENS) / read
        training = 2 * (self.steps + VALIDATION_STEPS) * STEP_TOKENS / read
        answering = METHODS * (SUITES * self.limit * self.max_new_tokens + TIMING_TOKENS) / write
        return extracting + training + answering + OVERHEAD

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations, {self.steps} training steps per draft, "
            f"{self.limit} question{'s' * (self.limit > 1)} of each suite, {self.max_new_tokens} tokens per answer"
        )


# The largest that fits the minutes is taken.
LADDER = (
    Sizes(800, 400, 2, 64),
    Sizes(600, 320, 2, 64),
    Sizes(400, 240, 2, 64),
    Sizes(300, 160, 2, 64),
    Sizes(160, 120, 2, 48),
    Sizes(120, 80, 2, 32),
    Sizes(120, 80, 1, 32),
    Sizes(80, 40, 1, 32),
)


@check_numbers
def demo(
    out: str = "runs/demo",
    target: str = "embedded",
    trained: str | None = "embedded-hass",
    minutes: Amount | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """From a frozen target to a faster decode in a few minutes on two CPU cores.

    It extracts features of conversations; trains two drafts from random weights, for equal steps: one layer on its own
    features (HASS), and position specialists (PosS-2); measures both on held-out conversations; and decodes real
    prompts with both, with a draft that was trained for far longer, with lookups, and without any draft. The machine's
    speed decides how much of each. Finished stages are not repeated.

    Args:
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        trained: a draft to decode with as it is; null for none.
        minutes: limit; by default 6 on a CPU that multiplies bfloat16 fast, 15 on any other, 3 on a GPU.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), one of these, or a GPU by its number, as cuda:1.
    """
    check_folder(out, NOTE)
    folder, began, device = Path(out), time.perf_counter(), choose_device(device)
    if (folder / NOTE).exists():
        begun = json.loads((folder / NOTE).read_text())
        sizes, dtype = Sizes(**begun["sizes"]), begun["dtype"] if dtype == "auto" else dtype
        print(f"{folder} resumes as it was begun: {sizes}")
    else:
        model = Target.load(target, dtype, device)
        if trained and (difference := load_draft(trained).config.target.difference(model.spec)):
            raise ValueError(f"draft {trained} was trained for a different target: {difference}")
        sizes, dtype = plan_sizes(folder, model, minutes), model.dtype_name
        del model  # each stage loads its own

    place: dict[str, Any] = {"dtype": dtype, "device": device}
    _say(1, f"the target reads {sizes.conversations} conversations, and {HELD_OUT} to validate on; features are kept")
    extract(str(CORPUS), str(folder / "features"), target, limit=sizes.conversations, **place)
    extract(_write_held_out(folder), str(folder / "held-out"), target, max_length=HELD_OUT_TOKENS, **place)
    _say(2, f"one layer learns from random weights, on its own features (HASS, {sizes.steps} steps)")
    hass = _fit(folder, "HASS", sizes.steps, **place)
    _say(3, f"so do three specialists, for two positions each (PosS-2, {sizes.steps} steps)")
    poss2 = _fit(folder, "PosS-2", sizes.steps, **place)
    drafts = {"HASS": hass, "PosS-2": poss2}
    replay(str(folder / "held-out"), str(folder / "replay"), drafts=drafts, **place, **TREE)
    _say(4, "questions of six suites, answered by plain decoding and by every draft in turn, with lookups and without")
    drafts = {f"{name}, {sizes.steps} steps": draft for name, draft in drafts.items()}
    drafts = ({public_name(trained): trained} if trained else {}) | drafts
    common: dict[str, Any] = {"drafts": drafts, "target": target, "limit": sizes.limit}
    common["max_new_tokens"] = sizes.max_new_tokens
    records = exact = str(folder / "benchmark")
    benchmark(records, **common, baselines=[PLAIN, "lookup"], tree="auto", lookup=DEFAULT_LOOKUP, **place)
    if dtype != "float32":  # then answers may differ; these must not, with 20 nodes in every round, if they pay or not
        exact = str(folder / "exact")
        benchmark(exact, **common, suites=["questions"], baselines=[PLAIN], nodes=20, dtype="float32", device=device)
    found = find(records)
    write_page(found, str(folder / "report.html"), str(folder))
    model = "SmolLM2-135M" if target == "embedded" else public_name(target)
    where, took = "this CPU" if device == "cpu" else device, f"{time.perf_counter() - began:.0f} s"
    print(f"\nDone in {took}, {model} on {where}, {found.overall[0].prompts} prompts, {dtype}\n")
    print(show(overview(found).drop(columns="τ").replace({"method": SHOWN})))  # `auto` sizes trees by speed, not by τ
    for text in (verdict(found), _exactness(Path(exact)), describe_learning(folder, sizes.steps)):
        print(f"\n{textwrap.fill(text, WIDTH)}")
    print(f"\nreport     {folder / 'report.html'}")
    print(f"curves     {Path(sys.executable).parent / 'tensorboard'} --logdir {folder}   → {CURVES}")
    print(f"all tables poss compare {folder / 'benchmark'} --all")
    print(f'talk to it poss generate "Why is the sky blue?" --target {target} --draft {trained or poss2}')


# --- how much of it ---


def plan_sizes(folder: Path, target: Target, minutes: float | None) -> Sizes:
    """Choose how much the demo does in these minutes, print it and note it in `folder`."""
    device, dtype = target.device, target.dtype_name
    minutes = minutes or MINUTES.get(dtype if device.type == "cpu" else "gpu", MINUTES["float32"])
    read, write = measure_speed(target)
    fitting = (sizes for sizes in LADDER if sizes.seconds(read, write) <= 60 * minutes * SPARE)
    sizes = next(fitting, LADDER[-1])
    print(
        f"{device}, {dtype}: the target reads {read:,.0f} tokens/s and writes {write:.1f}.\n"
        f"This takes about {_minutes(sizes.seconds(read, write))}: {sizes}."
    )
    if sizes != LADDER[0]:
        print(f"Made smaller for this machine, from {LADDER[0]} (about {_minutes(LADDER[0].seconds(read, write))}).")
    with atomic(folder / NOTE) as path:
        path.write_text(json.dumps({"sizes": sizes._asdict(), "dtype": dtype}, indent=1) + "\n")
    return sizes


@torch.inference_mode()
def measure_speed(target: Target, tokens: int = 256, steps: int = 4) -> tuple[float, float]:
    """Tokens a second that a target reads, many at once, and that it writes, one by one."""
    tokens = min(tokens, target.spec.context - steps)
    text = torch.arange(tokens, device=target.device)[None] % target.spec.vocab_size
    cache = target.new_cache(1, tokens + steps)
    alone = causal_ancestors(1, target.device)

    def write_tokens() -> None:
        cache.clear()
        for step in range(steps):
            target.logits(target.tree_features(text[:, step : step + 1], alone, cache))
            cache.append([1])

    works = {"read": lambda: target.text_features(text), "write": write_tokens}
    seconds = best_seconds(works, device=target.device)
    return tokens / seconds["read"], steps / seconds["write"]


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} minutes" if seconds >= 90 else "a minute"


# --- its stages ---


def _write_held_out(folder: Path) -> str:
    """Write the corpus's last conversations to a file, and return its name."""
    talks = read_conversations(str(CORPUS))[-HELD_OUT:]
    with atomic(folder / "held-out.jsonl") as path:
        path.write_text("".join(json.dumps({"id": talk.id, "messages": talk.messages}) + "\n" for talk in talks))
    return str(folder / "held-out.jsonl")


def _fit(folder: Path, name: str, steps: int, dtype: str, device: str) -> str:
    """Train one draft, unless that is done, and return its folder."""
    place, store = torch.device(device), str(folder / "features")
    numbered = {} if place.index is None else {"devices": [place.index]}
    options = {
        "data": {"store": store, "validation_store": str(folder / "held-out")},
        "model": {"vocabulary_size": min(VOCABULARY, FeatureStore(store).target.vocab_size)},
        "trainer": {
            "accelerator": place.type,
            **numbered,
            "precision": choose_precision(place.type, dtype),
            "max_steps": steps,
            "val_check_interval": steps // VALIDATIONS,
            "check_val_every_n_epoch": None,
        },
    }
    return str(fit_once(folder / TRAINED[name], "demo.yaml", f"draft/{TRAINED[name]}.yaml", options))


# --- what it says ---


def describe_learning(folder: Path, steps: int) -> str:
    """Say how τ on held-out answers changed, from what each training logged first to what the replay recorded."""
    replayed = {row.method: row.values[TAU_MICRO.name] for row in find(str(folder / "replay")).overall}
    changes = []
    for name, tau in replayed.items():
        (scalars,) = read_scalars(folder / TRAINED[name]).values()
        (_, first), *_ = scalars["val/tau_tree"]
        changes.append(f"from {first:.2f} to {tau.with_interval()} with {name}")
    return f"In {steps} steps from random weights, τ on held-out answers went {', and '.join(changes)}."


def _exactness(folder: Path) -> str:
    """Say how many float32 answers equal plain decoding's, token for token."""
    methods = split_methods(read_rounds(folder))
    plain = methods.pop(PLAIN)
    equal = [same for answers in methods.values() for same in answers["answer"] == plain["answer"]]
    return f"Output check (float32): {sum(equal)} of {len(equal)} answers equal plain decoding's."


def _say(stage: int, what: str) -> None:
    print(f"\n[{stage}/4] {what}", flush=True)
