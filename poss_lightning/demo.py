"""`poss demo`: the main job from end to end, by the functions behind the commands.

shipped corpus --extract--> features --fit, from a single layer--> hass, poss2 --benchmark--> records --> table, report
"""

import json
import sys
import textwrap
import time
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from poss_lightning.draft.folder import shipped
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.rounds import PLAIN, read_rounds
from poss_lightning.extract import extract
from poss_lightning.files import atomic, check_folder, public_name
from poss_lightning.machine import best_seconds, choose_device, choose_precision
from poss_lightning.ranges import Amount, check_numbers
from poss_lightning.reports.compare import WIDTH, show
from poss_lightning.reports.findings import Findings, find
from poss_lightning.reports.page import write_page
from poss_lightning.reports.summary import split_methods
from poss_lightning.reports.tables import overview, verdict
from poss_lightning.target.model import Target, causal_ancestors
from poss_lightning.training.fit import fit_once

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"
CONVERSATION_TOKENS = 280  # of a conversation of the shipped corpus
STEP_TOKENS = 3100  # tokens read by the embedded target in the time of a training step (`flops.step_flops`)
METHODS, SUITES = 6, 8  # four drafts and two baselines; six suites, and one more in float32, at half the rate
VOCABULARY = 32768  # most tokens that the trained drafts may propose: the most common in the corpus
MINUTES = {"gpu": 3, "bfloat16": 6, "float32": 15}  # on a GPU, on a CPU that multiplies bfloat16 fast, on another
SPARE = 0.75  # share of these minutes that is planned with
OVERHEAD = 60  # seconds to load the target a few times, validate, measure trees and write the page
NOTE = "demo.json"
SHOWN = {PLAIN: "plain decoding", "lookup": "prompt lookup (no training)"}
CURVES = "localhost:6006/#custom_scalars"


class Sizes(NamedTuple):
    """How much the demo does."""

    conversations: int  # of the shipped corpus, whose features are kept
    steps: int  # of the training of each draft
    limit: int  # questions of each suite
    max_new_tokens: int  # of an answer, at most

    def seconds(self, read: float, write: float) -> float:
        """How long the demo takes, roughly, with a target that reads and writes so many tokens a second."""
        extracting = 1.3 * self.conversations * CONVERSATION_TOKENS / read
        training = 2 * self.steps * STEP_TOKENS / read
        answering = METHODS * SUITES * self.limit * self.max_new_tokens / write
        return extracting + training + answering + OVERHEAD

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations, {self.steps} training steps per draft, "
            f"{self.limit} question{'s' * (self.limit > 1)} of each suite, {self.max_new_tokens} tokens per answer"
        )


# The largest that fits the minutes is taken.
LADDER = (
    Sizes(200, 40, 2, 64),
    Sizes(150, 30, 2, 64),
    Sizes(120, 20, 2, 64),
    Sizes(100, 16, 2, 48),
    Sizes(80, 10, 2, 40),
    Sizes(60, 8, 1, 48),
    Sizes(60, 6, 1, 32),
)


