"""Greedy acceptance without the target: what a round accepts follows from an answer that the target has written.

    the answer     the | cat sat down | and then it | slept <end>
    round by round root  2 accepted ↑     2 accepted ↑ bonus, and the next root

A greedy round takes the longest path of its tree along the answer, whose features a store holds. So drafting is all
there is to do, for many answers at once: some ten times less than decoding (tests/test_replay.py holds both together).
"""

import gzip
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.trees import rerank
from poss_lightning.decoding.verification import judge
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import check_settings, describe, provenance
from poss_lightning.evaluation.records import NAMES, Record, check_names, to_line
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.files import atomic, records_lock
from poss_lightning.machine import choose_device, choose_dtype
from poss_lightning.target.spec import EmbedHead

logger = logging.getLogger(__name__)
UNKNOWN = -2  # what the target says behind the end of an answer: no draft's token
# In bfloat16 the target, reading its own greedy answers, would write 0.5 to 2 % of their tokens otherwise (ties), and
# one of the first 8 in 7 to 13 % of them; of others' texts 17 and 51 % (the embedded target).
MAX_MISMATCH, OPENING, OPENED = 0.05, 8, 0.25  # most of the tokens; the first so many; most answers that stray in these


class Answer(NamedTuple):
    """One assistant's answer of a stored sample, as far as it is the target's own."""

    tokens: Tensor  # (T,) prompt and answer
    read: Tensor  # (T, R) what the draft reads after each
    start: int  # of the answer
    whole: bool  # it ends because the target ended it; else it was cut, and what would have followed is not known


def replay(
    out: str,
    store: str,
    drafts: dict[str, str] | None = None,
    depth: int | None = None,
    nodes: int = 60,
    tree_width: int = 10,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Measure acceptance of drafts on stored answers, without the target, and write records.jsonl.gz and run.json.

    The answers must be the target's own greedy ones, of conversations named SUITE/ID (`poss answer`, then
    `poss extract`); of others it warns. Records say what each round accepts, and nothing of time.

    Args:
        out: folder to write.
        store: features of the answers.
        drafts: name and draft (folder, hub id or shipped head) of each method, e.g. --drafts.hass runs/hass/draft-best.
        depth: draft positions K; each draft's own (the sum of its allocation) by default.
        nodes: of a tree, root included.
        tree_width: children tried a node; 1 drafts chains.
        dtype: that drafts compute in, whatever the store has: auto (what this device multiplies fastest), bfloat16,
            float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    config = dict(locals())
    config["device"] = device = choose_device(device)
    config["dtype"] = dtype = choose_dtype(dtype, device)
    if not drafts:
        raise ValueError("there are no drafts: name one or more, e.g. --drafts.hass runs/hass/draft-best")
    check_names(drafts)
    folder, features = Path(out), FeatureStore(store)
    if (other := folder / NAMES[0]).exists():
        raise ValueError(f"{other} was written by `poss benchmark`: choose another folder")
    embed_head, loaded, methods = features.embed_head().to(device, getattr(torch, dtype)), {}, {}
    for name, source in drafts.items():
        loaded[name] = draft = Specialists.from_pretrained(source).to(device, embed_head.embedding.dtype).eval()
        if difference := draft.config.target.difference(features.target):
            raise ValueError(f"draft {source} was trained for another target than the store's: {difference}")
        deep = sum(draft.config.allocation) if depth is None else depth
        methods[name] = {"depth": deep, "nodes": nodes, "tree_width": tree_width, **describe(draft)}
    check_settings(folder, {"store": store, "dtype": dtype}, methods)
    with records_lock(folder):
        records = []
        for number, (name, draft) in enumerate(loaded.items()):
            chosen = features.select(draft.config.layers)
            samples = [chosen[i] for i in range(len(chosen))]
            if number == 0 and (told := greedy_mismatch(samples)):
                logger.warning("%s: %s", store, told)
            deep = methods[name]["depth"]
            total = sum(1 for sample in samples for _ in answers(sample))
            with tqdm(total=total, desc=f"replay {name}", unit="answer") as bar:
                replayed = replay_rounds(draft, embed_head, samples, deep, nodes, tree_width, done=bar.update)
            for sample, rounds in zip(samples, replayed, strict=True):
                records += _records(name, sample, rounds)
        facts = {"command": sys.argv, "config": config, "methods": methods, **provenance(embed_head.embedding.device)}
        with atomic(folder / "run.json") as path:
            path.write_text(json.dumps(facts, indent=1) + "\n")
        with atomic(folder / NAMES[1]) as path:
            path.write_bytes(gzip.compress("".join(f"{to_line(own)}\n" for own in records).encode(), 9, mtime=0))
    print(f"{out}: {len(records)} records of {len(methods)} methods")


