"""`poss demo`: the main job from end to end, by the functions behind the commands.

shipped corpus --extract--> features --fit, from a single layer--> hass, poss2 --benchmark--> records --> table, report
"""

import json
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import torch

from poss_lightning.draft.folder import shipped
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.records import PLAIN, read_records
from poss_lightning.extract import extract
from poss_lightning.files import atomic, check_folder, public_name
from poss_lightning.machine import best_seconds, choose_device, choose_precision
from poss_lightning.ranges import Amount, Count, Size, Tokens, check_numbers
from poss_lightning.reports.compare import WIDTH, show
from poss_lightning.reports.findings import Findings, find
from poss_lightning.reports.page import write_page
from poss_lightning.reports.summary import group
from poss_lightning.reports.tables import overview, verdict
from poss_lightning.target.model import Target, causal_ancestors
from poss_lightning.target.spec import TargetSpec
from poss_lightning.training.fit import fit_once
from poss_lightning.training.flops import step_flops

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"
SUITES, DRAFTS, BASELINES = 6, 4, 2  # what the benchmark decodes: of each suite, with each draft, and without one
BATCH_TOKENS, TOKENS = 1024, 280  # of a training step (conf/demo.yaml), and of a conversation of the shipped corpus
# Minutes that the demo may take: on a GPU, on a CPU that multiplies bfloat16 fast, on another.
MINUTES = {"gpu": 3, "bfloat16": 6, "float32": 15}
SPARE = 0.75  # share of these minutes that is planned with
OVERHEAD = 60  # seconds to load the target a few times, validate, measure trees and write the page
NOTE = "demo.json"
SHOWN = {PLAIN: "plain decoding", "lookup": "prompt lookup (no training)"}
CURVES = "localhost:6006/#custom_scalars"


@dataclass(frozen=True)
class Sizes:
    """How much the demo does.

    Args:
        conversations: of the shipped corpus, whose features are kept.
        steps: training steps of each of the two drafts.
        limit: questions of each suite.
        max_new_tokens: of an answer, at most.
    """

    conversations: int
    steps: int
    limit: int
    max_new_tokens: int


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


@dataclass(frozen=True)
class Speed:
    """What a machine does in a second, measured in a few.

    Args:
        dtype: of the target.
        device: where it was measured.
        read: tokens that the target reads a second, many at once.
        write: tokens that plain decoding writes a second.
        flops: of the target's products while it reads.
    """

    dtype: str
    device: str
    read: float
    write: float
    flops: float

    @property
    def minutes(self) -> float:
        """What the demo may take on such a machine."""
        return MINUTES["gpu" if self.device != "cpu" else "bfloat16" if self.dtype == "bfloat16" else "float32"]


