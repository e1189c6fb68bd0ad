"""Drafting a tree with the specialists (EAGLE-2's dynamic tree), on a cache that never runs a layer twice for a slot.

A draft key depends on its slot's z alone. So when a token is verified, or a node drafted, its z is projected once for
every specialist that will read it; only the root slot and the frontier nodes go through a whole layer.

A slot joins a token with the feature on its left. Verified slots hold the target's features; the slots of drafted nodes
stand behind them, level by level, and are overwritten in the next round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.budget import Budget
from poss_lightning.decoding.int8_head import Int8Head, exact_levels, faster_product
from poss_lightning.decoding.trees import Tree
from poss_lightning.draft.layer import Rotation, rotate
from poss_lightning.draft.specialists import Specialists
from poss_lightning.target.cache import Slots, SlotStore
from poss_lightning.target.spec import Ends, project

BLOCK = 128  # logits looked at together, where the likeliest few of a large vocabulary are sought


class Frontier(NamedTuple):
    """The M nodes of a row that are expanded next."""

    z: Tensor  # (B, M, Z)
    turn: Rotation  # of their slots
    above: Tensor  # (B, M, top_k * K) drafted slots that each of them sees, itself included


class Drafter:
    """Grows trees for B sequences.

    Args:
        draft: the specialists, in eval mode.
        ends: the target's embedding and head (cut to the draft's vocabulary here).
        depth: K, positions drafted at most.
        top_k: children tried a node, and nodes of a frontier; 1 makes the tree a chain.
        int8_head: read the head in 8 bits; None does so where it is faster.

    Raises:
        ValueError: a number below 1, or a CPU that cannot read a head in 8 bits.
    """

    def __init__(self, draft: Specialists, ends: Ends, depth: int = 6, top_k: int = 10, int8_head: bool | None = False):
        check_reach(depth, top_k)
        self.draft, self.ends = draft, ends.restrict(draft.vocabulary)
        self.shared = draft.config.kv == "shared"  # one cache for all specialists
        self.depth, self.top_k = depth, min(top_k, self.ends.head.shape[0])
        _, own = draft.own_head([])
        head = self.ends.head if own is None else own
        self.product = faster_product(head) if int8_head is None else _int8(head) if int8_head else project
        self.slots: Slots | None = None
        self.room = self.top_k * (depth - 1)  # slots of drafted nodes
        self.scored = 1 + self.top_k + self.top_k**2 * (depth - 1)  # nodes, root included
        # Keys and values of all specialists in one product: (S * 2 * kv heads * d, Z).
        self.projection = torch.cat([own.projection() for own in draft.layers])

    def start(self, batch: int, capacity: int) -> None:
        """Begin with empty caches of `capacity` verified slots a row, in the memory of earlier ones where they fit."""
        spec, weight = self.draft.config.target, self.draft.fc.weight
        room = capacity + self.room
        if self.slots is not None and self.slots.fits(batch, room):
            self.slots.clear()
            return self.store.clear()
        caches = 1 if self.shared else len(self.draft.layers)
        shape = (caches, batch, room, spec.kv_heads, spec.head_dim)
        self.slots = Slots(batch, room, weight.device)
        self.slots.cover = self.room  # one extent for all steps of a round
        self.store = SlotStore(*shape, weight.dtype, weight.device)
        self.root = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.root_z = weight.new_zeros(batch, 1, self.projection.shape[1])

    def read(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Take in newly verified slots, and remember the root's; the host is not told (`slots.note`).

        Args:
            tokens: (B, n) the tokens on the right of the slots; the last real one is the root.
            features: (B, n, R) what the draft reads of the target on their left.
            counts: (B,) how many of the n are real; a row with none stays as it is, but for its root.
        """
        positions = self.slots.length[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # (B, n)
        left = self.draft.fuse(features.to(self.draft.fc.weight.dtype))  # (B, n, D)
        z = self.draft.join(self.ends.embed(tokens), left)  # (B, n, Z)
        self.slots.open(tokens.shape[1])
        self._remember(z, self.draft.rotation(positions), first_reader=1)
        last = (counts - 1).clamp(min=0)[:, None]  # (B, 1)
        self.root.copy_(tokens.gather(1, last))
        self.root_z.copy_(z.gather(1, last[..., None].expand(-1, -1, z.shape[-1])))
        self.slots.advance(counts)

    def grow(self, budget: Budget) -> Tree:
        """Draft a tree under the root: at each step the `top_k` likeliest children of the `top_k` best nodes.

        All that were scored are in it; which to verify is decided elsewhere.
        """
        batch, width = len(self.root), self.top_k
        device = self.root.device
        frontier = Frontier(
            self.root_z,
            self.draft.rotation(self.slots.length[:, None] - 1),
            torch.zeros(batch, 1, width * self.depth, dtype=torch.bool, device=device),
        )
        scores = torch.zeros(batch, 1, device=device)  # path scores of the frontier
        nodes = torch.zeros(batch, 1, dtype=torch.long, device=device)  # their places in the tree
        self.slots.open(0)
        grown, count = [Tree(self.root, nodes, scores)], 1
        if not budget.deeper(0, scores):
            return grown[0]
        for k in range(1, self.depth + 1):
            # 1. The specialist of this position predicts the next feature of every frontier node.
            predicted, logits = self.step(k, frontier)  # (B, M, D), (B, M, V)
            # 2. Each node's likeliest children, scored by their paths.
            likely, rows = likeliest(logits, width)  # (B, M, k)
            tokens = self.ends.token_ids(rows).flatten(1)  # (B, M*k)
            steps = likely.clamp(max=0).nan_to_num(nan=-torch.inf)  # a child never ranks above its parent
            paths = (scores[..., None] + steps).flatten(1)
            grown.append(Tree(tokens, nodes.repeat_interleave(width, dim=1), paths))
            if k == self.depth:
                break
            # 3. The best of them are the next frontier; their slots join the draft's own features.
            scores, best = paths.topk(width, dim=1)  # (B, M)
            if not budget.deeper(k, scores):
                break
            parents = best // width  # in the old frontier
            nodes = best + count
            count += tokens.shape[1]
            left = predicted.gather(1, parents[..., None].expand(-1, -1, predicted.shape[-1]))
            frontier = self._extend(k, frontier.above, parents, tokens.gather(1, best), left)
        return Tree(*(torch.cat(parts, dim=1) for parts in zip(*grown, strict=True)))

    def step(self, position: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """One pass of the frontier through the layer that serves `position`: features (B, M, D), logits (B, M, V)."""
        layer, z = self.draft.serving(position), frontier.z
        cache = 0 if self.shared else self.draft.config.serving(position)
        keys, values = self.store.view(cache, self.slots.extent)
        attended = torch.nn.functional.scaled_dot_product_attention(
            layer.queries(z, frontier.turn),
            keys,
            values,
            attn_mask=self.slots.visible(frontier.above),
            enable_gqa=True,
        )
        predicted = layer.finish(z, attended)
        return predicted, self.draft.logits(predicted, self.ends, self.product)

    def select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        self.slots.select(rows)
        self.store.select(rows)
        self.root, self.root_z = self.root[rows], self.root_z[rows]

    def _extend(self, k: int, above: Tensor, parents: Tensor, tokens: Tensor, left: Tensor) -> Frontier:
        """The frontier of position k + 1: `tokens` (B, M), under `parents` of the old one, with features `left`."""
        batch, width = tokens.shape
        seen = above.gather(1, parents[..., None].expand(-1, -1, above.shape[-1]))
        own = torch.arange((k - 1) * width, k * width, device=tokens.device)
        seen = seen.scatter(2, own[None, :, None].expand(batch, -1, -1), torch.ones_like(seen[..., :1]))
        z = self.draft.join(self.ends.embed(tokens), left)
        turn = self.draft.rotation((self.slots.length[:, None] + k - 1).expand(-1, width))
        self.slots.open(width, offset=(k - 1) * width)
        self._remember(z, turn, first_reader=k + 1)
        return Frontier(z, turn, seen)

    def _remember(self, z: Tensor, turn: Rotation, first_reader: int) -> None:
        """Project z (B, n, Z) once for every specialist that serves `first_reader` or a later position.

        One between them that serves none is not left out. A shared cache takes the first reader's alone.
        """
        config = self.draft.config
        makers = [config.projector(k, first_reader) for k in range(first_reader, self.depth + 1)]
        run = slice(min(makers), max(makers) + 1)
        weight = self.projection.unflatten(0, (len(self.draft.layers), -1))[run].flatten(0, 1)
        shape = (-1, 2, config.target.kv_heads, config.target.head_dim)
        read = self.draft.layers[0].common(z)
        keys, values = torch.nn.functional.linear(read, weight).unflatten(-1, shape).permute(3, 2, 0, 4, 1, 5)
        caches = slice(0, 1) if self.shared else run  # keys, values: (caches, B, kv heads, n, d)
        self.store.write(caches, self.slots.index, rotate(keys, turn), values)


def _int8(head: Tensor) -> Int8Head:
    if (levels := exact_levels()) is None:
        raise ValueError("int8_head is true, but this CPU has no exact products of bytes")
    return Int8Head(head, levels)


def check_reach(depth: int, top_k: int) -> None:
    """Raise ValueError for a number below 1."""
    if depth < 1 or top_k < 1:
        raise ValueError(f"depth is {depth} and top_k {top_k}; both must be at least 1")


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest of V, in order, with their log-probabilities: (..., V) -> (..., count) twice.

    In a large vocabulary they stand in the `count` blocks with the highest maxima, so only these are searched.
    """
    own = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if own.shape[-1] % BLOCK or own.shape[-1] // BLOCK < 2 * count:
        best, rows = own.topk(count, dim=-1)
    else:
        blocks = own.unflatten(-1, (-1, BLOCK))
        chosen = blocks.amax(-1).topk(count, dim=-1).indices  # (..., count)
        within = blocks.gather(-2, chosen[..., None].expand(*chosen.shape, BLOCK)).flatten(-2)
        best, places = within.topk(count, dim=-1)
        rows = chosen.gather(-1, places // BLOCK) * BLOCK + places % BLOCK
    highest = best[..., :1]  # log_softmax of all V, or a logsumexp that seeks the highest itself, would cost more
    norm = own.sub_(highest).exp_().sum(-1, keepdim=True).log_()  # in place: new memory would cost more than that
    return best - highest - norm, rows
