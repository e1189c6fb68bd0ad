"""What can be compared: the same prompts, one target, and drafts that are what their names say; and warnings."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from poss_lightning.evaluation.rounds import BASELINES, KEY, read_answers
from poss_lightning.files import public_name
from poss_lightning.target_model.fingerprints import same_weights

CELL = ["choice", "seed"]
# What determines the rounds of a method, in run.json, and its value where run.json does not say.
DRAFT_FACTS = {"weights": None, "depth": None, "nodes": None, "tree_width": None, "tree": "fixed", "lookup": 0}

Runs = Mapping[str, dict[str, Any]]  # the run.json of each folder


def label_trainings(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the answers of the trainings in rounds, and of the baselines that were decoded beside them.

    Outside a sweep all methods are one training each, decoded side by side: `choice` is "" and `seed` 0.

    Raises:
        ValueError: only some rounds are of a sweep, a cell has no rounds of its choice, or an answer is duplicated,
            missing for a method, or to a different prompt.
    """
    if bool(rounds["choice"].isna().all()):
        answers = rounds.assign(choice="", seed=0)
    else:
        if len(apart := rounds.loc[rounds["choice"].isna(), "folder"]):
            raise ValueError(f"{apart.iloc[0]} is not a folder choice=NAME/seed=N, as others are; compare it by itself")
        for (choice, seed), names in rounds.groupby(CELL, sort=False)["method"]:
            if choice not in {*names}:
                known = ", ".join(names.unique())
                raise ValueError(f"choice {choice!r}, seed {seed}: no record has this method; there are {known}")
        answers = rounds[(rounds["method"] == rounds["choice"]) | rounds["method"].isin(BASELINES)]
        answers = answers.astype({"seed": int})
    twice = answers[answers.duplicated([*CELL, "method", *KEY])]
    if len(twice):
        first = twice.iloc[0]
        raise ValueError(
            f"{first['method']!r} answers {_describe(first[KEY])} twice; decode all drafts in one benchmark, or give "
            "the methods of several runs, and the choices of several sweeps, different names"
        )
    _check_same_prompts(answers)
    return answers


def choose_own(answers: pd.DataFrame) -> pd.DataFrame:
    """Return the answers of the methods to measure; of a sweep, the choices without what was decoded beside them."""
    return answers[(answers["choice"] == "") | (answers["method"] == answers["choice"])]


def _check_same_prompts(answers: pd.DataFrame) -> None:
    """Raise ValueError, which names an answer, where answers are to different prompts.

    Prompts of the first turn must have the same length. Prompts of later turns contain the target's answers, in which
    ties may differ. Replayed rounds come from one answer, so the tokens that two replays share must be the same.
    """
    named = {
        f"{method!r}" + f", seed {seed}" * bool(choice): own.set_index(KEY).sort_index()
        for (choice, seed, method), own in answers.groupby([*CELL, "method"], sort=False)
    }
    (first, theirs), *others = named.items()
    for name, own in others:
        if len(differing := own.index.symmetric_difference(theirs.index)):
            raise ValueError(
                f"{name} and {first} differ in {len(differing)} answers, such as {min(map(_describe, differing))}. "
                "Methods are compared on the same prompts"
            )
        is_first = own.index.get_level_values("turn") == 0
        replayed = own["seconds"].isna() & theirs["seconds"].isna() & (own["answer"] != theirs["answer"])
        differing = {
            "prompts of different lengths": own.index[is_first & (own["prompt_tokens"] != theirs["prompt_tokens"])],
            "replays of different answers": [key for key in own.index[replayed] if not _share_tokens(own, theirs, key)],
        }
        for what, (key, *_) in ((what, keys) for what, keys in differing.items() if len(keys)):
            raise ValueError(
                f"{first} and {name} have {what} at {_describe(key)}; methods are compared on the same texts"
            )


def _share_tokens(own: pd.DataFrame, theirs: pd.DataFrame, key: tuple) -> bool:
    """Whether the shorter of two answers is how the longer one begins."""
    rows = [answers.loc[[key]] for answers in (own, theirs)]
    shared = min(int(row["new_tokens"].iloc[0]) for row in rows)
    one, other = (read_answers(row).loc[(*key[:3], row["answer"].iloc[0]), "tokens"] for row in rows)
    return [*one[:shared]] == [*other[:shared]]


def _describe(key: Any) -> str:
    suite, prompt, turn, repeat = key
    return f"{suite}/{prompt} turn {turn} repeat {repeat}"


# --- by run.json ---


def list_methods(runs: Runs) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return folder, name and facts of every method."""
    return ((folder, name, facts) for folder, run in runs.items() for name, facts in run.get("methods", {}).items())


def check_drafts(runs: Runs) -> None:
    """Raise ValueError where one name stands for several drafts, or for one draft with several trees."""
    firsts: dict[str, tuple[str, dict]] = {}
    for folder, name, facts in list_methods(runs):
        facts = {fact: facts.get(fact, usual) for fact, usual in DRAFT_FACTS.items()}
        first, known = firsts.setdefault(name, (folder, facts))
        if other := [fact for fact in facts if facts[fact] != known[fact]]:
            values = ", ".join(f"{fact} {known[fact]} and {facts[fact]}" for fact in other)
            raise ValueError(f"{name!r} of {first} differs from that of {folder} ({values}): rename one")


def check_targets(runs: Runs) -> None:
    """Raise ValueError for runs of several targets; one without its target's fingerprint may be of any."""
    fingerprints = {folder: run.get("config", {}).get("fingerprint") for folder, run in runs.items()}
    known = [(folder, str(fingerprint)) for folder, fingerprint in fingerprints.items() if fingerprint]
    for folder, fingerprint in known[1:]:
        first, earlier = known[0]
        if not same_weights(earlier, fingerprint):
            raise ValueError(
                f"{first} was measured on another target than {folder} (fingerprints {earlier} and {fingerprint}); "
                "methods are compared on one target"
            )


def not_comparable(rounds: pd.DataFrame, runs: Runs) -> list[str]:
    """Return a warning for each input (store, start, config), and each circumstance of a measurement, that differs."""
    values: dict[str, set[str]] = defaultdict(set)
    for folder, run in runs.items():
        options = run.get("config", {})
        facts: dict[str, Any] = {**run.get("cell", {}).get("inputs", {}), "dtype": options.get("dtype")}
        if rounds.loc[rounds["folder"] == folder, "seconds"].notna().any():
            facts |= {"max_new_tokens": options.get("max_new_tokens")}
            facts |= {name: run.get(name) for name in ("machine", "device")}
        for name, value in facts.items():
            if value is not None:
                values[name].add(str(value))
    return [
        f"WARNING: not comparable: these records had {len(different)} different {public_name(name)}"
        for name, different in values.items()
        if len(different) > 1
    ]
