"""Drafting a tree with a block draft: one pass for all positions, then the best prefixes of their distributions.

No position knows what the others drafted. So a path's probability is the product of its tokens' (DDTree): the best tree
of n nodes holds the n most probable prefixes, and every prefix of one of them is at least as probable.
"""

import torch
from torch import Tensor

from poss_lightning.decoding.budget import Budget
from poss_lightning.decoding.drafting import Drafter, top_log_probs
from poss_lightning.decoding.trees import Tree
from poss_lightning.draft.block import Block, begin_blocks
from poss_lightning.draft.rope import apply_rope
from poss_lightning.draft.specialists import Specialists
from poss_lightning.sampling import Noise
from poss_lightning.target.grouped_attention import grouped_attention
from poss_lightning.target.spec import EmbedHead


def make_drafter(draft: Specialists, embed_head: EmbedHead, depth: int = 6, tree_width: int = 10) -> Drafter:
    """The drafter for a draft of this kind; arguments and errors are those of `Drafter`."""
    kind: type[Drafter] = BlockDrafter if isinstance(draft, Block) else Drafter
    return kind(draft, embed_head, depth, tree_width)  # pyright: ignore[reportArgumentType]


class BlockDrafter(Drafter):
    """Drafts trees for B texts, all positions at once.

    Its caches hold keys and values of the context, layer by layer; those of the current block follow.

    Arguments are those of `Drafter`, but `tree_width` is the number of tokens tried per position. The tree_width² most
    probable prefixes of each depth are kept, which is exact for trees of up to as many nodes.
    """

    draft: Block

    def __init__(self, draft: Block, embed_head: EmbedHead, *sizes):
        super().__init__(draft, embed_head, *sizes)  # pyright: ignore[reportArgumentType]
        self.steps, self.tree_slots = 1, draft.config.depth + 1

    def append_context(self, tokens: Tensor, draft_input: Tensor, counts: Tensor) -> None:
        """Take in newly verified slots, and remember the newest token; see `Drafter`."""
        positions = self.slots.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # (B, n)
        context = self.draft.fuse(draft_input.to(self.draft.fc.weight.dtype))  # (B, n, D)
        self.slots.open(tokens.shape[1])
        keys, values = self._project(context, 0, len(self.kv_weights))  # (L, B, kv heads, n, d)
        keys = torch.stack([layer.k_norm(own) for layer, own in zip(self.draft.stack, keys, strict=True)])
        self.store.write(slice(None), self.slots.index, apply_rope(keys, self.draft.rope_at(positions)), values)
        self.root.copy_(tokens.gather(1, (counts - 1).clamp(min=0)[:, None]))
        self.slots.advance_device(counts)

    def draft_tree(self, budget: Budget, noise: Noise | None = None) -> Tree:
        """Draft a tree under the root: at each depth the most probable prefixes; see `Drafter`."""
        width, nodes = self.tree_width, torch.zeros_like(self.root)
        scores = torch.zeros_like(self.root, dtype=torch.float32)  # (B, M) of the prefixes of a depth
        levels, count = [Tree(self.root, nodes, scores)], 1
        if not budget.go_deeper(0, scores):
            return levels[0]
        depth = budget.plan[0] if budget.plan else self.depth
        added = self._noise(noise, slice(0, depth))
        log_probs, rows = top_log_probs(self.block_logits()[:, :depth], width, added)  # (B, depth, k)
        for chances, tokens in zip(log_probs.unbind(1), self.draft.token_ids(rows).unbind(1), strict=True):
            paths = (scores[..., None] + chances[:, None]).flatten(1)  # (B, M*k)
            scores, best = paths.topk(min(width**2, paths.shape[1]), dim=1)
            levels.append(Tree(tokens.gather(1, best % width), nodes.gather(1, best // width), scores))
            nodes = torch.arange(count, count + best.shape[1], device=best.device).expand_as(best)
            count += best.shape[1]
        return Tree(*(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))

    def block_logits(self) -> Tensor:
        """Logits of all positions of the block after the newest tokens: (B, K, V)."""
        hidden = begin_blocks(self.draft, self.embed_head.embed(self.root)[:, 0])  # (B, P, D)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        rope = self.draft.rope_at(self.slots.lengths[:, None] + places)
        self.slots.open(len(places))
        whole_block = (places[:, None] >= 0).expand(-1, len(places))[None]  # (1, P, P), all True
        mask = self.slots.tree_mask(whole_block, self.draft.config.window)
        for number, layer in enumerate(self.draft.stack):
            queries = layer.queries(hidden, rope)
            self.store.write(number, self.slots.index, *layer.keys_values(hidden, rope))
            keys, values = self.store.view(number, self.slots.extent)
            hidden = layer.after_attention(hidden, grouped_attention(queries, keys, values, mask))
        return self.draft.logits(hidden[:, 1 : self.depth + 1], self.embed_head, self.head_product)
