"""Ways to read a draft's files: each row of `HYPOTHESES` changes one assumption of a reading.

A reading is all that stands between files and proposals. At slot t a draft joins the token x_{t+1} with what it reads
of the target there, and proposes x_{t+2}. With `tokens`, `features` or `labels` 1 it is the one of the next slot.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from poss_lightning.doctor.texts import ANSWERS, SWITCHES
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.rope import Rope, RopeScaling, rope_at
from poss_lightning.draft.specialists import DraftConfig, DraftModel
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.spec import EmbedHead
from poss_lightning.work import flat

Changes = dict[str, Any]  # fields of a draft's config, or of a reading


@dataclass(frozen=True)
class Reading:
    """How a draft's files are read.

    Attributes:
        frozen: an embedding, a head and a vocabulary in the files that it does not read, by their names there.
        sources: the target's decoder layers whose outputs it reads, from 1; L + 1 is the feature, after the last norm.
        scale: factor of embeddings.
        norm_first: whether the target's last norm stands before its head.
        rotary: share of the dimensions of a head that rotate.
        places: slots by which the context of a block is placed too late.
        texts: those that it is measured on, see `ask`.
        steps: numbers of the hypotheses that led to it.
        words: what these changed.
    """

    target: Target
    config: DraftConfig
    state: dict[str, Tensor] = field(compare=False)
    frozen: dict[str, Tensor] = field(compare=False)
    embed_head: EmbedHead
    sources: tuple[int, ...]
    tokens: int = 0
    features: int = 0
    labels: int = 0
    scale: float = 1.0
    norm_first: bool = False
    rotary: float = 1.0
    places: int = 0
    texts: str = ANSWERS
    steps: tuple[int, ...] = field(default=(), compare=False)
    words: tuple[str, ...] = field(default=(), compare=False)

    @property
    def depth(self) -> int:
        """Positions drafted."""
        return sum(self.config.allocation)

    @property
    def name(self) -> str:
        """The numbers of the hypotheses that led to it."""
        return "-".join(map(str, self.steps))

    @cached_property
    def draft(self) -> DraftModel:
        """The draft as it is read; ValueError where config and weights contradict each other."""
        with torch.device("meta"):
            draft = make_draft(self.config, self.state.get("vocabulary"))
        draft.load_state_dict(self.state, assign=True)
        draft.rope_at = self._rope_at
        if self.norm_first:
            norm: Any = self.target.model.base_model.norm
            draft.head_input = lambda predicted: norm(predicted)
        return draft.requires_grad_(False).eval()

    def _rope_at(self, positions: Tensor) -> Rope:
        config, late = self.config, self.places * (positions.shape[-1] != self.config.depth + 1)

        def spread(frequencies: Tensor) -> Tensor:  # those of the dimensions that rotate are further apart
            rotates = torch.arange(len(frequencies), device=positions.device) < int(len(frequencies) * self.rotary)
            spread = frequencies ** (1 / self.rotary) * rotates
            return config.rope_scaling(spread) if config.rope_scaling else spread

        sizes: Any = config.target.head_dim, config.rope_theta or config.target.rope_theta, spread
        return rope_at(positions + late, *sizes)

    def changed(self, **values: Any) -> "Reading":
        """Change fields; an error of many kinds says that there is no such reading."""
        if sources := tuple(values.get("sources", ())):
            feature = self.target.spec.layers + 1
            if len(sources) != len(self.sources) or {*sources} - {*range(1, feature + 1)}:
                raise ValueError("there are no such layers")
            named = self.config.aux_layers and max(sources) < feature - 1
            values |= {"sources": sources} | ({"inner_layers": sources} if named else {})
        stated = {name: values.pop(name) for name in [*values] if hasattr(self.config, name)}
        values["state"] = self.state | values.get("state", {})
        return replace(self, config=replace(self.config, **stated), **values)

    def others(self) -> Iterator["Reading"]:
        """Yield the readings in which one more assumption differs, each once."""
        known = [self]
        for number, (words, change) in enumerate(HYPOTHESES):
            with suppress(ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError):
                other = self.changed(**change(self))
                is_same = all(other.state[name] is each for name, each in self.state.items())
                if not (is_same and other in known) and other.draft:  # which raises where it cannot be
                    known += [other] * is_same
                    said = ", ".join([words, *changes(self.stated(), other.stated())])
                    yield replace(other, steps=(*self.steps, number), words=(*self.words, said))

    def proposing(self, tokens: Tensor) -> "Reading":
        """Let it propose these tokens alone."""
        rows = self.state.get("vocabulary", torch.arange(self.target.spec.vocab_size, device=tokens.device))
        kept = torch.isin(rows, tokens).index_fill(0, torch.tensor([0], device=tokens.device), True)  # never none
        cut = {"vocabulary": rows[kept]} | tensors(self, "lm_head", lambda weight: weight[kept])["state"]
        return self.changed(state=cut, vocabulary_size=int(kept.sum()))

    def stated(self) -> dict[str, Any]:
        """The fields of its config."""
        return asdict(self.config) | {"inner_layers": [*self.sources]}

    def is_written(self) -> bool:
        """Return whether config and weights of a draft can say all of it."""
        named = self.config.aux_layers or (self.target.spec.layers + 1,)
        return self == Reading(self.target, self.config, self.state, self.frozen, self.target.embed_head, named)


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe values that differ, with dots between nested names."""
    old, new = flat(old), flat(new)
    return [f"{name} {old.get(name)} → {value}" for name, value in new.items() if old.get(name) != value]


