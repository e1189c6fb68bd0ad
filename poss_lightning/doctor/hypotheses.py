"""The assumptions by which a draft's files may be read differently: `HYPOTHESES`, in the order in which they are tried.

`python -m poss_lightning.doctor.hypotheses` prints them as the table of docs/doctor.md.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import combinations, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poss_lightning.doctor.answers import SWITCHES
from poss_lightning.doctor.load import EPS, LAYERS, SCALING, SHARE, THETA, TIED
from poss_lightning.doctor.variants import Changes, Variant
from poss_lightning.draft.config import DraftConfig, RopeScaling
from poss_lightning.target_model.spec import EmbedHead

Options = Iterable[tuple[str, Changes]]  # by description; {} where a draft has not what would change
DRAFTS: dict[str, Callable[[DraftConfig], bool]] = {
    "all": lambda config: True,
    "EAGLE-2": lambda config: config.predicts_feature,
    "EAGLE-3": lambda config: config.own_head,
    "EAGLE-3, block": lambda config: bool(config.aux_layers),
    "block": lambda config: config.one_pass,
    "several specialists": lambda config: len(config.allocation) > 1,
}


class Hypothesis(NamedTuple):
    """An assumption by which a draft's files may be read differently.

    Attributes:
        name: what they say, or are taken to say.
        drafts: those whose files do, a key of `DRAFTS`.
        change: makes, of a variant, the options that there are instead, the usual ones first.
        fact: the key of config.json that states it; "" where none does.
        in_pairs: whether it is tried together with others, where none alone makes the draft accept anything.
    """

    name: str
    drafts: str
    change: Callable[[Variant], Options]
    fact: str = ""
    in_pairs: bool = True

    def applies(self, config: DraftConfig) -> bool:
        """Return whether a draft's files state it."""
        return DRAFTS[self.drafts](config)


# --- changes of tensors: {} where a draft lacks them ---


def tensors(variant: Variant, names: str, change: Callable[[Tensor], Tensor]) -> Changes:
    """Change the tensors of these names, in all layers."""
    named = [name for name in variant.state if name.removesuffix(".weight").split(".")[-1] in names.split()]
    return {"state": {name: change(variant.state[name]) for name in named}} if named else {}


def heads(variant: Variant, order: Tensor) -> Changes:
    """Reorder the dimensions of each head of queries and keys."""
    names = "q_proj k_proj q_norm k_norm"
    return tensors(variant, names, lambda rows: rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1))


def swapped(variant: Variant, one: str, two: str) -> Changes:
    """Exchange the tensors whose names differ in one of two words alone."""
    either, state = re.compile(rf"(?<![^.])({one}|{two})(?![^.])"), variant.state
    names = {name: either.sub(lambda word: two if word[0] == one else one, name) for name in state}
    found = {name: state[other] for name, other in names.items() if other != name and other in state}
    return {"state": found} if found and all(state[name].shape == found[name].shape for name in found) else {}


def lent(variant: Variant, **rows: Any) -> Changes:
    """Take an embedding, or a head, that is not the target's."""
    ours = variant.embed_head
    parts = {"embedding": ours.embedding, "head": ours.head}
    is_alike = all(each is not None and each.shape == parts[name].shape for name, each in rows.items())
    return {"embed_head": EmbedHead(**parts | rows, scale=ours.scale, cap=ours.cap)} if is_alike else {}


def bfloat16(variant: Variant) -> Changes:
    """Round the draft, the embedding and the head."""
    state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in variant.state.items()}
    rounded = lent(variant, embedding=variant.embed_head.embedding.bfloat16(), head=variant.embed_head.head.bfloat16())
    return rounded | {"state": state}


# --- options that take more than a line ---


def _orders(v: Variant) -> Options:
    layers, count = v.sources, len(v.sources)
    yield "layers from high to low", {"sources": layers[::-1]}
    pairs = [{i: j, j: i} for i, j in combinations(range(count), 2)]
    swaps = [tuple(layers[pair.get(k, k)] for k in range(count)) for pair in pairs]
    for order in permutations(layers) if count == 3 else swaps:
        yield "layers in another order", {"sources": order}


