"""`poss demo`: the main job from end to end, by calling the command line's own commands.

shipped corpus --extract--> features --fit--> eagle --fit--> hass, poss2 --benchmark--> records --> table, report
"""

import sys
import time
from functools import partial
from importlib.resources import files
from pathlib import Path

from poss_lightning import cli
from poss_lightning.evaluation.records import read_records
from poss_lightning.fitting import fitted

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"


def demo(
    out: str = "runs/demo",
    target: str = "embedded",
    conversations: int = 400,
    start_steps: int = 300,
    steps: int = 80,
    limit: int = 2,
    new_tokens: int = 40,
    depth: int = 3,
    nodes: int = 10,
    top_k: int = 4,
    vocabulary_size: int = 8192,
) -> None:
    """From a frozen target to a faster decode in about ten minutes on two CPU cores.

    Features of conversations; a single layer trained on them (EAGLE); from it, for equal steps, the same layer on its
    own features (HASS) and position specialists (PosS-2); then real answers by all of them and by plain decoding.
    Stages that are finished are not done again.

    Args:
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        conversations: of the shipped corpus.
        start_steps: training steps of the single layer both others start from.
        steps: training steps of each of those.
        limit: questions of each of the six suites.
        new_tokens: decoded a turn, at most.
        depth: draft positions of a tree; small, as the drafts are young and the machine may be.
        nodes: of a tree, root included.
        top_k: children tried a node.
        vocabulary_size: tokens the drafts may propose, the commonest in the corpus.
    """
    folder, began = Path(out), time.perf_counter()
    store = str(folder / "features")
    _say(1, f"the target reads {conversations} conversations and keeps its features")
    cli.run("extract", [str(CORPUS), store, "--target", target, "--limit", str(conversations)])
    _say(2, f"a single layer learns to predict them (EAGLE, {start_steps} steps)")
    fit = partial(_fit, folder, store, vocabulary_size)
    eagle = fit("eagle", start_steps)
    _say(3, f"from it, the same layer on its own features (HASS, {steps} steps)")
    hass = fit("hass", steps, eagle)
    _say(4, f"from it, three specialists for two positions each (PosS-2, {steps} steps)")
    poss2 = fit("poss2", steps, eagle)
    _say(5, f"{limit} questions of each suite, answered by plain decoding and by every draft in turn")
    drafts = [f"--drafts.{name}={path}" for name, path in (("eagle", eagle), ("hass", hass), ("poss2", poss2))]
    sizes = {"limit": limit, "new_tokens": new_tokens, "depth": depth, "nodes": nodes, "top_k": top_k}
    options = [f"--{name}={value}" for name, value in {"target": target, **sizes}.items()]
    records, report = str(folder / "benchmark"), str(folder / "report.html")
    cli.run("benchmark", [records, *drafts, *options])
    _say(6, "and some again in float32, where the answers must be the target's own to the last token")
    cli.run("benchmark", [f"{folder}/exact", *drafts, *options, "--dtype=float32", "--suites=[questions]"])
    cli.run("compare", [records, "--reference", "hass"])
    cli.run("report", [records, "--runs", str(folder), "--out", report])
    print(_exactness(Path(f"{folder}/exact")))
    print(f"\nThe page: {report}   ({time.perf_counter() - began:.0f} s)")
    print(f"The curves: {Path(sys.executable).parent / 'tensorboard'} --logdir {folder}")


def _fit(folder: Path, store: str, vocabulary_size: int, name: str, steps: int, start_from: str | None = None) -> str:
    """Train one draft, if that is not done, and return its folder."""
    options = {
        "data": {"store": store},
        "model": {"vocabulary_size": vocabulary_size, "start_from": start_from},
        "trainer": {"max_steps": steps, "val_check_interval": steps, "check_val_every_n_epoch": None},
    }
    return str(fitted(folder / name, ["demo.yaml", f"draft/{name}.yaml"], options))


def _exactness(folder: Path) -> str:
    """How many float32 answers are plain decoding's, token for token."""
    answers: dict[tuple, dict[str, list[int]]] = {}
    for record in read_records(folder):
        answers.setdefault((record.suite, record.id, record.turn), {})[record.method] = record.tokens
    pairs = [
        tokens == by_method["autoregressive"]
        for by_method in answers.values()
        for method, tokens in by_method.items()
        if method != "autoregressive"
    ]
    return f"In float32, {sum(pairs)} of {len(pairs)} answers equal plain decoding's, token for token."


def _say(stage: int, what: str) -> None:
    print(f"\n[{stage}/6] {what}", flush=True)