# --- changes of tensors ---


def tensors(reading: Reading, names: str, change: Callable[[Tensor], Tensor]) -> Changes:
    """Change the tensors of these names, in all layers."""
    named = [name for name in reading.state if name.removesuffix(".weight").split(".")[-1] in names.split()]
    return {"state": {name: change(reading.state[name]) for name in named}}


def swapped(reading: Reading, one: str, two: str) -> Changes:
    """Exchange the tensors whose names differ in one of two words alone."""
    words = re.compile(rf"(?<![^.])({one}|{two})(?![^.])")
    names = {name: words.sub(lambda word: two if word[0] == one else one, name) for name in reading.state}
    return {"state": {name: reading.state[other] for name, other in names.items() if other in names}}


def heads(reading: Reading, order: Tensor) -> Changes:
    """Reorder the dimensions of each head of queries and keys."""
    names = "q_proj k_proj q_norm k_norm"
    return tensors(reading, names, lambda rows: rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1))


def lent(reading: Reading, **rows: Tensor) -> Changes:
    """Take an embedding, or a head, that is not the target's."""
    parts: Changes = {part: getattr(reading.embed_head, part) for part in ("embedding", "head", "scale", "cap")} | rows
    return {"embed_head": EmbedHead(**parts)}


def bfloat16(reading: Reading) -> Changes:
    """Round the draft, the embedding and the head."""
    state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in reading.state.items()}
    parts = {name: getattr(reading.embed_head, name).bfloat16() for name in ("embedding", "head")}
    return lent(reading, **parts) | {"state": state}


# --- what the hypotheses are made of ---


def _scaled(reading: Reading, power: float) -> Changes:
    """Scale embeddings, and a mask among them, by a power of their width."""
    factor = reading.target.spec.hidden_size**power
    return {"scale": factor} | tensors(reading, "mask", lambda mask: mask * factor)


def _rotated(reading: Reading, share: float) -> Changes:
    """Rotate the first of a head's dimensions: their halves go where ours are, and the rest after them."""
    width = reading.config.target.head_dim
    rotated = int(width * share) // 2 * 2
    (one, two), (more, rest) = torch.arange(rotated).chunk(2), torch.arange(rotated, width).chunk(2)
    return heads(reading, torch.cat([one, more, two, rest])) | {"rotary": share}


def _halves(rows: Tensor, reading: Reading) -> Tensor:
    """Exchange what is multiplied with embedding and feature, where the two are side by side."""
    width = reading.target.spec.hidden_size
    return rows.roll(width, -1) if rows.shape[-1] == 2 * width else rows


def _masked(reading: Reading, token: int) -> Changes:
    """Take the embedding of a different token as the mask of a block."""
    row = reading.embed_head.embedding[token]
    return tensors(reading, "mask", lambda _: row) | {"mask_token": token}


