"""Drafting a tree with the specialists (EAGLE-2's dynamic tree), on caches of keys and values.

A draft key depends on its slot's z alone. So when a token is verified or drafted, its z is projected once for every
specialist that will read it; only the root slot and the frontier nodes pass through a whole layer, once.

A slot joins a token with the feature on its left. Verified slots hold the target's features; the slots of drafted nodes
follow them, level by level, and are overwritten in the next round. Letters: M nodes of a frontier, k children of each.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree, root_tree
from poss_lightning.draft.layer import Rope, apply_rope
from poss_lightning.draft.unroll import Chain
from poss_lightning.prepack import Product, product_with
from poss_lightning.sampling import Noise
from poss_lightning.target_model.cache import Slots, SlotStore
from poss_lightning.target_model.grouped_attention import grouped_attention
from poss_lightning.target_model.spec import EmbedHead

BLOCK = 128  # logits that are compared together, to find the few most likely of a large vocabulary


class Frontier(NamedTuple):
    """The M nodes of a row that are expanded next."""

    z: Tensor  # (B, M, Z)
    rope: Rope  # of their slots
    visible: Tensor  # (B, M, extent) slots that each of them sees, itself included


class TreeDrafter:
    """Drafts trees for B texts, position by position; see `Drafter`.

    Args:
        specialists: the draft, in eval mode.
        embed_head: the target's embedding and head (restricted to the draft's vocabulary here).
        plan: the largest tree; its width is also that of a frontier.

    Raises:
        ValueError: too few nodes, or a depth beyond the draft's window.
    """

    @torch.no_grad()
    def __init__(self, specialists: Chain, embed_head: EmbedHead, plan: TreePlan):
        config = specialists.config
        # With a head of its own, it reads of the target's EmbedHead no more than the embedding.
        self.specialists = specialists
        self.embed_head = embed_head if config.own_head else embed_head.restrict(specialists.vocabulary)
        head = specialists.lm_head.weight if config.own_head else self.embed_head.head
        self.plan = replace(plan, tree_width=min(plan.tree_width, len(head))).for_draft(config)
        self.depth, self.layers = self.plan.depth or 0, config.aux_layers
        self.steps = self.depth  # of a whole tree, one after another
        self.room = self.plan.tree_width * max(self.depth - 1, 0)  # drafted nodes but the last
        self.head_product = None if config.own_head else product_with(head)
        self.slots = Slots(0, 0, specialists.fc.weight.device)  # none, until `start`
        # Keys and values of several layers in one product: (specialists, 2 * kv heads * d, Z)
        self.kv_weights = torch.stack([layer.kv_weight() for layer in specialists.layers])
        self.kv_products: dict[tuple[int, int], Product] = {}  # by the first layer and the one after the last

    def start(self, slots: Slots) -> None:
        """Begin with empty caches; see `Drafter`."""
        if slots is self.slots:
            return self.store.clear()
        config, weight = self.specialists.config, self.specialists.fc.weight
        batch = len(slots.host_lengths)
        self.store = SlotStore(
            layers=1 if config.kv == "shared" else len(self.specialists.layers),
            batch=batch,
            capacity=slots.capacity,
            heads=config.target.kv_heads,
            head_dim=config.target.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.root_z = weight.new_zeros(batch, 1, self.kv_weights.shape[-1])
        self.slots = slots  # last, as memory may run out

    def append_context(self, tokens: Tensor, draft_input: Tensor, counts: Tensor) -> None:
        """Take in newly verified slots, and remember the root's; see `Drafter`."""
        offsets = torch.arange(tokens.shape[1], device=tokens.device) - counts[:, None]  # (B, n) from the new lengths
        features = self.specialists.fuse(draft_input.to(self.specialists.fc.weight.dtype))  # (B, n, D)
        z = self.specialists.join(self.embed_head.embed(tokens), features)  # (B, n, Z)
        rope = self.specialists.rope_at(self.slots.lengths[:, None] + offsets)
        self._write_keys_values(z, rope, self.slots.flat_index(offsets), first_reader=1)
        last = (counts - 1).clamp(min=0)[:, None, None]
        self.root_z.copy_(z.gather(1, last.expand(-1, -1, z.shape[-1])))

    def draft(self, root: Tensor, plan: TreePlan, noise: Noise | None = None) -> Tree:
        """Draft a tree: at each step the most likely children of the best nodes, `tree_width` of both.

        With noise, "likely" means likely to be what the target draws with it.
        """
        width, device, levels, count = min(plan.tree_width, self.plan.tree_width), root.device, [root_tree(root)], 1
        _, nodes, scores = levels[0]  # the frontier's nodes, and path scores
        if not plan.depth:
            return levels[0]
        rope = self.specialists.rope_at(self.slots.lengths[:, None] + torch.arange(-1, self.depth - 1, device=device))
        self.slots.open(0, room=self.room)  # one extent for all steps
        frontier = Frontier(self.root_z, rope.at(0), self.slots.verified()[:, None])
        for k in range(1, plan.depth + 1):
            # 1. The specialist of this position predicts the next feature of every frontier node.
            predicted, logits = self.step(k, frontier)  # (B, M, D), (B, M, V)
            # 2. Each node's most likely children, scored by their paths.
            added = self._noise(noise, slice(k - 1, k))  # (B, 1, V)
            log_probs, rows = top_log_probs(logits, width, added)  # (B, M, k)
            tokens = self.specialists.token_ids(rows).flatten(1)  # (B, M*k)
            paths = (scores[..., None] + log_probs).flatten(1)
            levels.append(Tree(tokens, nodes.repeat_interleave(width, dim=1), paths))
            if k == plan.depth:
                break
            # 3. The best of them are the next frontier; their slots join the draft's own features.
            scores, best = paths.topk(width, dim=1)  # (B, M)
            parents = best // width  # in the old frontier
            nodes = best + count
            count += tokens.shape[1]
            features = predicted.gather(1, parents[..., None].expand(-1, -1, predicted.shape[-1]))
            frontier = self._next_frontier(k, frontier.visible, parents, tokens.gather(1, best), features, rope.at(k))
        return Tree(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))

    def step(self, position: int, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Pass the frontier through the specialist of `position`: features (B, M, D), logits (B, M, V)."""
        window, z, visible = self.specialists.config.window, frontier.z, frontier.visible
        if window is not None:  # of which position - 1 slots are drafted
            visible = visible & ~self.slots.verified(older_than=window - (position - 1))[:, None]
        specialist = self.specialists.config.specialist_at(position)
        layer, cache = self.specialists.layers[specialist], 0 if self.specialists.config.kv == "shared" else specialist
        keys, values = self.store.view(cache, self.slots.extent)
        attended = grouped_attention(layer.queries(z, frontier.rope), keys, values, visible[:, None])
        predicted = layer.after_attention(z, attended)
        return predicted, self.specialists.logits(predicted, self.embed_head, self.head_product)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.store.select(rows)
        self.root_z = self.root_z[rows]

    def state(self) -> list[Tensor]:
        """See `Drafter`."""
        return [self.root_z]

    def _noise(self, noise: Noise | None, positions: slice) -> Tensor | None:
        """Return noise at some positions, of tokens that the draft may propose: (B, n, V); None at temperature 0."""
        if noise is None or (made := noise.first(positions.stop)) is None:
            return None
        made = made[:, positions]
        return made if self.specialists.vocabulary is None else made.index_select(2, self.specialists.vocabulary)

    def _next_frontier(
        self, k: int, visible: Tensor, parents: Tensor, tokens: Tensor, features: Tensor, rope: Rope
    ) -> Frontier:
        """Make the frontier of position k + 1: `tokens` (B, M) under `parents` of the old one, right of `features`."""
        width = tokens.shape[1]
        of_parents = visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[-1]))
        itself = self.slots.lengths[:, None] + torch.arange((k - 1) * width, k * width, device=tokens.device)  # (B, M)
        visible = of_parents.scatter_(2, itself[..., None], True)
        z = self.specialists.join(self.embed_head.embed(tokens), self.specialists.next_features(features))
        self.slots.open(width, offset=(k - 1) * width, room=self.room)
        self._write_keys_values(z, rope, self.slots.index, first_reader=k + 1)
        return Frontier(z, rope, visible)

    def _write_keys_values(self, z: Tensor, rope: Rope, index: Tensor, first_reader: int) -> None:
        """Project z (B, n, Z) once for every specialist that serves `first_reader` or a later position.

        A shared cache takes the first reader's alone.
        """
        config = self.specialists.config
        makers = [config.kv_specialist(k, first_reader) for k in range(first_reader, self.depth + 1)]
        run = min(makers), max(makers) + 1
        keys, values = self._project(self.specialists.layers[0].shared_input(z), *run)
        caches = slice(0, 1) if config.kv == "shared" else slice(*run)
        self.store.write(caches, index, apply_rope(keys, rope), values)

    def _project(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Project (B, n, Z) to unrotated keys, and values, of a run's layers: (layers, B, kv heads, n, d) each."""
        if (first, stop) not in self.kv_products:
            self.kv_products[first, stop] = product_with(self.kv_weights[first:stop].flatten(0, 1))
        shape = (-1, 2, self.specialists.config.target.kv_heads, self.specialists.config.target.head_dim)
        projected = self.kv_products[first, stop](x).unflatten(-1, shape)
        keys, values = projected.permute(3, 2, 0, 4, 1, 5)
        return keys, values


def top_log_probs(logits: Tensor, count: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the `count` most likely of V, in order, and their log-probabilities: (..., V) -> (..., count) twice.

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
        best, index = within.topk(count, dim=-1)
        rows = chosen.gather(-1, index // BLOCK) * BLOCK + index % BLOCK
    highest = best[..., :1]  # log_softmax of all V, or a logsumexp that seeks the highest itself, would cost more
    norm = logits.sub_(highest).exp_().sum(-1, keepdim=True).log_()  # in place: new memory would cost more than that
    log_probs = best - highest - norm
    return log_probs.clamp(max=0).nan_to_num(nan=-torch.inf), rows  # a child never scores above its parent
