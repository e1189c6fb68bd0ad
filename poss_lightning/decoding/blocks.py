"""Drafting a tree with a block draft: one pass for all positions, then the best prefixes of their distributions.

No position knows what the others drafted. So a path's probability is the product of its tokens' (DDTree): the best tree
of n nodes holds the n most probable prefixes, and every prefix of one of them is at least as probable.
"""

import torch
from torch import Tensor

from poss_lightning.decoding.drafting import TreeDrafter, top_log_probs
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree, root_tree
from poss_lightning.draft.block import Block
from poss_lightning.draft.layer import apply_rope
from poss_lightning.sampling import Noise
from poss_lightning.target_model.grouped_attention import grouped_attention
from poss_lightning.target_model.spec import EmbedHead


class BlockDrafter(TreeDrafter):
    """Drafts trees for B texts, all positions at once.

    Its caches hold keys and values of the context, layer by layer; those of the current block follow. P = K + 1.

    Arguments are those of `TreeDrafter`, but `tree_width` is the number of tokens tried per position. The tree_width²
    most probable prefixes of each depth are kept, which is exact for trees of up to as many nodes.
    """

    specialists: Block

    def __init__(self, specialists: Block, embed_head: EmbedHead, plan: TreePlan):
        super().__init__(specialists, embed_head, plan)  # pyright: ignore[reportArgumentType]
        self.steps, self.room = 1, specialists.config.depth + 1

    def append_context(self, tokens: Tensor, draft_input: Tensor, counts: Tensor) -> None:
        """Take in newly verified slots; see `Drafter`."""
        offsets = torch.arange(tokens.shape[1], device=tokens.device) - counts[:, None]  # (B, n) from the new lengths
        context = self.specialists.fuse(draft_input.to(self.specialists.fc.weight.dtype))  # (B, n, D)
        keys, values = self._project(context, 0, len(self.kv_weights))  # (L, B, kv heads, n, d)
        keys = torch.stack([layer.k_norm(k) for layer, k in zip(self.specialists.layers, keys, strict=True)])
        rope = self.specialists.rope_at(self.slots.lengths[:, None] + offsets)
        self.store.write(slice(None), self.slots.flat_index(offsets), apply_rope(keys, rope), values)

    def draft(self, root: Tensor, plan: TreePlan, noise: Noise | None = None) -> Tree:
        """Draft the most probable prefixes of each depth; see `TreeDrafter`."""
        width, depth, levels, count = min(plan.tree_width, self.plan.tree_width), plan.depth, [root_tree(root)], 1
        _, nodes, scores = levels[0]  # of the prefixes of a depth
        if not depth:
            return levels[0]
        added = self._noise(noise, slice(0, depth))
        log_probs, rows = top_log_probs(self.block_logits(root)[:, :depth], width, added)  # (B, depth, k)
        for chances, tokens in zip(log_probs.unbind(1), self.specialists.token_ids(rows).unbind(1), strict=True):
            paths = (scores[..., None] + chances[:, None]).flatten(1)  # (B, M*k)
            scores, best = paths.topk(min(width**2, paths.shape[1]), dim=1)
            levels.append(Tree(tokens.gather(1, best % width), nodes.gather(1, best // width), scores))
            nodes = torch.arange(count, count + best.shape[1], device=best.device).expand_as(best)
            count += best.shape[1]
        return Tree(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))

    def block_logits(self, root: Tensor) -> Tensor:
        """Return logits of all positions of the block after the newest tokens: (B, 1) -> (B, K, V)."""
        hidden = self.specialists.begin(self.embed_head.embed(root)[:, 0])  # (B, P, D)
        index = torch.arange(hidden.shape[1], device=hidden.device)
        rope = self.specialists.rope_at(self.slots.lengths[:, None] + index)
        self.slots.open(len(index))
        whole_block = index.new_ones(1, len(index), len(index), dtype=torch.bool)
        mask = self.slots.tree_mask(whole_block, self.specialists.config.window)
        for number, layer in enumerate(self.specialists.layers):
            queries = layer.queries(hidden, rope)
            self.store.write(number, self.slots.index, *layer.keys_values(hidden, rope))
            keys, values = self.store.view(number, self.slots.extent)
            hidden = layer.after_attention(hidden, grouped_attention(queries, keys, values, mask))
        return self.specialists.logits(hidden[:, 1 : self.depth + 1], self.embed_head, self.head_product)