def _scaling(reading: Reading) -> RopeScaling:
    return RopeScaling(**{each.name: reading.target.config.rope_parameters[each.name] for each in fields(RopeScaling)})


NORMS = "norm input_norm hidden_norm context_norm q_norm k_norm 0 1 2"
LLAMA_3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# fmt: off
HYPOTHESES: list[tuple[str, Callable[[Reading], Changes]]] = [  # what is read differently, and how
    *[(f"layer numbers {n:+}", lambda r, n=n: {"sources": [i + n for i in r.sources]}) for n in (-1, 1, -2, 2)],
    *[(f"the last layer {words}", lambda r, n=n: {"sources": [*r.sources[:-1], r.target.spec.layers + 1 - n]})
      for n, words in enumerate(("as the feature", "before the norm", "but one"))],
    ("the feature before the norm", lambda r: {"sources": [r.target.spec.layers], "norm_first": True}),
    *[("layers in another order", lambda r, order=order: {"sources": [r.sources[i] for i in order]})
      for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1))],
    ("layers from high to low", lambda r: {"sources": r.sources[::-1]}),
    ("EAGLE-3's usual layers", lambda r: {"sources": [2, r.target.spec.layers // 2, r.target.spec.layers - 3]}),
    ("DFlash's usual layers", lambda r: {"sources": [
        round(2 + i * (r.target.spec.layers - 4) / (len(r.sources) - 1)) for i in range(len(r.sources))]}),
    *[(f"{name} one slot {word}", lambda r, name=name, n=n: {name: getattr(r, name) + n})
      for name in ("tokens", "features", "labels") for n, word in ((-1, "earlier"), (1, "later"))],
    ("the target's rotary base", lambda r: {"rope_theta": r.target.spec.rope_theta}),
    ("the target's scaling of rotary angles", lambda r: {"rope_scaling": _scaling(r)}),
    ("no scaling of rotary angles", lambda r: {"rope_scaling": None}),
    *[("rotary base", lambda r, theta=theta: {"rope_theta": theta}) for theta in (1e4, 1e5, 5e5, 1e6, 1e7)],
    ("Llama 3.1's scaling of rotary angles", lambda r: {"rope_scaling": LLAMA_3}),
    *[(f"the first {share:.0%} of a head's dimensions rotate", lambda r, share=share: _rotated(r, share))
      for share in (0.25, 0.5, 0.75)],
    *[(f"rotary pairs {words} in the file", lambda r, shape=shape: heads(
        r, torch.arange(r.config.target.head_dim).view(shape).T.flatten()))
      for words, shape in (("side by side", (-1, 2)), ("in halves", (2, -1)))],
    *[(f"context of a block {n:+}", lambda r, n=n: {"places": r.places + n} if r.config.one_pass else {})
      for n in (-1, 1)],
    ("weights of norms less 1 in the file", lambda r: tensors(r, NORMS, lambda weight: weight + 1)),
    *[(f"{one} and {two} exchanged", lambda r, one=one, two=two: swapped(r, one, two))
      for one, two in (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("input_norm", "hidden_norm"))],
    ("feature before embedding", lambda r: tensors(r, "fc scale q_proj k_proj v_proj", lambda rows: _halves(rows, r))),
    ("embeddings times the root of their width", lambda r: _scaled(r, 0.5)),
    ("embeddings over the root of their width", lambda r: _scaled(r, -0.5)),
    ("the file's embedding", lambda r: lent(r, embedding=r.frozen["embed_tokens.weight"])),
    ("the file's head", lambda r: lent(r, head=r.frozen["lm_head.weight"])),
    ("the target's head", lambda r: tensors(
        r, "lm_head", lambda _: r.embed_head.restrict(r.state.get("vocabulary")).head)),
    *[(name, lambda r, name=name: {name: not getattr(r.config, name)})
      for name in ("norm_before_residual", "norm_output")],
    ("the tokens that t2d marks", lambda r: tensors(r, "vocabulary", lambda _: r.frozen["t2d"].nonzero()[:, 0])),
    ("vocabulary as ids", lambda r: tensors(r, "vocabulary", lambda ids: ids - torch.arange(len(ids)).to(ids))),
    ("vocabulary as offsets", lambda r: tensors(r, "vocabulary", lambda ids: ids + torch.arange(len(ids)).to(ids))),
    ("no window", lambda r: {"window": None}),
    *[("length of the block", lambda r, n=n: {"depth": r.depth + n, "allocation": (r.depth + n,)}
       if r.config.one_pass else {}) for n in (-1, 1, -2, 2, -3, 3, -4, 4)],
    *[(f"{name} token as mask", lambda r, name=name: _masked(r, getattr(r.target.tokenizer, f"{name}_token_id")))
      for name in ("mask", "pad", "eos", "bos", "unk")],
    ("last token as mask", lambda r: _masked(r, r.target.spec.vocab_size - 1)),
    *[(name, lambda r, name=name: {"texts": name}) for name in SWITCHES],
]
WHOLE = len(HYPOTHESES)  # pairs are tried of these
HYPOTHESES += [
    *[(f"layer {i + 1} of those that are fused", lambda r, i=i, n=n: {
        "sources": [*r.sources[:i], n, *r.sources[i + 1:]]} if r.config.aux_layers and i < len(r.sources) else {})
      for i in range(8) for n in range(1, 100)],
    *[(f"layers {i + 1} and {j + 1} of those that are fused exchanged", lambda r, i=i, j=j: {
        "sources": [r.sources[{i: j, j: i}.get(k, k)] for k in range(len(r.sources))]})
      for i, j in combinations(range(8), 2)],
    *[("rotary base", lambda r, theta=theta: {"rope_theta": theta}) for theta in (100, 1e3, 3e4, 1.5e5, 2.5e5, 5e6)],
    *[(f"linear scaling of rotary angles by {factor}", lambda r, factor=factor: {"rope_scaling": RopeScaling(
        factor=factor, low_freq_factor=1e17, high_freq_factor=1e18, original_max_position_embeddings=1)})
      for factor in (2, 4, 8)],  # no wave turns so often: all are slowed
    *[("epsilon of norms", lambda r, eps=eps: {"norm_eps": eps or r.target.spec.norm_eps}) for eps in (0, 1e-6, 1e-5)],
    *[(f"{one} and {two} exchanged", lambda r, one=one, two=two: swapped(r, one, two))
      for one, two in (("q_proj", "o_proj"), ("q_norm", "k_norm"), *((name, "norm") for name in NORMS.split()[1:4]),
                       *((f"layers.{i}", f"layers.{j}") for i, j in combinations(range(4), 2)))],
    *[(f"queries {words} the root of a head's dimensions", lambda r, power=power: tensors(
        r, "q_proj q_norm", lambda rows: rows * r.config.target.head_dim**power))
      for words, power in (("times", 0.5), ("over", -0.5))],
    ("embeddings without the target's factor", lambda r: {"scale": 1 / r.target.config.embedding_multiplier}),
    *[(f"{words} {n:+}", lambda r, name=name, n=n: tensors(
        r, name, lambda rows: rows + n if name == "vocabulary" else rows.roll(n, 0)))
      for name, words in (("vocabulary", "ids of the vocabulary"), ("lm_head", "rows of the head")) for n in (-1, 1)],
    ("keys of the specialists", lambda r: {"kv": "separate" if r.config.kv == "shared" else "shared"}
     if r.config.layer_count > 1 else {}),
    *[("length of the block", lambda r, n=n: {"depth": n, "allocation": (n,)} if r.config.one_pass else {})
      for n in (7, 9, 15)],
    *[(f"{n} positions for each specialist", lambda r, n=n: {"allocation": (n,) * r.config.layer_count}
       if r.config.layer_count > 1 and not r.config.one_pass else {}) for n in (1, 2, 3, 4)],
    *[(f"a window of {n}", lambda r, n=n: {"window": n}) for n in (4, 8, 16, 32, 64, 128, 512, 1024, 2048, 4096)],
    *[(f"mask token {n:+}", lambda r, n=n: _masked(r, r.config.mask_row + n)) for n in (-1, 1)],
    *[("added token as mask", lambda r, i=i: _masked(r, sorted(r.target.tokenizer.added_tokens_decoder)[i]))
      for i in range(32)],
    ("the first token after the tokenizer's as mask", lambda r: _masked(r, len(r.target.tokenizer))),
]
# fmt: on
