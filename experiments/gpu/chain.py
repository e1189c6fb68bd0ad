"""Text, stores, sweeps, replay and speed on one GPU: `python experiments/gpu/chain.py runs/gpu`; see README.md.

A command that fails ends no other, but the exit status says so; OUT/logs has what each printed. The same line resumes.
--tiny runs all of it at tiny sizes, on a CPU too: POSS_DEVICE=cpu.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

HERE, DEVICE = Path(__file__).parent, os.environ.get("POSS_DEVICE", "cuda")
STAGES, SWEEPS = ("text", "sweeps", "replay", "benchmark"), {"scratch": 3, "tuned": 2}  # shards
DIALOGUES = f"--user_temperature 0.8 --top_p 1 --openings {HERE.parent / 'data' / 'openings.txt'}"
FIXED = "--tree fixed"
SPEED = {"T0": FIXED, "T1": f"{FIXED} --temperature 1", "auto": "", "no-graphs": f"{FIXED} --graphs false"}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", type=Path)
parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
parser.add_argument("--suites", default="[code,questions,summaries]", help="questions: files, folders or names")
parser.add_argument("--steps", type=int, default=1500, help="of a training; five trainings share the GPU")
parser.add_argument("--tiny", action="store_true", help="every command, with 2 steps of each training")
args, failed = parser.parse_args(), []
new, asked, dialogues, stores = (16, 1, 2, 2) if args.tiny else (256, 8, 2048, 5)
out, pool = args.out, ThreadPoolExecutor(1 if DEVICE == "cpu" else 6)


def poss(name: str, words: str) -> None:
    with (out / "logs" / f"{name}.log").open("a") as log:
        done = subprocess.run([sys.executable, "-m", "poss_lightning.cli", *words.split()], stdout=log, stderr=log)
    print("FAILED" if done.returncode else "ok    ", name, flush=True)
    failed.extend([name] * bool(done.returncode))


def text(seed: int) -> None:
    """Make a store of texts, every second one of drawn answers; seed 0 is that of answers to the questions."""
    store = f"{out}/stores/{seed}" if seed else f"{out}/answers"
    drawn = f"{DIALOGUES} --user_tokens {new} --seed {seed} --temperature {seed % 2 * 0.7}"
    what = drawn if seed else f"--prompts {args.suites}"
    what += f" --conversations {dialogues} --batch_size {min(dialogues, 1024)} --answer_tokens {new}"
    if not Path(store, "manifest.json").exists():
        poss(f"text-{seed}", f"synthesize {store}.jsonl.gz {what} --device {DEVICE}")
        poss(f"features-{seed}", f"extract {store}.jsonl.gz {store} --device {DEVICE}")


def prepare(name: str) -> None:
    """Write OUT/NAME/sweep.yaml: NAME.yaml with the stores and steps of this run."""
    sweep = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    sweep["fit"]["data"]["store"] = sorted(str(path.parent) for path in out.glob("stores/*/manifest.json"))
    sweep["fit"]["trainer"]["max_steps"], sweep["replay"]["store"] = args.steps, f"{out}/answers"
    sweep["fit"]["trainer"]["accelerator"] = "cpu" if DEVICE == "cpu" else "gpu"
    if args.tiny:
        sweep["seeds"], fit = [0], sweep["fit"]
        fit["data"] |= {"batch_tokens": 256, "workers": 0}
        fit["model"] |= {"vocabulary_size": 2048, "optimizer": "adamw"}  # Muon's bfloat16 is slow on many CPUs
        fit["trainer"] |= {"max_steps": 2, "limit_val_batches": 1}
    (out / name).mkdir(exist_ok=True)
    (out / name / "sweep.yaml").write_text(yaml.safe_dump(sweep))


def measure(name: str, command: str, drafts: dict[str, object]) -> None:
    given = " ".join(f"--drafts.{draft} {place}" for draft, place in drafts.items())
    poss(name, f"{command} {given} --device {DEVICE}")
    poss(f"table-{name}", f"compare {out / name} --all")


(out / "logs").mkdir(parents=True, exist_ok=True)
if "text" in args.stages:
    list(map(text, range(stores + 1)))  # one process fills the GPU with 1,024 rows
if "sweeps" in args.stages:
    list(map(prepare, SWEEPS))
    shards = [(name, i, n) for name, n in SWEEPS.items() for i in range(1, n + 1)]
    list(pool.map(lambda s: poss(f"{s[0]}-{s[1]}", f"sweep {out / s[0]} --shard {s[1]}/{s[2]}"), shards))
trained = out.glob("*/choice=*/seed=0/draft-last")
drafts = {"hass": "embedded-hass"} | {"-".join(path.parts[-4:-2]).replace("choice=", ""): path for path in trained}
if "replay" in args.stages:
    measure("replay", f"replay {out}/answers {out}/replay --depth 6", drafts)
if "benchmark" in args.stages:
    questions = f"--suites {args.suites} --limit {asked} --max_new_tokens {new} --baselines [lookup]"
    for name, more in SPEED.items():
        measure(name, f"benchmark {out / name} {questions} --lookup 10 {more}", {"hass": "embedded-hass"})
if failed:
    sys.exit(f"failed: {', '.join(failed)}; see {out}/logs")
