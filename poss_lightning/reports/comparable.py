"""What can be compared: the same prompts, one target, and drafts that are what their names say; and warnings."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from poss_lightning.evaluation.rounds import ANSWER_KEY, BASELINES, KEY, read_answers
from poss_lightning.files import public_name
from poss_lightning.target_model.fingerprints import same_weights

CELL = ["choice", "seed"]
# What determines the rounds of a method, in run.json, and its value where run.json does not say.
DRAFT_FACTS = {"weights": None, "depth": None, "nodes": None, "tree_width": None, "tree": "fixed", "lookup": 0}

Runs = Mapping[str, dict[str, Any]]  # the run.json of each folder


def label_trainings(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the answers of the trainings in rounds, and of the baselines that were decoded with them.

    Outside a sweep all methods are one training each, decoded side by side: `choice` is "" and `seed` 0. A column
    `is_measured` is false for the baselines of a sweep, which were decoded again in every cell.

    Raises:
        ValueError: only some rounds are of a sweep, a cell has no rounds of its choice, or an answer is duplicated,
            missing for a method, or to a different prompt.
    """
    if bool(rounds["choice"].isna().all()):
        answers = rounds.assign(choice="", seed=0, is_measured=True)
    else:
        if len(apart := rounds.loc[rounds["choice"].isna(), "folder"]):
            raise ValueError(f"{apart.iloc[0]} is not a folder choice=NAME/seed=N, as others are; compare it by itself")
        for (choice, seed), names in rounds.groupby(CELL, sort=False)["method"]:
            if choice not in {*names}:
                methods = ", ".join(names.unique())
                raise ValueError(f"choice {choice!r}, seed {seed}: no record has this method; there are {methods}")
        answers = rounds.assign(is_measured=rounds["method"] == rounds["choice"]).astype({"seed": int})
        answers = answers[answers["is_measured"] | answers["method"].isin(BASELINES)]
    twice = answers[answers.duplicated([*CELL, "method", *KEY])]
    if len(twice):
        first = twice.iloc[0]
        raise ValueError(
            f"{first['method']!r} answers {_describe(first[KEY])} twice; decode all drafts in one benchmark, or give "
            "the methods of several runs, and the choices of several sweeps, different names"
        )
    _check_same_prompts(answers)
    return answers


def _check_same_prompts(answers: pd.DataFrame) -> None:
    """Raise ValueError, which names an answer, where answers are to different prompts.

    Prompts of the first turn must have the same length. Prompts of later turns contain the target's answers, in which
    ties may differ. Replayed rounds come from one answer, so the tokens that replays share must be the same.
    """
    lengths = answers.pivot(index=KEY, columns=[*CELL, "method"], values="prompt_tokens")
    for training, column in lengths.items():
        if (differs := column.isna() != lengths.iloc[:, 0].isna()).any():
            pair = (
                f"{method!r}" + f", seed {seed}" * bool(choice)
                for choice, seed, method in (training, lengths.columns[0])
            )
            raise ValueError(
                f"{' and '.join(pair)} differ in {differs.sum()} answers, such as {_describe(differs.idxmax())}. "
                "Methods are compared on the same prompts"
            )
    is_first = lengths.index.get_level_values("turn") == 0
    for key in lengths.index[is_first & (lengths.nunique(axis=1) > 1)]:
        raise ValueError(f"prompts of different lengths at {_describe(key)}; methods are compared on the same texts")
    replayed = answers[answers["seconds"].isna()]
    replayed = replayed[replayed.groupby(KEY)["answer"].transform("nunique") > 1]
    for key, texts in replayed.join(read_answers(replayed), on=ANSWER_KEY).groupby(KEY):
        longest = [*texts["tokens"].loc[texts["new_tokens"].idxmax()]]
        if not all(
            [*own[:count]] == longest[:count] for own, count in zip(texts["tokens"], texts["new_tokens"], strict=True)
        ):
            raise ValueError(
                f"replays of different answers at {_describe(key)}; methods are compared on the same texts"
            )


def _describe(key: Any) -> str:
    suite, prompt, turn, repeat = key
    return f"{suite}/{prompt} turn {turn} repeat {repeat}"


# --- by run.json ---


def check_drafts(runs: Runs) -> None:
    """Raise ValueError where one name stands for several drafts, or for one draft with several trees."""
    firsts: dict[str, tuple[str, dict]] = {}
    for folder, run in runs.items():
        for name, stated in run.get("methods", {}).items():
            facts = {fact: stated.get(fact, usual) for fact, usual in DRAFT_FACTS.items()}
            first, earlier = firsts.setdefault(name, (folder, facts))
            if other := [f"{fact} {earlier[fact]} and {facts[fact]}" for fact in facts if facts[fact] != earlier[fact]]:
                raise ValueError(f"{name!r} of {first} differs from that of {folder} ({', '.join(other)}): rename one")


def check_targets(runs: Runs) -> None:
    """Raise ValueError for runs of several targets; one without its target's fingerprint may be of any."""
    stated = ((folder, run.get("config", {}).get("fingerprint")) for folder, run in runs.items())
    (first, earlier), *others = [(folder, str(found)) for folder, found in stated if found] or [("", "")]
    for folder, fingerprint in others:
        if not same_weights(earlier, fingerprint):
            raise ValueError(
                f"{first} was measured on another target than {folder} (fingerprints {earlier} and {fingerprint}); "
                "methods are compared on one target"
            )


def not_comparable(rounds: pd.DataFrame, runs: Runs) -> list[str]:
    """Return a warning for each input (store, start, config), and each circumstance of a measurement, that differs."""
    values: dict[str, set[str]] = defaultdict(set)
    timed = {*rounds.loc[rounds["seconds"].notna(), "folder"]}
    for folder, run in runs.items():
        options = run.get("config", {})
        facts: dict[str, Any] = {**run.get("cell", {}).get("inputs", {}), "dtype": options.get("dtype")}
        if folder in timed:
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