@check_numbers
def demo(
    out: str = "runs/demo",
    target: str = "embedded",
    start_from: str = "embedded-hass",
    trained: str | None = "embedded-poss2",
    minutes: Amount | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """From a frozen target to a faster decode in a few minutes on two CPU cores.

    It extracts features of conversations; trains, from a single layer and for equal steps, the same layer on its own
    features (HASS) and position specialists (PosS-2); and decodes real prompts with both, with a draft that was trained
    for longer, and without any. The machine's speed decides how much of each. Finished stages are not repeated.

    Args:
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        start_from: the single layer to train further: draft folder, hub id or shipped draft.
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
        _check_drafts(model, start_from, trained)
        sizes, dtype = plan_sizes(folder, model, minutes), model.dtype_name
        del model  # each stage loads its own

    store = str(folder / "features")
    _say(1, f"the target reads {sizes.conversations} conversations and keeps its features")
    extract(str(CORPUS), store, target, limit=sizes.conversations, dtype=dtype, device=device)
    _say(2, f"the layer {start_from} learns from its own features (HASS, {sizes.steps} steps)")
    training = {"store": store, "start": start_from, "steps": sizes.steps, "dtype": dtype, "device": device}
    hass = _fit(folder, "hass", **training)
    _say(3, f"from the same layer, three specialists for two positions each (PosS-2, {sizes.steps} steps)")
    poss2 = _fit(folder, "poss2", **training)
    _say(4, "questions of six suites, answered by plain decoding and by every draft in turn")
    one, many = f"your HASS, {sizes.steps} steps from it", f"your PosS-2, {sizes.steps} steps from it"
    drafts = {_name(start_from): start_from} | ({_name(trained): trained} if trained else {}) | {one: hass, many: poss2}
    common = {"drafts": drafts, "target": target, "limit": sizes.limit, "max_new_tokens": sizes.max_new_tokens}
    records, exact = str(folder / "benchmark"), str(folder / "exact")
    benchmark(records, **common, baselines=[PLAIN, "lookup"], tree="auto", dtype=dtype, device=device)
    _say(5, "and some again in float32, where the answers must be the target's own to the last token")
    drafting = {"suites": ["questions"], "nodes": 20, "baselines": [PLAIN]}  # in every round, whether it pays or not
    benchmark(exact, **common, **drafting, dtype="float32", device=device)
    found = find(records, reference=one)
    write_page(found, str(folder / "report.html"), str(folder))
    model = "SmolLM2-135M" if target == "embedded" else public_name(target)
    where, took = "this CPU" if device == "cpu" else device, f"{time.perf_counter() - began:.0f} s"
    print(f"\nDone in {took}, {model} on {where}, {found.overall[0].prompts} prompts, {dtype}\n")
    _print_end(found, folder)
    print(f'talk to it poss generate "Why is the sky blue?" --target {target} --draft {trained or poss2}')


def _print_end(found: Findings, folder: Path) -> None:
    """Print the table, what it says, and what to do next."""
    print(show(overview(found).replace({"method": SHOWN})))
    print(f"\n{textwrap.fill(verdict(found), WIDTH)}\n{_exactness(folder / 'exact')}\n")
    print(f"report     {folder / 'report.html'}")
    print(f"curves     {Path(sys.executable).parent / 'tensorboard'} --logdir {folder}   → {CURVES}")
    print(f"all tables poss compare {folder / 'benchmark'} --all")


def _name(draft: str) -> str:
    """A method's name that says what the draft is."""
    layers = len(Specialists.from_pretrained(draft).config.allocation)
    named = {"embedded-hass": "HASS", "embedded-poss2": "PosS-2"}.get(draft, public_name(draft))
    return f"{'shipped ' * (draft in shipped())}{'one layer' if layers == 1 else 'specialists'} ({named})"


def _check_drafts(target: Target, *drafts: str | None) -> None:
    """Raise ValueError if a draft was trained for a different target."""
    for draft in filter(None, drafts):
        if difference := Specialists.from_pretrained(draft).config.target.difference(target.spec):
            raise ValueError(f"draft {draft} was trained for a different target: {difference}")


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
            target.embed_head.logits(target.tree_features(text[:, step : step + 1], alone, cache))
            cache.append([1])

    works = {"read": lambda: target.text_features(text), "write": write_tokens}
    seconds = best_seconds(works, device=target.device)
    return tokens / seconds["read"], steps / seconds["write"]


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} minutes" if seconds >= 90 else "a minute"


# --- its stages ---


def _fit(folder: Path, name: str, *, store: str, start: str, steps: int, dtype: str, device: str) -> str:
    """Train one draft, unless that is done, and return its folder."""
    place = torch.device(device)
    size = min(VOCABULARY, Specialists.from_pretrained(start).config.target.vocab_size)
    numbered = {} if place.index is None else {"devices": [place.index]}
    options = {
        "data": {"store": store},
        "model": {"vocabulary_size": size, "start_from": start},
        "trainer": {
            "accelerator": place.type,
            **numbered,
            "precision": choose_precision(place.type, dtype),
            "max_steps": steps,
            "val_check_interval": steps // 2 if steps % 2 == 0 else steps,  # in the middle, and at the end
            "check_val_every_n_epoch": None,
        },
    }
    return str(fit_once(folder / name, "demo.yaml", f"draft/{name}.yaml", options))


def _exactness(folder: Path) -> str:
    """How many float32 answers equal plain decoding's, token for token."""
    methods = split_methods(read_rounds(folder))
    plain = methods.pop(PLAIN)
    equal = [same for answers in methods.values() for same in answers["answer"] == plain["answer"]]
    return f"Output check (float32): {sum(equal)} of {len(equal)} answers equal plain decoding's."


def _say(stage: int, what: str) -> None:
    print(f"\n[{stage}/5] {what}", flush=True)
