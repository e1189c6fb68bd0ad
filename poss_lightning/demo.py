"""`poss demo`: the main job from end to end, by calling the command line's own commands.

shipped corpus --extract--> features --fit, from a single layer--> hass, poss2 --benchmark--> records --> table, report
"""

import sys
import time
from functools import partial
from importlib.resources import files
from pathlib import Path

from poss_lightning import cli
from poss_lightning.evaluation.records import read_records
from poss_lightning.fitting import fitted
from poss_lightning.reports.summary import group

CORPUS = files("poss_lightning") / "corpus" / "data" / "smollm2-135m.jsonl.gz"


def demo(
    out: str = "runs/demo",
    target: str = "embedded",
    start_from: str = "embedded-hass",
    trained: str | None = "embedded-poss2",
    conversations: int = 200,
    steps: int = 40,
    limit: int = 2,
    new_tokens: int = 64,
    vocabulary_size: int = 32768,
) -> None:
    """From a frozen target to a faster decode in a few minutes on two CPU cores.

    Features of conversations; from a single layer, for equal steps, the same layer on its own features (HASS) and
    position specialists (PosS-2); then real answers by all of them, by a head that was trained for longer, and by
    plain decoding. Stages that are finished are not done again.

    Args:
        out: folder to write.
        target: "embedded", a local folder or a hub id.
        start_from: the single layer: draft folder, hub id or shipped head.
        trained: a head to decode with as it is; null for none.
        conversations: of the shipped corpus.
        steps: training steps of the single layer and of the specialists.
        limit: questions of each of the six suites.
        new_tokens: decoded a turn, at most.
        vocabulary_size: tokens the trained drafts may propose, the commonest in the corpus.
    """
    folder, began = Path(out), time.perf_counter()
    store = str(folder / "features")
    _say(1, f"the target reads {conversations} conversations and keeps its features")
    cli.run("extract", [str(CORPUS), store, "--target", target, "--limit", str(conversations)])
    fit = partial(_fit, folder, store, vocabulary_size, steps, start_from)
    _say(2, f"the single layer {start_from} learns from its own features (HASS, {steps} steps)")
    hass = fit("hass")
    _say(3, f"from the same layer, three specialists for two positions each (PosS-2, {steps} steps)")
    poss2 = fit("poss2")
    _say(4, f"{limit} questions of each suite, answered by plain decoding and by every draft in turn")
    methods = {"single": start_from, "hass": hass, "poss2": poss2} | ({"trained": trained} if trained else {})
    drafts = [f"--drafts.{name}={path}" for name, path in methods.items()]
    options = [f"--target={target}", f"--limit={limit}", f"--new_tokens={new_tokens}"]
    records, report = str(folder / "benchmark"), str(folder / "report.html")
    cli.run("benchmark", [records, *drafts, *options, "--tree=auto"])
    _say(5, "and some again in float32, where the answers must be the target's own to the last token")
    deep = ["--dtype=float32", "--suites=[questions]", "--nodes=20"]  # in every round, whether it pays or not
    cli.run("benchmark", [f"{folder}/exact", *drafts, *options, *deep])
    cli.run("compare", [records, "--reference", "single"])
    cli.run("report", [records, "--runs", str(folder), "--out", report])
    print(_exactness(Path(f"{folder}/exact")))
    print(f"\nThe page: {report}   ({time.perf_counter() - began:.0f} s)")
    print(f"The curves: {Path(sys.executable).parent / 'tensorboard'} --logdir {folder}")


def _fit(folder: Path, store: str, vocabulary_size: int, steps: int, start_from: str, name: str) -> str:
    """Train one draft, if that is not done, and return its folder."""
    options = {
        "data": {"store": store},
        "model": {"vocabulary_size": vocabulary_size, "start_from": start_from},
        "trainer": {"max_steps": steps, "val_check_interval": steps, "check_val_every_n_epoch": None},
    }
    return str(fitted(folder / name, ["demo.yaml", f"draft/{name}.yaml"], options))


def _exactness(folder: Path) -> str:
    """How many float32 answers are plain decoding's, token for token."""
    methods = group(read_records(folder))
    plain = methods.pop("autoregressive")
    pairs = [(answers[key], plain[key]) for answers in methods.values() for key in plain]
    equal = sum(answer.tokens == own.tokens for answer, own in pairs)
    drafted = sum(sum(answer.accepted) for answer, _ in pairs)
    return (
        f"In float32, {equal} of {len(pairs)} answers equal plain decoding's, token for token; "
        f"{drafted} drafted tokens were accepted in them."
    )


def _say(stage: int, what: str) -> None:
    print(f"\n[{stage}/5] {what}", flush=True)
