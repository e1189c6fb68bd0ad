"""Acceptance without the target: what a round accepts follows from an answer that the target has written.

    the answer     the | cat sat down | and then it | slept <end>
    round by round root  2 accepted ↑     2 accepted ↑ bonus, and the next root

A round accepts the longest path of its tree along the answer. A store holds the answer's features, and the seed of one
that was drawn, so only drafting is left to do, for many answers at once: about a tenth of the work of decoding. A test
compares replayed rounds with the engine's.
"""

import hashlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from poss_lightning.decoding.blocks import make_drafter
from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.trees import ancestor_mask, rerank
from poss_lightning.decoding.verification import judge
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.evaluation.provenance import (
    check_settings,
    describe_draft,
    describe_training,
    provenance,
    write_run,
)
from poss_lightning.evaluation.rounds import RUN_FILES, UNFINISHED, Row, check_method_names, write_rounds
from poss_lightning.evaluation.stored import Answer, describe_mismatch, find_answers, sampling_settings
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.features.texts import warn_of_training
from poss_lightning.files import check_folder, sha256
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.ranges import Nodes, Position, TreeWidth, check_numbers
from poss_lightning.sampling import Noise, Sampling, TokenSampler
from poss_lightning.target.spec import EmbedHead
from poss_lightning.work import Work

logger = logging.getLogger(__name__)
ROWS = 16  # answers that are replayed side by side
UNKNOWN = -2  # the token after the end of an answer: no draft proposes it


