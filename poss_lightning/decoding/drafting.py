"""Drafting a tree with the specialists (EAGLE-2's dynamic tree), on a cache that never runs a layer twice for a slot.

A draft key depends on its slot's z alone. So when a token is verified, or a node drafted, its z is projected once for
every specialist that will read it; only the root slot and the frontier nodes go through a whole layer.

A slot joins a token with the feature on its left. Verified slots hold the target's features; the slots of drafted nodes
stand behind them, level by level, and are overwritten in the next round.
"""

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree, rerank
from poss_lightning.draft.layer import Rotation
from poss_lightning.draft.specialists import Specialists
from poss_lightning.target.cache import Slots, SlotStore
from poss_lightning.target.model import Ends


class Drafter:
    """Grows trees for B sequences.

    Args:
        draft: the specialists, in eval mode.
        ends: the target's embedding and head (cut to the draft's vocabulary here).
        depth: K, positions drafted.
        nodes: N, nodes of a tree after re-ranking, root included.
        top_k: children tried a node, and nodes of a frontier; 1 makes the tree a chain.

    Raises:
        ValueError: a budget that cannot hold one path, or a number below 1.
    """

    def __init__(self, draft: Specialists, ends: Ends, depth: int = 6, nodes: int = 60, top_k: int = 10):
        if depth < 1 or top_k < 1:
            raise ValueError(f"depth is {depth} and top_k {top_k}; both must be at least 1")
        if nodes < depth + 1:
            raise ValueError(
                f"nodes is {nodes}, which cannot hold a path of depth {depth} and its root: give at least {depth + 1}"
            )
        self.draft, self.ends = draft, ends.restrict(draft.vocabulary)
        self.depth, self.nodes, self.top_k = depth, nodes, min(top_k, self.ends.head.shape[0])
        scored = 1 + self.top_k + self.top_k**2 * (depth - 1)
        self.tree_nodes = min(nodes, scored)  # the budget, or all there is

    def start(self, batch: int, capacity: int) -> None:
        """Begin with empty caches of `capacity` verified slots a row."""
        spec, weight = self.draft.config.target, self.draft.fc.weight
        room = capacity + self.top_k * (self.depth - 1)
        self.slots = Slots(batch, room, weight.device)
        self.stores = [
            SlotStore(batch, room, spec.kv_heads, spec.head_dim, weight.dtype, weight.device) for _ in self.draft.layers
        ]

    def read(self, tokens: Tensor, features: Tensor, counts: list[int]) -> None:
        """Take in newly verified slots, and remember the root's.

        Args:
            tokens: (B, n) the tokens on the right of the slots; the last real one is the root.
            features: (B, n, D) the target's features on their left.
            counts: how many of the n are real, row by row; a row with none stays as it is, but for its root.
        """
        positions = self.slots.length[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # (B, n)
        z = self.draft.join(self.ends.embed(tokens), features.to(self.draft.fc.weight.dtype))  # (B, n, D)
        self.slots.open(tokens.shape[1])
        self._remember(z, positions, first_reader=1)
        rows, last = range(len(counts)), [max(count - 1, 0) for count in counts]
        self.root = tokens[rows, last][:, None]  # (B, 1)
        self.root_z = z[rows, last][:, None]  # (B, 1, D)
        self.slots.advance(counts)

    def grow(self) -> Tree:
        """Draft a tree under the root: K steps, each the `top_k` likeliest children of the `top_k` best nodes."""
        batch, width = len(self.root), self.top_k
        device = self.root.device
        z, turn = self.root_z, self.draft.rotation(self.slots.length[:, None] - 1)
        scores = torch.zeros(batch, 1, device=device)  # path scores of the frontier
        nodes = torch.zeros(batch, 1, dtype=torch.long, device=device)  # their places in the tree
        above = torch.zeros(batch, 1, width * self.depth, dtype=torch.bool, device=device)  # drafted slots seen
        self.slots.open(0)
        grown = [Tree(self.root, nodes, scores)]
        for k in range(1, self.depth + 1):
            # 1. The specialist of this position predicts the next feature of every frontier node.
            predicted = self._step(k, z, turn, above)  # (B, M, D)
            # 2. Each node's likeliest children, scored by their paths.
            logits = self.ends.logits(predicted)  # (B, M, V)
            likely = logits.topk(width, dim=-1)
            steps = likely.values.float() - logits.float().logsumexp(
                -1, keepdim=True
            )  # cheaper than log_softmax of all V
            tokens = self.ends.token_ids(likely.indices).flatten(1)  # (B, M*k)
            paths = (scores[..., None] + steps.clamp(max=0)).flatten(1)  # a child never ranks above its parent
            grown.append(Tree(tokens, nodes.repeat_interleave(width, dim=1), paths))
            if k == self.depth:
                break
            # 3. The best of them are the next frontier; their slots join the draft's own features.
            scores, best = paths.topk(width, dim=1)  # (B, M)
            parents = best // width  # in the old frontier
            nodes = best + sum(level.tokens.shape[1] for level in grown[:-1])
            above = above.gather(1, parents[..., None].expand(-1, -1, above.shape[-1])).clone()
            own = torch.arange(width, device=device) + (k - 1) * width
            above[:, torch.arange(width, device=device), own] = True
            left = predicted.gather(1, parents[..., None].expand(-1, -1, predicted.shape[-1]))
            z = self.draft.join(self.ends.embed(tokens.gather(1, best)), left)
            positions = (self.slots.length[:, None] + k - 1).expand(-1, width)
            self.slots.open(width, offset=(k - 1) * width)
            turn = self._remember(z, positions, first_reader=k + 1)
        return rerank(Tree(*(torch.cat(parts, dim=1) for parts in zip(*grown, strict=True))), self.tree_nodes)

    def _step(self, position: int, z: Tensor, turn: Rotation, above: Tensor) -> Tensor:
        """One pass of the frontier through the layer that serves `position`: (B, M, D) -> (B, M, D)."""
        layer = self.draft.serving(position)
        keys, values = self.stores[self.draft.config.serving(position)].view(self.slots.extent)
        mask = self.slots.visible(above)
        attended = torch.nn.functional.scaled_dot_product_attention(
            layer.queries(z, turn), keys, values, attn_mask=mask, enable_gqa=True
        )
        return layer.finish(z, attended)

    def _remember(self, z: Tensor, positions: Tensor, first_reader: int) -> Rotation:
        """Project z once for every specialist that serves `first_reader` or a later position; return the rotation."""
        turn = self.draft.rotation(positions)
        serving = self.draft.config.serving
        for index in range(serving(first_reader), serving(self.depth) + 1):
            self.stores[index].write(self.slots.index, *self.draft.layers[index].keys_values(z, turn))
        return turn
