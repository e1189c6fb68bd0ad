"""Drafting a tree with the specialists (EAGLE-2's dynamic tree), on caches of keys and values.

A draft key depends on its slot's z alone. So when a token is verified or drafted, its z is projected once for every
specialist that will read it; only the root slot and the frontier nodes pass through a whole layer, once.

A slot joins a token with the feature on its left. Verified slots hold the target's features; the slots of drafted nodes
follow them, level by level, and are overwritten in the next round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.budget import Budget
from poss_lightning.decoding.trees import Tree
from poss_lightning.draft.rope import Rope, apply_rope
from poss_lightning.draft.unroll import Chain
from poss_lightning.prepack import Product, product_with
from poss_lightning.sampling import Noise
from poss_lightning.target.cache import Slots, SlotStore
from poss_lightning.target.grouped_attention import grouped_attention
from poss_lightning.target.spec import EmbedHead

BLOCK = 128  # logits that are compared together, to find the few most likely of a large vocabulary


class Frontier(NamedTuple):
    """The M nodes of a row that are expanded next."""

    z: Tensor  # (B, M, Z)
    rope: Rope  # of their slots
    visible: Tensor  # (B, M, extent) slots that each of them sees, itself included


class Drafter:
    """Drafts trees for B texts, position by position.

    Args:
        draft: the specialists, in eval mode.
        embed_head: the target's embedding and head (restricted to the draft's vocabulary here).
        depth: K, positions drafted at most.
        tree_width: children tried per node, and nodes of a frontier; 1 makes the tree a chain.

    Raises:
        ValueError: a number below 1, or a depth beyond the draft's window.
    """

    @torch.no_grad()
    def __init__(self, draft: Chain, embed_head: EmbedHead, depth: int = 6, tree_width: int = 10):
        check_tree(depth, tree_width)
        config = draft.config
        config.check_depth(depth)
        # With a head of its own, it reads of the target's EmbedHead no more than the embedding.
        self.draft, self.embed_head = draft, embed_head if config.own_head else embed_head.restrict(draft.vocabulary)
        head = draft.lm_head.weight if config.own_head else self.embed_head.head
        self.depth, self.tree_width, self.layers = depth, min(tree_width, len(head)), config.aux_layers
        self.steps = depth  # of a whole tree, one after another
        self.head_product = None if config.own_head else product_with(head)
        self.slots = Slots(0, 0, draft.fc.weight.device)  # none, until `start`
        self.tree_slots = self.tree_width * (depth - 1)  # of drafted nodes
        self.candidates = 1 + self.tree_width + self.tree_width**2 * (depth - 1)  # nodes scored, root included
        # Keys and values of several layers in one product: (S, 2 * kv heads * d, Z)
        self.kv_weights = torch.stack([layer.kv_weight() for layer in draft.layers])
        self.kv_products: dict[tuple[int, int], Product] = {}  # by the first layer and the one after the last

    def start(self, batch: int, capacity: int) -> None:
        """Begin with empty caches of `capacity` verified slots per row; earlier ones are reused where they fit."""
        config, weight = self.draft.config, self.draft.fc.weight
        total = capacity + self.tree_slots
        if self.slots.fits(batch, total):
            self.slots.clear()
            return self.store.clear()
        store = SlotStore(
            layers=1 if config.kv == "shared" else len(self.draft.layers),
            batch=batch,
            capacity=total,
            heads=config.target.kv_heads,
            head_dim=config.target.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.store, self.slots = store, Slots(batch, total, weight.device)  # both or, out of memory, none
        self.slots.min_extent = self.tree_slots  # one extent for all steps of a round
        self.root = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.root_z = weight.new_zeros(batch, 1, self.kv_weights.shape[-1])

    def append_context(self, tokens: Tensor, draft_input: Tensor, counts: Tensor) -> None:
        """Take in newly verified slots, and remember the root's; the host follows by `slots.advance_host`.

        Args:
            tokens: (B, n) the tokens on the right of the slots; the last real one is the root.
            draft_input: (B, n, R) what the draft reads of the target on their left.
            counts: (B,) how many of the n are real; a row with none keeps all but its root.
        """
        positions = self.slots.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # (B, n)
        features = self.draft.fuse(draft_input.to(self.draft.fc.weight.dtype))  # (B, n, D)
        z = self.draft.join(self.embed_head.embed(tokens), features)  # (B, n, Z)
        rope = self.draft.rope_at(positions)
        self.slots.open(tokens.shape[1])
        self._write_keys_values(z, rope, first_reader=1)
        last = (counts - 1).clamp(min=0)[:, None]  # (B, 1)
        self.root.copy_(tokens.gather(1, last))
        self.root_z.copy_(z.gather(1, last[..., None].expand(-1, -1, z.shape[-1])))
        self.slots.advance_device(counts)

    def draft_tree(self, budget: Budget, noise: Noise | None = None) -> Tree:
        """Draft a tree under the root: at each step the most likely children of the best nodes, `tree_width` of both.

        The tree holds all nodes that were scored; `rerank` decides which of them are verified.

        Args:
            noise: T g at the places below the root. "Likely" then means likely to be what the target draws with it.
        """
        batch, width, device = len(self.root), self.tree_width, self.root.device
        rope = self.draft.rope_at(self.slots.lengths[:, None] + torch.arange(-1, self.depth - 1, device=device))
        self.slots.open(0)
        frontier = Frontier(self.root_z, rope.at(0), self.slots.verified()[:, None])
        scores = torch.zeros(batch, 1, device=device)  # path scores of the frontier
        nodes = torch.zeros(batch, 1, dtype=torch.long, device=device)  # their places in the tree
        levels, count = [Tree(self.root, nodes, scores)], 1
        if not budget.go_deeper(0, scores):
            return levels[0]
        for k in range(1, self.depth + 1):
            # 1. The specialist of this position predicts the next feature of every frontier node.
            predicted, logits = self.step(k, frontier)  # (B, M, D), (B, M, V)
            # 2. Each node's most likely children, scored by their paths.
            added = self._noise(noise, slice(k - 1, k))  # (B, 1, V)
            log_probs, rows = top_log_probs(logits, width, added)  # (B, M, k)
            tokens = self.draft.token_ids(rows).flatten(1)  # (B, M*k)
            paths = (scores[..., None] + log_probs).flatten(1)
            levels.append(Tree(tokens, nodes.repeat_interleave(width, dim=1), paths))
            if k == self.depth:
                break
            # 3. The best of them are the next frontier; their slots join the draft's own features.
            scores, best = paths.topk(width, dim=1)  # (B, M)
            if not budget.go_deeper(k, scores):
                break
            parents = best // width  # in the old frontier
            nodes = best + count
            count += tokens.shape[1]
            features = predicted.gather(1, parents[..., None].expand(-1, -1, predicted.shape[-1]))
            frontier = self._next_frontier(k, frontier.visible, parents, tokens.gather(1, best), features, rope.at(k))
        return Tree(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))

    def step(self, position: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """One pass of the frontier through the specialist of `position`: features (B, M, D), logits (B, M, V)."""
        window, z, visible = self.draft.config.window, frontier.z, frontier.visible
        if window is not None:  # of which position - 1 slots are drafted
            visible = visible & ~self.slots.verified(older_than=window - (position - 1))[:, None]
        specialist = self.draft.config.specialist_at(position)
        layer, cache = self.draft.layers[specialist], 0 if self.draft.config.kv == "shared" else specialist
        keys, values = self.store.view(cache, self.slots.extent)
        attended = grouped_attention(layer.queries(z, frontier.rope), keys, values, visible[:, None])
        predicted = layer.after_attention(z, attended)
        return predicted, self.draft.logits(predicted, self.embed_head, self.head_product)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.slots.select(rows)
        self.store.select(rows)
        self.root, self.root_z = self.root[rows], self.root_z[rows]

    def _noise(self, noise: Noise | None, places: slice) -> Tensor | None:
        """At some places, of the tokens that the draft may propose: (B, n, V); None at temperature 0."""
        if noise is None or (made := noise.first(places.stop)) is None:
            return None
        made = made[:, places]
        return made if self.draft.vocabulary is None else made.index_select(2, self.draft.vocabulary)

    def _next_frontier(
        self, k: int, visible: Tensor, parents: Tensor, tokens: Tensor, features: Tensor, rope: Rope
    ) -> Frontier:
        """That of position k + 1: `tokens` (B, M), under `parents` of the old one, on the right of `features`."""
        width = tokens.shape[1]
        inherited = visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[-1]))
        itself = self.slots.lengths[:, None] + torch.arange((k - 1) * width, k * width, device=tokens.device)  # (B, M)
        visible = inherited.scatter_(2, itself[..., None], True)
        z = self.draft.join(self.embed_head.embed(tokens), self.draft.next_features(features))
        self.slots.open(width, offset=(k - 1) * width)
        self._write_keys_values(z, rope, first_reader=k + 1)
        return Frontier(z, rope, visible)

    def _write_keys_values(self, z: Tensor, rope: Rope, first_reader: int) -> None:
        """Project z (B, n, Z) once for every specialist that serves `first_reader` or a later position.

        A shared cache takes the first reader's alone.
        """
        config = self.draft.config
        makers = [config.kv_specialist(k, first_reader) for k in range(first_reader, self.depth + 1)]
        run = min(makers), max(makers) + 1
        keys, values = self._project(self.draft.layers[0].shared_input(z), *run)
        caches = slice(0, 1) if config.kv == "shared" else slice(*run)
        self.store.write(caches, self.slots.index, apply_rope(keys, rope), values)

    def _project(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """(B, n, Z) -> keys, not yet turned, and values of the layers of a run: (layers, B, kv heads, n, d) each."""
        if (first, stop) not in self.kv_products:
            self.kv_products[first, stop] = product_with(self.kv_weights[first:stop].flatten(0, 1))
        shape = (-1, 2, self.draft.config.target.kv_heads, self.draft.config.target.head_dim)
        projected = self.kv_products[first, stop](x).unflatten(-1, shape)
        keys, values = projected.permute(3, 2, 0, 4, 1, 5)
        return keys, values


def check_tree(depth: int, tree_width: int) -> None:
    """Raise ValueError for a number below 1."""
    if depth < 1 or tree_width < 1:
        raise ValueError(f"depth is {depth} and tree_width {tree_width}; both must be at least 1")


def top_log_probs(logits: Tensor, count: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` most likely of V, in order, with their log-probabilities: (..., V) -> (..., count) twice.

    With noise that broadcasts to (..., V) and is added to the logits, it is their chances to be drawn with this noise.
    In a large vocabulary they stand in the `count` blocks with the highest maxima, so only these are searched.
    """
    logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if noise is not None:
        logits += noise
    if logits.shape[-1] % BLOCK or logits.shape[-1] // BLOCK < 2 * count:
        best, rows = logits.topk(count, dim=-1)
    else:
        blocks = logits.unflatten(-1, (-1, BLOCK))
        chosen = blocks.amax(-1).topk(count, dim=-1).indices  # (..., count)
        within = blocks.gather(-2, chosen[..., None].expand(*chosen.shape, BLOCK)).flatten(-2)
        best, places = within.topk(count, dim=-1)
        rows = chosen.gather(-1, places // BLOCK) * BLOCK + places % BLOCK
    highest = best[..., :1]  # log_softmax of all V, or a logsumexp that seeks the highest itself, would cost more
    norm = logits.sub_(highest).exp_().sum(-1, keepdim=True).log_()  # in place: new memory would cost more than that
    log_probs = best - highest - norm
    return log_probs.clamp(max=0).nan_to_num(nan=-torch.inf), rows  # a child never scores above its parent
