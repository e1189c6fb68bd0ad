"""Ways to read a draft's files: each row of `HYPOTHESES` changes one assumption of a reading.

A reading is all that stands between files and proposals. At slot t a draft joins the token x_{t+1} with what it reads
of the target there, and proposes x_{t+2}. With `tokens`, `features` or `labels` 1 it is the one of the next slot.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from poss_lightning.doctor.texts import ANSWERS, SWITCHES, round_cache
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.rope import Rope, RopeScaling, rope_at
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.target.model import Target
from poss_lightning.target.spec import EmbedHead


@dataclass(frozen=True)
class Reading:
    """How a draft's files are read.

    Attributes:
        frozen: an embedding and a head in the files that are not the target's, by their names there.
        sources: the target's decoder layers whose outputs it reads, from 1; L + 1 is the feature, after the last norm.
        final_norm: whether the target's last norm stands before its head.
        rotary: share of the dimensions of a head that rotate.
        places: slots by which the context of a block is placed too late.
        texts: those that it is measured on, see `ask`.
        eight_bits: whether keys and values are rounded as in a cache of 8 bits.
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
    final_norm: bool = False
    rotary: float = 1.0
    places: int = 0
    texts: str = ANSWERS
    eight_bits: bool = False

    @property
    def depth(self) -> int:
        """Positions drafted."""
        return sum(self.config.allocation)

    @property
    def rotated(self) -> int:
        """Dimensions of a head that rotate."""
        return int(self.config.target.head_dim * self.rotary) // 2 * 2

    @cached_property
    def draft(self) -> Specialists:
        """The draft as it is read; ValueError where config and weights contradict each other."""
        with torch.device("meta"):
            draft = make_draft(self.config, self.state.get("vocabulary"))
        draft.load_state_dict(self.state, assign=True)
        if self.final_norm:
            norm: Any = self.target.model.base_model.norm
            draft.head_input = lambda predicted: norm(predicted)
        if self.rotary < 1 or self.places:
            draft.rope_at = self._rope_at
        if self.eight_bits:
            round_cache(draft)
        return draft.requires_grad_(False).eval()

    def _rope_at(self, positions: Tensor) -> Rope:
        config, is_block = self.config, positions.shape[-1] == self.config.depth + 1
        theta, still = config.rope_theta or config.target.rope_theta, (config.target.head_dim - self.rotated) // 2
        rope = rope_at(positions + self.places * (not is_block), self.rotated, theta, config.rope_scaling)
        halves = [x[..., : self.rotated // 2] for x in rope]
        halves = [nn.functional.pad(x, (0, still), value=one) for x, one in zip(halves, (1, 0), strict=True)]
        return Rope(*(torch.cat([half, half], dim=-1) for half in halves))

    def is_written(self) -> bool:
        """Return whether config and weights of a draft can say all of it."""
        named = self.config.aux_layers or (self.target.spec.layers + 1,)
        return self == Reading(self.target, self.config, self.state, self.frozen, self.target.embed_head, named)


Change = Callable[[Reading], Reading]  # raises ValueError, or LookupError, where there is no such reading


def others(reading: Reading) -> Iterator[tuple[int, Reading]]:
    """Yield the number of each hypothesis that makes a difference, and its reading."""
    for number, (_, kinds, *changes) in enumerate(HYPOTHESES):
        other = reading
        with suppress(ValueError, TypeError, LookupError, AttributeError, RuntimeError):
            for change in changes if reading.config.kind in kinds else ():
                other = change(other)
            other.draft  # noqa: B018, it raises
            if other != reading or other.state is not reading.state:
                yield number, other


def edit(**values: Any) -> Change:
    """Change fields of a draft's config, or of the reading; functions make the values of the reading."""

    def change(reading: Reading) -> Reading:
        made = {name: value(reading) if callable(value) else value for name, value in values.items()}
        stated = {name: made.pop(name) for name in values if hasattr(reading.config, name)}
        return replace(reading, config=replace(reading.config, **stated), **made)

    return change


def layers(pick: Callable[[list[int], int], list[int]]) -> Change:
    """Read other layers; `pick` makes them of those that are read, and of the number of the target's feature."""

    def change(reading: Reading) -> Reading:
        feature = reading.target.spec.layers + 1
        picked = tuple(pick([*reading.sources], feature))
        if len(picked) != len(reading.sources) or {*picked} - {*range(1, feature + 1)}:
            raise ValueError("there is no such layer")
        named = reading.config.aux_layers and max(picked) < feature - 1
        return edit(sources=picked, **({"inner_layers": picked} if named else {}))(reading)

    return change


def weights(names: str, other: Callable[[Tensor, Reading], Tensor]) -> Change:
    """Change the tensors of these names, in all layers."""

    def change(reading: Reading) -> Reading:
        named = [name for name in reading.state if name.removesuffix(".weight").split(".")[-1] in names.split()]
        found = {name: other(reading.state[name], reading) for name in named}
        return replace(reading, state=reading.state | found) if found else reading

    return change


def swapped(one: str, two: str) -> Change:
    """Exchange two tensors of each layer."""

    def change(reading: Reading) -> Reading:
        names = {name: name.replace(one, "*").replace(two, one).replace("*", two) for name in reading.state}
        return replace(reading, state={name: reading.state[names[name]] for name in names})

    return change


def heads(order: Callable[[int, int], Tensor]) -> Change:
    """Reorder the dimensions of each head of queries and keys, by its width and how many of them rotate."""

    def reorder(value: Tensor, reading: Reading) -> Tensor:
        width = reading.config.target.head_dim
        return value.unflatten(0, (-1, width))[:, order(width, reading.rotated)].flatten(0, 1)

    return weights("q_proj k_proj q_norm k_norm", reorder)


def _first(width: int, rotated: int) -> Tensor:
    """Put the halves of the first `rotated` dimensions where ours are, and the rest after them."""
    (one, two), (more, rest) = torch.arange(rotated).chunk(2), torch.arange(rotated, width).chunk(2)
    return torch.cat([one, more, two, rest])


def _pairs(width: int, _: int) -> Tensor:
    """Dimensions 0 2 4 ... 1 3 5 ..."""
    return torch.arange(width).view(-1, 2).T.flatten()


def lent(name: str, rows: Callable[[Reading], Tensor]) -> Change:
    """Take an embedding, or a head, that is not the target's."""

    def change(reading: Reading) -> Reading:
        own: dict[str, Any] = {
            part: getattr(reading.embed_head, part) for part in ("embedding", "head", "scale", "cap")
        }
        own[name] = rows(reading)
        return replace(reading, embed_head=EmbedHead(**own))

    return change


def bfloat16(reading: Reading) -> Reading:
    """Round the draft, the embedding and the head."""
    state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in reading.state.items()}
    return replace(reading, state=state, embed_head=copy.deepcopy(reading.embed_head).bfloat16())


def mask(token: Callable[[Reading], int]) -> tuple[Change, Change]:
    """Take the embedding of a different token as the mask of a block; there is no such reading where it is None."""
    row = weights("mask", lambda _, reading: reading.embed_head.embedding[token(reading)])
    return row, edit(mask_token=token)


def _halves(value: Tensor, _: Reading) -> Tensor:
    return value.roll(value.shape[-1] // 2, -1)


def _runs(reading: Reading, size: int) -> tuple[int, ...]:
    """An allocation of as many specialists, `size` positions to each, the last of which also serves the rest."""
    count = len(reading.config.allocation)
    return (*[size] * (count - 1), max(reading.depth - size * (count - 1), 1))


def _spread(count: int, feature: int) -> list[int]:
    """The layers of DFlash's code: evenly from 2 to the third-last."""
    return [round(2 + i * (feature - 5) / (count - 1)) for i in range(count)]


ALL, INNER, CHAINS = "eagle2 eagle3 block", "eagle3 block", "eagle2 eagle3"
NORMS = "norm input_norm hidden_norm context_norm q_norm k_norm 0 1 2"
# fmt: off
HYPOTHESES = [  # what is read differently, the kinds of drafts that have it, and changes, which go together
    *[(f"layer numbers {n:+}", ALL, layers(lambda own, _, n=n: [i + n for i in own])) for n in (-1, 1, -2, 2)],
    ("the feature as the last layer", INNER, layers(lambda own, feature: [*own[:-1], feature])),
    *[(f"the last layer {words}", INNER, layers(lambda own, feature, n=n: [*own[:-1], feature - n]))
      for n, words in ((1, "before the norm"), (2, "but one"), (3, "but two"), (4, "but three"))],
    *[(f"number of layer {i + 1} {n:+}", INNER, layers(lambda own, _, i=i, n=n: [*own[:i], own[i] + n, *own[i + 1:]]))
      for i in range(3) for n in (-1, 1)],
    ("the feature before the norm", "eagle2", layers(lambda own, feature: [feature - 1]), edit(final_norm=True)),
    *[("layers in another order", INNER, layers(lambda own, _, o=order: [own[i] for i in o]))
      for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1))],
    ("layers from high to low", INNER, layers(lambda own, _: own[::-1])),
    ("EAGLE-3's usual layers", INNER, layers(lambda own, feature: [2, (feature - 1) // 2, feature - 4])),
    ("DFlash's usual layers", INNER, layers(lambda own, feature: _spread(len(own), feature))),
    *[(f"{name} one slot {word}", ALL, edit(**{name: lambda r, name=name, n=n: getattr(r, name) + n}))
      for name in ("tokens", "features", "labels") for n, word in ((-1, "earlier"), (1, "later"))],
    *[("rotary base", ALL, edit(rope_theta=theta)) for theta in (None, 1e4, 1e5, 5e5, 1e6, 1e7)],
    ("no scaling of rotary angles", ALL, edit(rope_scaling=None)),
    ("the target's scaling of rotary angles", ALL, edit(rope_scaling=lambda r: RopeScaling(
        **{each.name: r.target.config.rope_parameters[each.name] for each in fields(RopeScaling)}))),
    ("Llama 3.1's scaling of rotary angles", ALL, edit(rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192))),
    *[(f"the first {share:.0%} of a head's dimensions rotate", ALL, edit(rotary=share), heads(_first))
      for share in (0.25, 0.5, 0.75)],
    ("rotary pairs side by side in the file", ALL, heads(_pairs)),
    ("rotary pairs in halves in the file", ALL, heads(lambda width, rotated: _pairs(width, rotated).argsort())),
    *[("epsilon of norms", ALL, edit(norm_eps=eps)) for eps in (None, 1e-5, 1e-6)],
    ("weights of norms less 1 in the file", ALL, weights(NORMS, lambda weight, _: weight + 1)),
    ("gate and up exchanged", ALL, swapped("gate_proj", "up_proj")),
    ("keys and values exchanged", ALL, swapped("k_proj", "v_proj")),
    *[(f"embeddings times width^{p}", "eagle2 block",
       lent("embedding", lambda r, p=p: r.embed_head.embedding * r.target.spec.hidden_size**p),
       weights("mask", lambda mask, r, p=p: mask * r.target.spec.hidden_size**p)) for p in (0.5, -0.5)],
    ("the file's embedding", ALL, lent("embedding", lambda r: r.frozen["embed_tokens.weight"])),
    ("the file's head", "eagle2 block", lent("head", lambda r: r.frozen["lm_head.weight"])),
    ("the target's head", "eagle3",
     weights("lm_head", lambda _, r: r.embed_head.restrict(r.state.get("vocabulary")).head)),
    ("feature before embedding", "eagle2", weights("fc scale", _halves)),
    ("feature before embedding", "eagle3", weights("q_proj k_proj v_proj", _halves)),
    ("no bias of fc", "eagle2", weights("bias", lambda bias, _: 0 * bias)),
    ("norms of embedding and feature exchanged", "eagle3", swapped("input_norm", "hidden_norm")),
    *[(name, "eagle3", edit(**{name: lambda r, name=name: not getattr(r.config, name)}))
      for name in ("norm_before_residual", "norm_output")],
    ("vocabulary as ids", ALL, weights("vocabulary", lambda ids, _: ids - torch.arange(len(ids)).to(ids))),
    ("vocabulary as offsets", ALL, weights("vocabulary", lambda ids, _: ids + torch.arange(len(ids)).to(ids))),
    ("vocabulary of the first tokens", ALL, weights("vocabulary", lambda ids, _: torch.arange(len(ids)).to(ids))),
    *[(f"vocabulary {n:+}", ALL, weights("vocabulary", lambda ids, _, n=n: ids + n)) for n in (-1, 1)],
    *[("allocation", CHAINS, edit(allocation=lambda r, size=size: _runs(r, size))) for size in (1, 2, 3, 4)],
    ("whose keys", CHAINS, edit(kv=lambda r: {"separate": "shared"}.get(r.config.kv, "separate"))),
    ("no window", ALL, edit(window=None)),
    *[("length of the block", "block", edit(depth=lambda r, n=n: r.depth + n, allocation=lambda r, n=n: (r.depth + n,)))
      for n in (-1, 1, -2, 2, -3, 3, -4, 4)],
    *[(f"{name} token as mask", "block", *mask(lambda r, name=name: getattr(r.target.tokenizer, f"{name}_token_id")))
      for name in ("mask", "pad", "eos", "bos", "unk")],
    ("last token as mask", "block", *mask(lambda r: r.target.spec.vocab_size - 1)),
    *[(f"places of the context {n:+}", "block", edit(places=lambda r, n=n: r.places + n)) for n in (-1, 1)],
    *[(name, ALL, edit(texts=name)) for name in SWITCHES],
]
# fmt: on
