"""From a frozen target to a faster decode, in 4 to 6 minutes on two CPU cores: `make demo`.

    1. extract      the target reads conversations; its features are kept
    2. fit          two drafts learn from random weights, for equal steps: one layer that reads its own features (HASS),
                    and three specialists for two positions each (PosS-2)
    3. replay       how much of the target's answers each draft would have proposed, without the target
    4. benchmark    questions, answered by the target alone and with each draft, which take turns; a table and a page

Each step is the function behind a command of `poss`. What is finished is not repeated, and what was killed resumes.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import torch

from poss_lightning import extract, load, read_rounds
from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.evaluation.replay import replay
from poss_lightning.reports.compare import compare
from poss_lightning.shipped import CORPUS
from poss_lightning.training.fit import fit_once

DRAFTS = {"HASS": "hass", "PosS-2": "poss2"}  # folders of the trainings, and their files in conf/draft
HELD_OUT, CUT = 16, 128  # conversations to validate on, the corpus's last; tokens at which they are cut
VOCABULARY = 4096  # tokens that the trained drafts may propose: the most common in the corpus
STEPS, QUESTIONS, TOKENS = 400, 2, 64  # of each training; of each suite; of each answer
MINUTES = 5  # that all of it should take; where the machine is slow it does less
OVERHEAD = 45  # seconds to load the target a few times, measure trees and write the page, on any machine
READ, WRITTEN = 384, 5  # tokens of a text that is timed: the demo takes as long as `WHOLE` of them,
WHOLE, FIXED = 1110, 140  # and as `FIXED` more, however small it is


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write")
    parser.add_argument("--target", default="embedded", help="a local folder or hub id; by default SmolLM2-135M")
    parser.add_argument("--draft", default="embedded-hass", help="a trained draft of the target")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    given = parser.parse_args(arguments)
    run(given.out, given.target, given.draft, given.minutes)


def run(folder: Path, target: str, draft: str, minutes: float) -> None:
    """Extract, train, replay, benchmark and compare."""
    began = time.monotonic()
    sizes = choose_sizes(folder / "demo.json", target, minutes)
    steps = sizes["steps"]

    say(f"[1/4] the target reads {steps} conversations, and {HELD_OUT} to validate on")
    extract(str(CORPUS), str(folder / "features"), target=target, limit=steps)
    with gzip.open(str(CORPUS)) as lines, open(held_out := f"{folder}/held-out.jsonl", "wb") as file:
        file.writelines(lines.readlines()[-HELD_OUT:])
    extract(held_out, str(folder / "held-out"), target=target, max_length=CUT)

    drafts = {Path(draft).name: draft}
    for name, file in DRAFTS.items():
        say(f"[2/4] {name} learns from random weights, {steps} steps")
        data = {"store": str(folder / "features"), "validation_store": str(folder / "held-out")}
        trainer = {"max_steps": steps, "val_check_interval": steps, "check_val_every_n_epoch": None}
        options = {"data": data, "trainer": trainer, "model": {"vocabulary_size": VOCABULARY}}
        drafts[name] = str(fit_once(folder / file, "demo.yaml", f"draft/{file}.yaml", options))

    say("[3/4] held-out answers: what would be accepted of each draft's trees")
    replay(str(folder / "held-out"), str(folder / "replay"), drafts=drafts, nodes=20, tree_width=4)

    say("[4/4] questions of six suites, answered plainly and with every draft in turn, with lookups and without")
    answers = {"limit": sizes["questions"], "max_new_tokens": sizes["tokens"], "lookup": 10}
    benchmark(str(folder / "benchmark"), drafts=drafts, target=target, baselines=["plain", "lookup"], **answers)

    say(f"Done in {time.monotonic() - began:.0f} s. Acceptance on held-out answers, with the same trees for all:")
    compare(str(folder / "replay"))
    say("Speed, with trees of the size that pays on this machine:")
    compare(str(folder / "benchmark"), html=str(folder / "report.html"), runs=str(folder))
    print(f"\n{count_equal(folder / 'benchmark')} answers with drafted or looked-up tokens are plain decoding's.")
    print(f"curves     tensorboard --logdir {folder}")
    print(f'talk to it poss generate "Why is the sky blue?" --target {target} --draft {draft}')


def choose_sizes(note: Path, target: str, minutes: float) -> dict[str, int]:
    """Choose how much the demo does in these minutes, by the speed of the target, unless it was begun before."""
    if note.exists():
        print(f"{note.parent} resumes as it was begun")
        return json.loads(note.read_text())
    seconds = seconds_of_text(target)
    share = (60 * minutes - OVERHEAD - FIXED * seconds) / (WHOLE * seconds)
    share = min(1.0, max(0.05, share))
    sizes = {
        "steps": round(share * STEPS),
        "questions": 1 + (share > 0.3),
        "tokens": max(TOKENS // 2, round(share * TOKENS)),
    }
    expected = (OVERHEAD + (FIXED + WHOLE * share) * seconds) / 60
    print(
        f"This takes about {expected:.0f} minutes: {sizes['steps']} of {STEPS} steps of each training, "
        f"{sizes['questions']} of {QUESTIONS} questions of each suite, {sizes['tokens']} of {TOKENS} tokens per answer"
    )
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(sizes))
    return sizes


def seconds_of_text(target: str) -> float:
    """Return the seconds in which the target reads `READ` tokens and writes `WRITTEN`, once it is warm."""
    model, text = load(target), torch.zeros(1, READ, dtype=torch.long)
    for _ in range(2):
        began = time.monotonic()
        model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=WRITTEN, eos_token_id=[])
    return time.monotonic() - began


def count_equal(folder: Path) -> str:
    """Count the answers that have plain decoding's tokens, of all with drafted or looked-up tokens."""
    answers = read_rounds(folder).pivot(index=["suite", "id", "turn"], columns="method", values="answer")
    same = answers.drop(columns="plain").eq(answers["plain"], axis=0).to_numpy()
    return f"{same.sum()} of {same.size}"


def say(what: str) -> None:
    print(f"\n{what}", flush=True)


if __name__ == "__main__":
    main()
