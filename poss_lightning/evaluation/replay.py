"""Acceptance without the target: what a round accepts follows from an answer that the target has written.

    the answer     the | cat sat down | and then it | slept <end>
    round by round root  2 accepted ↑     2 accepted ↑ bonus, and the next root

A round accepts the longest path of its tree along the answer. A store holds the answer's features, and the seed of one
that was drawn, so only drafting is left to do, for many answers at once: about a tenth of the work of decoding. A test
compares replayed rounds with the engine's.
"""

import logging
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from poss_lightning.decoding.drafter import make_drafter
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.evaluation.provenance import describe_drafter
from poss_lightning.evaluation.record import record
from poss_lightning.evaluation.rounds import RUN_FILES, AnswerRow, check_method_names
from poss_lightning.evaluation.stored import Answer, describe_mismatch, find_answers, sampling_settings
from poss_lightning.evaluation.stored_rounds import replay_answers
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.source import warn_of_training
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import check_folder, sha256
from poss_lightning.machine import choose_device, choose_dtype

logger = logging.getLogger(__name__)


def replay(
    store: str,
    out: str,
    *,
    drafts: dict[str, str] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    **plan: Any,
) -> None:
    """Measure acceptance of drafts on stored answers, without the target; write rounds.parquet and run.json.

    The answers must be the target's own; otherwise it warns. Make greedy ones with `poss synthesize --prompts`, which
    names conversations SUITE/ID, or drawn ones with `--temperature` as well; then `poss extract`. The rounds
    have no seconds.

    Args:
        store: features of the answers.
        out: folder to write.
        drafts: name and draft (folder, hub id or shipped draft) of each method, e.g. --drafts.hass
            runs/hass/draft-best.
        dtype: what the drafts compute in, whatever the store has: auto (what this device multiplies fastest),
            bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        **plan: what each round proposes; see `TreePlan`.
    """
    if not drafts:
        raise ValueError("there are no drafts: name one or more, e.g. --drafts.hass runs/hass/draft-best")
    check_folder(out, *RUN_FILES)
    check_method_names(drafts)
    sizes, device = TreePlan(tree="fixed", **plan), choose_device(device)
    dtype = choose_dtype(dtype, device)
    features = FeatureStore(store)
    embed_head = features.embed_head().to(device, getattr(torch, dtype))
    drafters, stored, warnings = {}, {}, {}
    for name, source in drafts.items():
        draft = load_draft(source).to(device, getattr(torch, dtype)).eval()
        chosen = check_store(features, draft.config, f"draft {source}")
        if chosen.layers not in stored:
            samples = (chosen[i] for i in range(len(chosen)))
            stored[chosen.layers] = [answer for sample in samples for answer in find_answers(sample, embed_head)]
        drafters[name] = make_drafter(draft, embed_head, sizes)
        warnings[name] = warn_of_training(f"draft {name}", draft.trained_on, features, range(len(features)))
    answers = next(iter(stored.values()))
    for warning in filter(None, [describe_mismatch(answers), *warnings.values()]):
        logger.warning("%s: %s", store, warning)
    config = {"store": store, **asdict(sizes), "dtype": dtype, "device": device, "target": features.target.name}
    config |= {"fingerprint": features.target.fingerprint, **sampling_settings(answers)}
    facts = {
        "command": sys.argv,
        "config": config | {"manifests": [sha256(folder / MANIFEST) for folder in features.folders]},
        "drafts": drafts,
        "methods": {name: describe_drafter(each) for name, each in drafters.items()},
    }
    parts = {
        f"draft-{quote(name, safe='')}": partial(_measure, name, drafter, stored[drafter.specialists.config.aux_layers])
        for name, drafter in drafters.items()
    }
    record(Path(out), facts, parts, torch.device(device), timed=False)


def _measure(method: str, drafter: TreeDrafter, answers: list[Answer]) -> list[AnswerRow]:
    """Return the rounds of a draft; what those of an answer give may be less than all of it."""
    rows: list[AnswerRow] = []
    for answer, accepted in zip(answers, replay_answers(drafter, answers), strict=True):
        suite, _, question = answer.conversation.partition("/")  # a suite's name has no slash, a question's may
        is_named = suite and question
        tokens = answer.tokens[answer.start :].tolist()
        row = AnswerRow(
            method=method,
            suite=suite if is_named else "store",
            id=question if is_named else answer.conversation,
            turn=answer.turn,
            repeat=0,
            prompt_tokens=answer.start,
            new_tokens=min(len(tokens), 1 + sum(accepted) + len(accepted)),
            accepted=accepted,
            seconds={},
            tokens=tokens,
        )
        rows.append(row)
    return rows


def check_store(store: FeatureStore, draft: DraftConfig, name: str = "the draft") -> FeatureStore:
    """Return the store with the layers that a draft reads; ValueError where it lacks them, or has another target."""
    if difference := draft.target.difference(store.target):
        raise ValueError(f"{store.folders[0]} is of another target than {name}: {difference}")
    return store.select(draft.aux_layers)