@check_numbers
def demo(
    out: str = "runs/demo",
    target: str = "embedded",
    start_from: str = "embedded-hass",
    trained: str | None = "embedded-poss2",
    minutes: Amount | None = None,
    conversations: Count | None = None,
    steps: Count | None = None,
    limit: Count | None = None,
    max_new_tokens: Tokens | None = None,
    vocabulary_size: Size = 32768,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """From a frozen target to a faster decode in a few minutes on two CPU cores.

    Features of conversations; from a single layer, for equal steps, the same layer on its own features (HASS) and
    position specialists (PosS-2); then real answers by all of them, by a draft that was trained for longer, and by
    plain decoding. The machine's speed decides how much of each. Stages that are finished are not done again.

    Args:
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        start_from: the single layer: draft folder, hub id or shipped draft.
        trained: a draft to decode with as it is; null for none.
        minutes: that it may take; by default 6 on a CPU that multiplies bfloat16 fast, 15 on another, 3 on a GPU.
        conversations: of the shipped corpus; by default as many as the minutes allow, and so the next three.
        steps: training steps of the single layer and of the specialists.
        limit: questions of each of the six suites.
        max_new_tokens: decoded a turn, at most.
        vocabulary_size: tokens the trained drafts may propose, the most common in the corpus.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), one of these, or a GPU by its number, as cuda:1.
    """
    check_folder(out, NOTE)
    folder, began, device = Path(out), time.perf_counter(), choose_device(device)
    asked = {"conversations": conversations, "steps": steps, "limit": limit, "max_new_tokens": max_new_tokens}
    if not (folder / NOTE).exists():
        _check_fit(Target.load(target, dtype=None, device="cpu").spec, [start_from, trained], vocabulary_size)
    sizes, dtype = plan(folder, target, start_from, minutes, asked, dtype, device)

    store = str(folder / "features")
    _say(1, f"the target reads {sizes.conversations} conversations and keeps its features")
    extract(str(CORPUS), store, target, limit=sizes.conversations, dtype=dtype, device=device)
    _say(2, f"the layer {start_from} learns from its own features (HASS, {sizes.steps} steps)")
    training = {"store": store, "size": vocabulary_size, "steps": sizes.steps, "start": start_from}
    hass = _fit(folder, "hass", **training, dtype=dtype, device=device)
    _say(3, f"from the same layer, three specialists for two positions each (PosS-2, {sizes.steps} steps)")
    poss2 = _fit(folder, "poss2", **training, dtype=dtype, device=device)
    _say(4, "questions of six suites, answered by plain decoding and by every draft in turn")
    one, many = f"your HASS, {sizes.steps} steps from it", f"your PosS-2, {sizes.steps} steps from it"
    drafts = {_name(start_from): start_from} | ({_name(trained): trained} if trained else {}) | {one: hass, many: poss2}
    common = {"drafts": drafts, "target": target, "limit": sizes.limit, "max_new_tokens": sizes.max_new_tokens}
    records, exact = str(folder / "benchmark"), str(folder / "exact")
    benchmark(records, **common, baselines=[PLAIN, "lookup"], tree="auto", dtype=dtype, device=device)
    _say(5, "and some again in float32, where the answers must be the target's own to the last token")
    in_every_round = {"suites": ["questions"], "nodes": 20, "baselines": [PLAIN]}  # whether it pays or not
    benchmark(exact, **common, **in_every_round, dtype="float32", device=device)
    found = find(records, reference=one)
    write_page(found, str(folder / "report.html"), str(folder))
    model = "SmolLM2-135M" if target == "embedded" else public_name(target)
    where, took = "this CPU" if device == "cpu" else device, f"{time.perf_counter() - began:.0f} s"
    print(f"\nDone in {took}, {model} on {where}, {found.overall[0].prompts} prompts, {dtype}\n")
    _print_end(found, folder)
    print(f'talk to it poss generate "Why is the sky blue?" --target {target} --draft {trained or poss2}')


def _print_end(found: Findings, folder: Path) -> None:
    """The table, what it says, and where to go from here."""
    print(show(overview(found).replace({"method": SHOWN})))
    print(f"\n{textwrap.fill(verdict(found), WIDTH)}\n{_exactness(folder / 'exact')}\n")
    print(f"report     {folder / 'report.html'}")
    print(f"curves     {Path(sys.executable).parent / 'tensorboard'} --logdir {folder}   → {CURVES}")
    print(f"all tables poss compare {folder / 'benchmark'} --all")


def _name(draft: str) -> str:
    """What a draft is, as a method's name."""
    layers = len(Specialists.from_pretrained(draft).config.allocation)
    named = {"embedded-hass": "HASS", "embedded-poss2": "PosS-2"}.get(draft, public_name(draft))
    return f"{'shipped ' * (draft in shipped())}{'one layer' if layers == 1 else 'specialists'} ({named})"


def _check_fit(target: TargetSpec, drafts: list[str | None], vocabulary_size: int) -> None:
    """Raise ValueError where a draft, or the vocabulary of those to come, is not of the target."""
    if vocabulary_size > target.vocab_size:
        most = target.vocab_size
        raise ValueError(f"vocabulary_size is {vocabulary_size}; it must lie between 1 and the target's {most}")
    for draft in filter(None, drafts):
        if difference := Specialists.from_pretrained(draft).config.target.difference(target):
            raise ValueError(f"draft {draft} was trained for another target: {difference}")


# --- how much of it ---


def plan(
    folder: Path, target: str, draft: str, minutes: float | None, asked: dict[str, int | None], dtype: str, device: str
) -> tuple[Sizes, str]:
    """The sizes of this demo and its dtype, printed in some lines; those it was begun with where `folder` has some."""
    note, chosen = folder / NOTE, {name: value for name, value in asked.items() if value is not None}
    if note.exists():
        earlier = json.loads(note.read_text())
        settings = earlier["sizes"] | {"dtype": earlier["dtype"]}
        wanted = chosen | ({"dtype": dtype} if dtype != "auto" else {})
        if changed := [name for name, value in wanted.items() if settings[name] != value]:
            name = changed[0]
            raise ValueError(
                f"{folder} was begun with {name} {settings[name]}, now {wanted[name]}: resume without --{name}, or "
                "choose another --out"
            )
        print(f"{folder} resumes as it was begun: {_words(Sizes(**earlier['sizes']))}")
        return Sizes(**earlier["sizes"]), earlier["dtype"]
    speed = measure(Target.load(target, dtype, device), device)
    minutes = speed.minutes if minutes is None else minutes
    ladder = list(dict.fromkeys(Sizes(**(asdict(sizes) | chosen)) for sizes in LADDER))
    single = Specialists.from_pretrained(draft).config
    expected = {sizes: expected_seconds(sizes, speed, single) for sizes in ladder}
    sizes = next((sizes for sizes in ladder if expected[sizes] <= 60 * minutes * SPARE), ladder[-1])
    print(
        f"{speed.device}, {speed.dtype}: the target reads {speed.read:,.0f} tokens/s and writes {speed.write:.1f}.\n"
        f"This takes about {_minutes(expected[sizes])}: {_words(sizes)}."
    )
    if sizes != ladder[0]:
        print(f"Made smaller for this machine, from {_words(ladder[0])} (about {_minutes(expected[ladder[0]])}).")
    with atomic(note) as path:
        facts = {"sizes": asdict(sizes), "dtype": speed.dtype, "speed": asdict(speed)}
        path.write_text(json.dumps(facts, indent=1) + "\n")
    return sizes, speed.dtype


@torch.inference_mode()
def measure(target: Target, device: str, tokens: int = 256, steps: int = 4) -> Speed:
    """Read some tokens, and write some one by one."""
    tokens = min(tokens, target.spec.context - steps)
    text = torch.arange(tokens, device=target.device)[None] % target.spec.vocab_size
    cache = target.new_cache(1, tokens + steps)
    alone = causal_ancestors(1, target.device)

    def read_text() -> None:
        target.text_features(text)

    def write_tokens() -> None:
        cache.clear()
        for step in range(steps):
            target.embed_head.logits(target.tree_features(text[:, step : step + 1], alone, cache))
            cache.append([1])

    took = best_seconds({read_text: read_text, write_tokens: write_tokens}, device=device)
    numbers = sum(parameter.numel() for parameter in target.model.base_model.parameters())
    weights, rate = numbers - target.embed_head.embedding.numel(), tokens / took[read_text]
    return Speed(target.dtype_name, device, rate, steps / took[write_tokens], 2 * weights * rate)


def expected_seconds(sizes: Sizes, speed: Speed, draft: DraftConfig) -> float:
    """How long the demo takes, roughly: its parts by what the machine does in a second."""
    extracting = 1.3 * sizes.conversations * TOKENS / speed.read
    head = draft.vocabulary_size or draft.target.vocab_size
    flops = step_flops(draft, vocabulary=head, tokens=BATCH_TOKENS, slots=BATCH_TOKENS, context=BATCH_TOKENS / 4)
    training = 2 * sizes.steps * flops / speed.flops
    answers = sizes.limit * (SUITES + 2) * (DRAFTS + BASELINES)  # those of one suite again in float32, at half the rate
    decoding = answers * sizes.max_new_tokens / speed.write
    return extracting + training + decoding + OVERHEAD


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} minutes" if seconds >= 90 else "a minute"


def _words(sizes: Sizes) -> str:
    return (
        f"{sizes.conversations} conversations, {sizes.steps} training steps a draft, "
        f"{sizes.limit} question{'s' * (sizes.limit > 1)} of each suite, {sizes.max_new_tokens} tokens an answer"
    )


# --- its stages ---


def _fit(folder: Path, name: str, *, store: str, size: int, steps: int, start: str, dtype: str, device: str) -> str:
    """Train one draft, if that is not done, and return its folder."""
    place = torch.device(device)
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
    """How many float32 answers are plain decoding's, token for token."""
    methods = group(read_records(folder))
    plain = methods.pop(PLAIN)
    pairs = [(answers[key].tokens, plain[key].tokens) for answers in methods.values() for key in plain]
    equal = sum(answer == exact for answer, exact in pairs)
    return f"Output check (float32): {equal} of {len(pairs)} answers equal plain decoding's."


def _say(stage: int, what: str) -> None:
    print(f"\n[{stage}/5] {what}", flush=True)