def greedy_mismatch(samples: Sequence[Sample]) -> str | None:
    """What is wrong with answers that the target would not write: too many tokens are not its likeliest ones.

    Such are texts of others, sampled ones, and answers that a template changes when it renders them (Qwen3's, cut
    while it thinks, behind an empty thought: few tokens, but all at the beginning).
    """
    strays = []
    for sample in samples:
        for answer in answers(sample):
            here = slice(answer.start - 1, len(answer.tokens) - 1)
            strays.append(sample.greedy[here] != answer.tokens[answer.start :])
    if not strays:
        return None
    share = float(torch.cat(strays).float().mean())
    opened = sum(bool(own[:OPENING].any()) for own in strays) / len(strays)
    if share <= MAX_MISMATCH and opened <= OPENED:
        return None
    return (
        f"the answers are not the target's own greedy ones: {100 * share:.1f} % of their tokens are not what it would "
        f"write there, and {100 * opened:.0f} % of them stray within {OPENING} tokens; acceptance is that of this text"
    )


def replay_rounds(
    draft: Specialists,
    embed_head: EmbedHead,
    samples: Sequence[Sample],
    depth: int,
    nodes: int = 60,
    tree_width: int = 10,
    rows: int = 16,
    done: Callable[[int], object] = lambda count: None,
) -> list[list[list[int]]]:
    """What every round would accept if the target decoded the samples' answers with this draft.

    The answers must be the target's own greedy ones, as `poss synthesize` writes them; of others' texts it is told how
    often a draft hits the text. Rounds that a cut answer does not hold to their full depth are left out.

    Args:
        draft: in the features' dtype; the samples carry the layers that it reads, and no others.
        embed_head: the target's embedding and head.
        depth: K, positions drafted.
        nodes: of a tree, root included.
        tree_width: children tried a node; 1 drafts chains.
        rows: answers drafted side by side.
        done: told of answers as they are, how many at once.

    Returns:
        Of every sample, of each of its answers, the accepted tokens round by round.
    """
    found = [list(answers(sample)) for sample in samples]
    every = [answer for own in found for answer in own]
    order = sorted(range(len(every)), key=lambda i: len(every[i].tokens) - every[i].start)  # those of like length
    drafter, rounds = Drafter(draft, embed_head, depth, tree_width), {}
    for begin in range(0, len(order), rows):
        places = order[begin : begin + rows]
        rounds |= dict(zip(places, _replay(drafter, [every[i] for i in places], nodes), strict=True))
        done(len(places))
    replayed = iter(rounds[i] for i in range(len(every)))
    return [[next(replayed) for _ in own] for own in found]


def answers(sample: Sample) -> Iterator[Answer]:
    """The sample's answers. Of one that the target did not end, the template's own end is left out.

    One that the sample ends with may have been cut by `poss extract`, and is taken for cut.
    """
    for start, stop in sample.spans:
        if stop - start < 2 or start < 1:
            continue  # no root, or nothing behind it
        whole = bool(sample.greedy[stop - 2] == sample.tokens[stop - 1]) and stop < len(sample.tokens)
        known = stop if whole else stop - 1
        yield Answer(sample.tokens[:known], sample.read[:known], start, whole)