def _single_layers(v: Variant) -> Options:
    count = v.target.spec.layers
    for i, layer in enumerate(v.sources):  # a near one instead, or a usual one
        near = [layer + n for n in (-1, 1, -2, 2, -3, 3)]
        for n in (*near, 1, 2, count // 2, count - 3, count - 2, count - 1, count, count + 1):
            sources = *v.sources[:i], n, *v.sources[i + 1 :]
            yield f"layer {i + 1} of those that are fused", {"sources": sources}


def _scalings(v: Variant) -> Options:
    known, names = getattr(v.target.config, "rope_parameters", None) or {}, {each.name for each in fields(RopeScaling)}
    if names <= {*known}:
        yield "the target's scaling of rotary angles", {"rope_scaling": RopeScaling(**{n: known[n] for n in names})}
    yield "no scaling of rotary angles", {"rope_scaling": None}
    yield "Llama 3.1's scaling of rotary angles", {"rope_scaling": LLAMA_3}
    for factor in (2.0, 4.0, 8.0):
        yield f"linear scaling of rotary angles by {factor:g}", {"rope_scaling": RopeScaling(factor=factor, **LINEAR)}


def _shares(v: Variant) -> Options:
    for share in (0.25, 0.5, 0.75):  # the halves of what rotates go where ours are, and the rest after them
        width, rotated = v.config.target.head_dim, int(v.config.target.head_dim * share) // 2 * 2
        (one, two), (more, rest) = torch.arange(rotated).chunk(2), torch.arange(rotated, width).chunk(2)
        order = torch.cat([one, more, two, rest])
        yield f"the first {share:.0%} of a head's dimensions rotate", heads(v, order) | {"rotary_share": share}


def _halves(v: Variant) -> Options:
    width = v.target.spec.hidden_size  # of what is multiplied with embedding and feature side by side
    halves = tensors(v, "fc scale q_proj k_proj v_proj", lambda x: x.roll(width, -1) if x.shape[-1] == 2 * width else x)
    return [("feature before embedding", halves)]


def _scales(v: Variant) -> Options:
    root, multiplier = v.target.spec.hidden_size**0.5, getattr(v.target.config, "embedding_multiplier", 1)
    names = {"times the root of their width": root, "over the root of their width": 1 / root}
    for factor, scale in (names | {"without the target's factor": 1 / multiplier}).items():
        yield f"embeddings {factor}", {"scale": scale} | tensors(v, "mask", lambda mask: mask * scale)  # noqa: B023


def _maps(v: Variant) -> Options:
    ids = v.state.get("vocabulary", torch.arange(v.target.spec.vocab_size))
    rows, marks = torch.arange(len(ids)).to(ids), v.unread.get("t2d", torch.zeros(1)).nonzero()[:, 0]
    maps = {
        "the tokens that t2d marks": marks,
        "vocabulary as ids": ids - rows,
        "vocabulary as offsets": ids + rows,
    }
    maps |= {"ids of the vocabulary -1": ids - 1, "ids of the vocabulary +1": ids + 1}
    return [(name, {"state": {"vocabulary": kept}}) for name, kept in maps.items() if len(kept) == len(ids)]


def _masks(v: Variant) -> Options:
    tokenizer, row, rows = v.target.tokenizer, v.config.mask_row, v.embed_head.embedding
    tokens = {f"{name} token": getattr(tokenizer, f"{name}_token_id") for name in ("mask", "pad", "eos", "bos", "unk")}
    tokens |= {"last token": len(rows) - 1, "mask token -1": row - 1, "mask token +1": row + 1}
    tokens |= {"first token after the tokenizer's": len(tokenizer)}
    tokens |= {f"added token {i}": i for i in sorted(tokenizer.added_tokens_decoder)[:32]}
    masks = {name: i for name, i in tokens.items() if i is not None and 0 <= i < len(rows) and i != row}
    return [(f"{name} as mask", {"mask_token": i, "state": {"mask": rows[i]}}) for name, i in masks.items()]


# --- the table ---

NORMS = "norm input_norm hidden_norm context_norm q_norm k_norm 0 1 2"  # the last three of fc_norm
LLAMA_3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LINEAR = {"low_freq_factor": 1e17, "high_freq_factor": 1e18, "original_max_position_embeddings": 1}  # slows all waves
ROPE_THETAS = (100, 1e3, 1e4, 3e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
WINDOWS = (4, 8, 16, 32, 64, 128, 512, 1024, 2048, 4096)  # slots
ALIKE = [("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("input_norm", "hidden_norm")]
RARE = [
    ("q_proj", "o_proj"),
    ("q_norm", "k_norm"),
    *((f"{name}_norm", "norm") for name in ("input", "hidden", "context")),
]
RARE += [(f"layers.{i}", f"layers.{j}") for i, j in combinations(range(4), 2)]
# fmt: off
HYPOTHESES = [
    Hypothesis("numbers of all layers", "all", lambda v: [
        (f"layer numbers {n:+}", {"sources": [i + n for i in v.sources]}) for n in (-1, 1, -2, 2)], LAYERS),
    Hypothesis("the last layer", "all", lambda v: [
        (f"the last layer {words}", {"sources": [*v.sources[:-1], v.target.spec.layers + 1 - n]})
        for n, words in enumerate(("as the feature", "before the norm", "but one"))], LAYERS),
    Hypothesis("the feature is normed", "EAGLE-2", lambda v: [
        ("the feature before the norm", {"sources": [v.target.spec.layers], "head_norm": "target"})]),
    Hypothesis("order of the layers", "EAGLE-3, block", _orders, LAYERS),
    Hypothesis("usual layers", "EAGLE-3, block", lambda v: [
        ("EAGLE-3's usual layers", {"sources": (2, v.target.spec.layers // 2, v.target.spec.layers - 3)}),
        ("DFlash's usual layers", {"sources": [
            round(2 + i * (v.target.spec.layers - 4) / max(len(v.sources) - 1, 1)) for i in range(len(v.sources))]})],
        LAYERS),
    Hypothesis("slots of tokens, features, labels", "all", lambda v: [
        (f"{name} one slot {word}", {name: getattr(v, name) + n})
        for name in ("tokens", "features", "labels") for n, word in ((-1, "earlier"), (1, "later"))]),
    Hypothesis("rotary base", "all", lambda v: [
        ("the target's rotary base", {"rope_theta": v.target.spec.rope_theta}),
        *(("rotary base", {"rope_theta": float(theta)}) for theta in ROPE_THETAS)], THETA),
    Hypothesis("scaling of rotary angles", "all", _scalings, SCALING),
    Hypothesis("share of a head that rotates", "all", _shares, SHARE),
    Hypothesis("rotary pairs", "all", lambda v: [
        (f"rotary pairs {order} in the file", heads(v, torch.arange(v.config.target.head_dim).view(shape).T.flatten()))
        for order, shape in (("side by side", (-1, 2)), ("in halves", (2, -1)))]),
    Hypothesis("place of the context", "block", lambda v: [
        (f"context of a block {n:+}", {"context_shift": v.context_shift + n}) for n in (-1, 1)]),
    Hypothesis("weights of norms", "all", lambda v: [
        ("weights of norms less 1 in the file", tensors(v, NORMS, lambda weight: weight + 1))]),
    Hypothesis("which tensor is which", "all", lambda v: [
        (f"{a} and {b} exchanged", swapped(v, a, b)) for a, b in ALIKE]),
    Hypothesis("embedding before feature", "all", _halves),
    Hypothesis("scale of embeddings", "all", _scales),
    Hypothesis("whose embedding and head", "all", lambda v: [
        ("the file's embedding", lent(v, embedding=v.unread.get("embed_tokens.weight"))),
        ("the file's head", lent(v, head=v.unread.get("lm_head.weight"))),
        ("the target's head", tensors(v, "lm_head", lambda _: v.embed_head.restrict(v.state.get("vocabulary")).head))],
        TIED),
    *[Hypothesis(words, "EAGLE-3", lambda v, name=name: [(name, {name: not getattr(v.config, name)})])
      for name, words in (("norm_before_residual", "norm before the residual, or after"),
                          ("norm_output", "feedback normed, or not"))],
    Hypothesis("the head reads normed states", "EAGLE-3, block", lambda _: [
        ("the head reads un-normed states", {"head_norm": "none"})]),
    Hypothesis("the vocabulary's map", "EAGLE-3", _maps),
    Hypothesis("window", "all", lambda v: [
        ("no window", {"window": None}), *((f"a window of {n}", {"window": n}) for n in WINDOWS)]),
    Hypothesis("length of a block", "block", lambda v: [
        ("length of the block", {"depth": n, "allocation": (n,)})
        for n in (*(v.depth + i for i in (-1, 1, -2, 2, -3, 3, -4, 4)), 7, 9, 15)]),
    Hypothesis("mask of a block", "block", _masks),
    Hypothesis("the template's switches", "all", lambda _: [(name, {"texts": name}) for name in SWITCHES]),
    Hypothesis("each single layer", "EAGLE-3, block", _single_layers, LAYERS, in_pairs=False),
    Hypothesis("epsilon of norms", "all", lambda v: [
        ("epsilon of norms", {"norm_eps": eps}) for eps in (v.target.spec.norm_eps, 1e-6, 1e-5)], EPS, in_pairs=False),
    Hypothesis("which tensor is which, rarer", "all", lambda v: [
        (f"{a} and {b} exchanged", swapped(v, a, b)) for a, b in RARE], in_pairs=False),
    Hypothesis("scale of queries", "all", lambda v: [
        (f"queries {factor} the root of a head's dimensions", tensors(
            v, "q_proj q_norm", lambda rows, power=power: rows * v.config.target.head_dim**power))
        for factor, power in (("times", 0.5), ("over", -0.5))], in_pairs=False),
    Hypothesis("rows of the head", "EAGLE-3", lambda v: [
        (f"rows of the head {n:+}", tensors(v, "lm_head", lambda rows, n=n: rows.roll(n, 0))) for n in (-1, 1)],
        in_pairs=False),
    Hypothesis("whose keys", "several specialists", lambda v: [
        ("keys of the specialists", {"kv": "separate" if v.config.kv == "shared" else "shared"})], in_pairs=False),
    Hypothesis("positions of each specialist", "several specialists", lambda v: [
        (f"{n} positions for each specialist", {"allocation": (n,) * v.config.layer_count}) for n in (1, 2, 3, 4)],
        in_pairs=False),
]
# fmt: on


def neighbours(variant: Variant, hypotheses: Iterable[Hypothesis] = HYPOTHESES) -> Iterator[tuple[Hypothesis, Variant]]:
    """Yield the variants in which one more assumption differs, each once, and the assumption."""
    tried = {variant}
    for hypothesis in hypotheses:
        options = hypothesis.change(variant) if hypothesis.applies(variant.config) else ()
        for description, changes in options:
            if variant.can_have(changes) and (
                (other := variant.with_changes(**changes)) not in tried or "state" in changes
            ):
                tried.add(other)
                yield hypothesis, variant.describe(other, description)


def pairs(variant: Variant) -> Iterator[tuple[Hypothesis, Variant]]:
    """Yield the variants in which two assumptions differ, of those that are tried in pairs, and the first of them."""
    paired = [each for each in HYPOTHESES if each.in_pairs]
    for following, hypothesis in enumerate(paired, 1):
        for _, one in neighbours(variant, [hypothesis]):
            yield from ((hypothesis, two) for _, two in neighbours(one, paired[following:]))


def table() -> str:
    """Return the table of docs/doctor.md."""
    rows = [("what the files say", "drafts", "key of config.json"), ("---",) * 3]
    rows += [(each.name, each.drafts, each.fact) for each in HYPOTHESES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
