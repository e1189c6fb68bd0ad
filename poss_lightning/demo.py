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
from typing import Any

import torch

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.replay import replay
from poss_lightning.evaluation.rounds import PLAIN, read_rounds
from poss_lightning.extract import extract
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
from poss_lightning.target.model import Target
from poss_lightning.training.fit import fit_once

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"
HELD_OUT, HELD_OUT_TOKENS = 24, 128  # conversations, the corpus's last, and where they are cut; for validation
VALIDATIONS = 4  # of a training, besides the first
STEPS, TOKENS = 400, 64  # of the training of each draft, and of an answer, at most
VOCABULARY = 4096  # most tokens that the trained drafts may propose: the most common in the corpus
TREE: dict[str, Any] = {"nodes": 20, "tree_width": 4}  # on which held-out τ is measured, as in conf/demo.yaml
TRAINED = {"HASS": "hass", "PosS-2": "poss2"}  # folders of the trainings
MINUTES = {"gpu": 3, "bfloat16": 6, "float32": 15}  # on a GPU, on a CPU that multiplies bfloat16 fast, on another
OVERHEAD = 60  # seconds to load the target a few times, measure trees and write the page
READ, WRITTEN = 384, 5  # tokens of a text that is timed: the demo takes as long as `WHOLE` of them,
WHOLE, FIXED = 1970, 0.15  # and this share of them for validations and for timing trees, however small it is
NOTE = "demo.json"
SHOWN = {PLAIN: "plain decoding", "lookup": "prompt lookup (no training)"}
CURVES = "localhost:6006/#custom_scalars"


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
    note = folder / NOTE
    if note.exists():
        begun = json.loads(note.read_text())
        dtype = begun["dtype"] if dtype == "auto" else dtype
        print(f"{folder} resumes as it was begun")
    else:
        model = Target.load(target, dtype, device)
        if trained and (difference := load_draft(trained).config.target.difference(model.spec)):
            raise ValueError(f"draft {trained} was trained for a different target: {difference}")
        begun, dtype = choose_sizes(model, minutes), model.dtype_name
        del model  # each stage loads its own
        with atomic(note) as path:
            path.write_text(json.dumps(begun, indent=1) + "\n")

    steps, conversations = begun["steps"], 2 * begun["steps"]
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    _say(1, f"the target reads {conversations} conversations, and {HELD_OUT} to validate on; features are kept")
    extract(str(CORPUS), str(folder / "features"), target, limit=conversations, **place)
    extract(_write_held_out(folder), str(folder / "held-out"), target, max_length=HELD_OUT_TOKENS, **place)
    _say(2, f"one layer learns from random weights, on its own features (HASS, {steps} steps)")
    hass = _fit(folder, "HASS", steps, **place)
    _say(3, f"so do three specialists, for two positions each (PosS-2, {steps} steps)")
    poss2 = _fit(folder, "PosS-2", steps, **place)
    drafts = {"HASS": hass, "PosS-2": poss2}
    replay(str(folder / "held-out"), str(folder / "replay"), drafts=drafts, **place, **TREE)
    _say(4, "questions of six suites, answered by plain decoding and by every draft in turn, with lookups and without")
    drafts = {f"{name}, {steps} steps": draft for name, draft in drafts.items()}
    drafts = ({public_name(trained): trained} if trained else {}) | drafts
    common: dict[str, Any] = {"drafts": drafts, "target": target}
    common |= {"limit": begun["limit"], "max_new_tokens": begun["max_new_tokens"]}
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
    for text in (verdict(found), _exactness(Path(exact)), describe_learning(folder, steps)):
        print(f"\n{textwrap.fill(text, WIDTH)}")
    print(f"\nreport     {folder / 'report.html'}")
    print(f"curves     {Path(sys.executable).parent / 'tensorboard'} --logdir {folder}   → {CURVES}")
    print(f"all tables poss compare {folder / 'benchmark'} --all")
    print(f'talk to it poss generate "Why is the sky blue?" --target {target} --draft {trained or poss2}')


def choose_sizes(target: Target, minutes: float | None) -> dict[str, Any]:
    """Choose how much the demo does in these minutes, by the speed of the target, and print it."""
    device, dtype = target.device, target.dtype_name
    minutes = minutes or MINUTES.get(dtype if device.type == "cpu" else "gpu", MINUTES["float32"])
    whole = WHOLE * seconds_of_text(target)
    share = (0.85 * 60 * minutes - OVERHEAD) / whole  # of the time; the rest is spare
    share = min(1.0, max(0.1, (share - FIXED) / (1 - FIXED)))  # of steps and tokens
    steps, tokens = VALIDATIONS * round(share * STEPS / VALIDATIONS), max(TOKENS // 2, round(share * TOKENS))
    sizes = {"steps": steps, "limit": 1 + (share > 0.15), "max_new_tokens": tokens}
    expected = (OVERHEAD + whole * (FIXED + (1 - FIXED) * share)) / 60
    print(
        f"This takes about {expected:.0f} minutes on {device} in {dtype}: {steps} of {STEPS} steps of each training, "
        f"{sizes['limit']} of 2 questions of each suite, {tokens} of {TOKENS} tokens of each answer."
    )
    return sizes | {"dtype": dtype}


def seconds_of_text(target: Target) -> float:
    """Return the seconds in which the target reads `READ` tokens and writes `WRITTEN`, the first without a step."""
    decoder, text = Autoregressive(target), [[0] * READ]
    return best_seconds({"": lambda: decoder.decode(text, WRITTEN, frozenset())}, device=target.device)[""]


# --- its stages ---


def _write_held_out(folder: Path) -> str:
    """Write the corpus's last conversations to a file, and return its name."""
    talks = read_conversations(str(CORPUS))[-HELD_OUT:]
    with atomic(folder / "held-out.jsonl") as path:
        path.write_text("".join(json.dumps({"id": talk.id, "messages": talk.messages}) + "\n" for talk in talks))
    return str(folder / "held-out.jsonl")


def _fit(folder: Path, name: str, steps: int, dtype: str, device: str) -> str:
    """Train one draft, unless that is done, and return its folder."""
    place = torch.device(device)
    options = {
        "data": {"store": str(folder / "features"), "validation_store": str(folder / "held-out")},
        "model": {"vocabulary_size": VOCABULARY},
        "trainer": {
            "accelerator": place.type,
            "devices": 1 if place.index is None else [place.index],
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