@check_numbers
def replay(
    store: str,
    out: str,
    *,
    drafts: dict[str, str] | None = None,
    depth: Position | None = None,
    nodes: Nodes = 60,
    tree_width: TreeWidth = 10,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Measure acceptance of drafts on stored answers, without the target; write rounds.parquet and run.json.

    The answers must be the target's own; otherwise it warns. Make greedy ones with `poss synthesize --prompts`, which
    names conversations SUITE/ID, or drawn ones with `--answer_temperature` as well; then `poss extract`. The rounds
    have no seconds.

    Args:
        store: features of the answers.
        out: folder to write.
        drafts: name and draft (folder, hub id or shipped draft) of each method, e.g. --drafts.hass
            runs/hass/draft-best.
        depth: draft positions K; each draft's own (the sum of its allocation) by default.
        nodes: nodes of a tree, root included.
        tree_width: children tried per node; 1 drafts chains.
        dtype: what the drafts compute in, whatever the store has: auto (what this device multiplies fastest),
            bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    config = dict(locals())
    check_folder(out, *RUN_FILES)
    config["device"] = device = choose_device(device)
    config["dtype"] = dtype = choose_dtype(dtype, device)
    if not drafts:
        raise ValueError("there are no drafts: name one or more, e.g. --drafts.hass runs/hass/draft-best")
    check_method_names(drafts)
    folder, features = Path(out), FeatureStore(store)
    config |= {"target": features.target.name, "fingerprint": features.target.fingerprint}
    embed_head = features.embed_head().to(device, getattr(torch, dtype))
    loaded = {name: _load(source, features, dtype, device) for name, source in drafts.items()}
    methods = {name: _describe(draft, embed_head, depth, nodes, tree_width) for name, draft in loaded.items()}
    settings = {name: config[name] for name in ("store", "dtype", "fingerprint")}
    check_settings(folder, settings, methods)
    work = Work(folder / UNFINISHED)
    with work.exclusive(wait=False):
        work.claim(settings | {"manifests": [sha256(own / MANIFEST) for own in features.folders], "methods": methods})
        found = {}
        for name, draft in loaded.items():
            part = hashlib.sha256(name.encode()).hexdigest()[:16]  # as a name may hold a slash
            if (receipt := work.receipt(part)) is None:
                receipt = _measure(name, draft, features, embed_head, methods[name])
                work.write_receipt(part, receipt)
            found[name] = receipt
        for warning in dict.fromkeys(warning for receipt in found.values() for warning in receipt["warnings"]):
            logger.warning("%s: %s", store, warning)
        answers = [answer for receipt in found.values() for answer in receipt["answers"]]
        config |= next(iter(found.values()))["sampling"]
        facts = {"command": sys.argv, "config": config, "methods": methods, **provenance(torch.device(device))}
        write_run(folder, facts | {"trainings": {name: describe_training(source) for name, source in drafts.items()}})
        write_rounds(folder, answers)
        work.clear()
    print(f"{out}: {len(answers)} answers of {len(methods)} methods")


def _measure(
    name: str, draft: Specialists, store: FeatureStore, embed_head: EmbedHead, facts: dict[str, Any]
) -> dict[str, Any]:
    """The rounds of a draft, how answers were drawn, and what to be warned of."""
    depth, nodes, width = facts["depth"], facts["nodes"], facts["tree_width"]
    stored = _read_answers(store, draft, embed_head)
    answers = [answer for *_, answer in stored]
    rounds = _replay_all(make_drafter(draft, embed_head, depth, width), answers, nodes, f"replay {name}")
    warnings = describe_mismatch(answers), warn_of_training(f"draft {name}", draft.trained_on, store, range(len(store)))
    return {
        "answers": [_row(name, *each, own) for each, own in zip(stored, rounds, strict=True)],
        "sampling": sampling_settings(answers),
        "warnings": [warning for warning in warnings if warning],
    }


def _load(source: str, features: FeatureStore, dtype: str, device: str) -> Specialists:
    draft = Specialists.from_pretrained(source).to(device, getattr(torch, dtype)).eval()
    if difference := draft.config.target.difference(features.target):
        raise ValueError(f"draft {source} was trained for a different target than the store's: {difference}")
    return draft


def check_store(store: str, draft: DraftConfig | None) -> None:
    """Raise ValueError where the store lacks what such a draft reads, or is no store."""
    features = FeatureStore(store)
    if draft and (difference := draft.target.difference(features.target)):
        raise ValueError(f"{store} is of another target than the draft: {difference}")
    if draft:
        features.select(draft.layers)


def _read_answers(store: FeatureStore, draft: Specialists, embed_head: EmbedHead) -> list[tuple[str, int, Answer]]:
    """Conversation, turn and answer, with the layers that the draft reads."""
    chosen = store.select(draft.config.layers)
    samples = (chosen[i] for i in range(len(chosen)))
    return [(sample.id, turn, one) for sample in samples for turn, one in enumerate(find_answers(sample, embed_head))]


def _describe(
    draft: Specialists, embed_head: EmbedHead, depth: int | None, nodes: int, tree_width: int
) -> dict[str, Any]:
    """The facts of run.json about a draft; raises ValueError where such a tree is impossible."""
    drafter = make_drafter(draft, embed_head, sum(draft.config.allocation) if depth is None else depth, tree_width)
    Fixed(drafter.depth, nodes)
    nodes = min(nodes, drafter.candidates)
    return {"depth": drafter.depth, "nodes": nodes, "tree_width": drafter.tree_width, **describe_draft(draft)}


def replay_rounds(
    draft: Specialists,
    embed_head: EmbedHead,
    samples: Sequence[Sample],
    *,
    depth: int,
    nodes: int = 60,
    tree_width: int = 10,
) -> list[list[list[int]]]:
    """What each round would accept if the target decoded the samples' answers with this draft.

    The answers must be the target's own, greedy or drawn, as `poss synthesize` writes them; in texts of others the
    result says how often the draft hits the text. Rounds whose full depth a cut answer does not show are left out.

    Args:
        draft: in the features' dtype; the samples carry the layers that it reads, and no others.
        embed_head: the target's embedding and head.
        depth: K, positions drafted.
        nodes: nodes of a tree, root included.
        tree_width: children tried per node; 1 drafts chains.

    Returns:
        Accepted tokens by sample, answer and round.
    """
    by_sample = [list(find_answers(sample, embed_head)) for sample in samples]
    drafter = make_drafter(draft, embed_head, depth, tree_width)
    answers = [answer for own in by_sample for answer in own]
    replayed = iter(_replay_all(drafter, answers, nodes))
    return [[next(replayed) for _ in own] for own in by_sample]


def _replay_all(drafter: Drafter, answers: list[Answer], nodes: int, title: str | None = None) -> list[list[int]]:
    """What each round of every answer accepts; those of about the same length side by side. A title shows a bar."""
    alike: dict[Sampling, list[int]] = {}
    for i in sorted(range(len(answers)), key=lambda i: len(answers[i].tokens) - answers[i].start):
        alike.setdefault(answers[i].sampling, []).append(i)
    rounds = {}
    with tqdm(total=len(answers), desc=title, unit="answer", disable=title is None) as bar:
        for places in (group[i : i + ROWS] for group in alike.values() for i in range(0, len(group), ROWS)):
            rounds |= dict(zip(places, _replay(drafter, [answers[i] for i in places], nodes), strict=True))
            bar.update(len(places))
    return [rounds[i] for i in range(len(answers))]


@torch.inference_mode()
def _replay(drafter: Drafter, answers: list[Answer], nodes: int) -> list[list[int]]:
    """What each round of B answers accepts, side by side."""
    weight, depth, budget = drafter.draft.fc.weight, drafter.depth, Fixed(drafter.depth, nodes)
    device = weight.device
    lengths = torch.tensor([len(answer.tokens) for answer in answers], device=device)
    capacity = int(lengths.max()) + depth + 1
    text = _pad([answer.tokens for answer in answers], capacity, UNKNOWN).to(device)  # (B, C)
    draft_input = _pad([answer.draft_input for answer in answers], capacity, 0).to(weight)  # (B, C, R)
    complete = torch.tensor([answer.complete for answer in answers], device=device)
    root = torch.tensor([answer.start for answer in answers], device=device)  # (B,) the root's place in the text
    drafter.start(len(answers), capacity)
    first = int(root.max())
    drafter.append_context(text[:, 1 : first + 1].clamp(min=0), draft_input[:, :first], root)
    drafter.slots.advance_host(root.tolist())
    path = torch.arange(depth + 1, device=device)
    sampler = TokenSampler(len(answers), drafter.draft.config.target.vocab_size, device)
    seeds = [answer.draw.seed if answer.draw else 0 for answer in answers]
    sampler.begin(answers[0].sampling, [[]] * len(answers), seeds=seeds)
    rounds: list[list[int]] = [[] for _ in answers]
    rows = list(rounds)  # those of unfinished answers
    while (active := root < lengths - 1).any():
        if 2 * active.sum() <= len(rows):  # finished rows cost time: drop them when they are many
            kept = active.nonzero()[:, 0].tolist()
            drafter.select(kept)
            sampler.select(kept)
            rows = [rows[i] for i in kept]
            state = (text, draft_input, complete, lengths, root, active)
            text, draft_input, complete, lengths, root, active = (values[kept] for values in state)
        # 1. Draft, and judge by the text: its next token is the target's choice.
        noise = Noise(sampler, root[:, None] + path[1:])
        tree = rerank(drafter.draft_tree(budget, noise), nodes)
        ancestors = ancestor_mask(tree.parents, depth)
        choice = text.gather(1, (root[:, None] + ancestors.sum(-1)).clamp(max=capacity - 1))  # (B, N)
        verdict = judge(tree, ancestors, choice, depth)
        # 2. Count the rounds that the text shows to their full depth.
        counted = active & (complete | (root + depth < lengths))
        accepted = verdict.accepted.minimum(lengths - 1 - complete.long() - root)  # no bonus after an answer's end
        for i in counted.nonzero()[:, 0].tolist():
            rows[i].append(int(accepted[i]))
        # 3. Commit, with the features of the text.
        steps = (verdict.accepted + 1) * active
        places = (root[:, None] + path).clamp(max=capacity - 1)  # (B, K+1)
        on_path = draft_input.gather(1, places[..., None].expand(-1, -1, draft_input.shape[-1]))
        drafter.append_context(verdict.tokens.clamp(min=0), on_path, steps)
        drafter.slots.advance_host(steps.tolist())
        root = root + steps
    return rounds


def _pad(parts: list[Tensor], length: int, fill: int) -> Tensor:
    """Tensors side by side, padded on the right: (B, length, …)."""
    longest = parts[0].new_zeros(length, *parts[0].shape[1:])
    return pad_sequence([*parts, longest], batch_first=True, padding_value=fill)[:-1]


def _row(method: str, name: str, turn: int, answer: Answer, accepted: list[int]) -> Row:
    """An answer of the conversation `name`; what its rounds give may be less than all of it."""
    suite, _, question = name.partition("/")  # a suite's name has no slash, a question's may
    if not suite or not question:
        suite, question = "store", name
    tokens = answer.tokens[answer.start :].tolist()
    return {
        "suite": suite,
        "id": question,
        "turn": turn,
        "method": method,
        "repeat": 0,
        "prompt_tokens": answer.start,
        "new_tokens": min(len(tokens), 1 + sum(accepted) + len(accepted)),
        "accepted": accepted,
        "seconds": {},
        "tokens": tokens,
    }