@torch.inference_mode()
def _replay(drafter: Drafter, given: list[Answer], nodes: int) -> list[list[int]]:
    weight, depth = drafter.draft.fc.weight, drafter.depth
    device = weight.device
    lengths = torch.tensor([len(answer.tokens) for answer in given], device=device)
    reach = int(lengths.max()) + depth + 1
    text = _laid([answer.tokens for answer in given], reach, UNKNOWN).to(device)  # (B, reach)
    read = _laid([answer.read for answer in given], reach, 0).to(weight)  # (B, reach, R)
    whole = torch.tensor([answer.whole for answer in given], device=device)
    root = torch.tensor([answer.start for answer in given], device=device)  # (B,) the root's place in the text
    drafter.start(len(given), reach)
    first = int(root.max())
    drafter.read(text[:, 1 : first + 1].clamp(min=0), read[:, :first], root)
    drafter.slots.note(root.tolist())
    ahead = torch.arange(depth + 1, device=device)
    rounds: list[list[int]] = [[] for _ in given]
    rows = list(rounds)  # the lists of those that are still drafted
    while (going := root < lengths - 1).any():
        if 2 * going.sum() <= len(rows):  # finished ones cost time: forget them now and then
            kept = going.nonzero()[:, 0].tolist()
            drafter.select(kept)
            rows = [rows[i] for i in kept]
            text, read, whole, lengths, root, going = (x[kept] for x in (text, read, whole, lengths, root, going))
        tree = rerank(drafter.draft_tree(Fixed(depth, nodes)), nodes)
        verdict = judge(tree, *_written(text, tree.tokens), root + 1, depth)
        counts = (verdict.accepted + 1) * going
        seen = going & (whole | (root + depth < lengths))
        before = verdict.accepted.minimum(lengths - 1 - whole.long() - root)  # behind an answer's end is no bonus
        for row, accepted, counted in zip(rows, before.tolist(), seen.tolist(), strict=True):
            if counted:
                row.append(accepted)
        here = (root[:, None] + ahead).clamp(max=reach - 1)  # (B, K+1)
        left = read.gather(1, here[..., None].expand(-1, -1, read.shape[-1]))
        drafter.read(verdict.tokens.clamp(min=0), left, counts)
        drafter.slots.note(counts.tolist())
        root = root + counts
    return rounds


def _written(text: Tensor, tokens: Tensor) -> tuple:
    """`judge`'s logits, where and choose, for a target whose choice is what it has written."""

    def choose(_: Tensor, place: Tensor) -> Tensor:
        return text.gather(1, place.clamp(max=text.shape[1] - 1)[:, None])[:, 0]

    return text.new_zeros(1, 1), torch.zeros_like(tokens), choose


def _laid(parts: Iterable[Tensor], length: int, fill: int) -> Tensor:
    """Side by side, (B, length, …), filled up on the right."""
    padded = pad_sequence(list(parts), batch_first=True, padding_value=fill)  # (B, longest, …)
    more = padded.new_full((len(padded), length - padded.shape[1], *padded.shape[2:]), fill)
    return torch.cat([padded, more], dim=1)


def _records(method: str, sample: Sample, rounds: list[list[int]]) -> Iterator[Record]:
    """A record an answer, of as much of it as its rounds hold."""
    suite, _, name = sample.id.partition("/")  # a suite's name has none, a question's may
    for turn, (answer, accepted) in enumerate(zip(answers(sample), rounds, strict=True)):
        tokens = answer.tokens[answer.start :][: 1 + sum(count + 1 for count in accepted)].tolist()
        yield Record(
            suite=suite if suite and name else "store",
            id=name if suite and name else sample.id,
            turn=turn,
            method=method,
            repeat=0,
            seed=0,
            prompt_tokens=answer.start,
            new_tokens=len(tokens),
            accepted=accepted,
            seconds={},
            tokens=tokens,
            text="",
        )
