"""Block drafts: all K positions in one pass, from masks, so that nothing drifts (DFlash, arXiv 2602.06036).

A block begins at a slot t. Its places 0 ... K are the positions t+1 ... t+1+K and hold the embedding of x_{t+1}, the
newest token, and K masks; place k predicts x_{t+1+k}. In every layer a place sees the context of the slots 0 ... t,
made from the target's inner layers, and all places of its own block, in both directions. For K = 2:

                       context      block at 1   block at 2
                       0 1 2 3      0 1 2        0 1 2
    block at 1, each   x x . .      x x x        . . .
    block at 2, each   x x x .      . . .        x x x

In training blocks begin at all slots, or at some. Place k of the block at slot t is put where pass k of an unroll that
began there would be, at slot t+k-1, and has the same loss and the same metrics.

Letters here: N blocks, P = K + 1 places of each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poss_lightning.draft.attention import KeysValues, Packing, causal_block
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.layer import BlockLayer, Norm, Specialist
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.spec import EmbedHead


class Block(DraftModel):
    """Drafts all positions at once, so that none reads a predicted feature; the target's head reads its output."""

    layer_type = BlockLayer
    layers: Sequence[BlockLayer]  # each reads the one before  # pyright: ignore[reportIncompatibleVariableOverride]
    mask: Tensor  # (D,) the embedding of the mask token

    def add_modules(self, config: DraftConfig) -> None:
        width = config.target.hidden_size
        self.context_norm = Norm(width, eps=config.eps)
        self.register_buffer("mask", torch.zeros(width))
        self.norm = Norm(width, eps=config.eps)

    def fuse(self, draft_input: Tensor) -> Tensor:
        return self.context_norm(super().fuse(draft_input))

    def head_input(self, predicted: Tensor) -> Tensor:
        return self.norm(predicted)

    def init_head(self, embed_head: EmbedHead) -> None:
        self.mask.copy_(embed_head.embedding[self.config.mask_row])

    def sources(self, other: DraftModel) -> list[Specialist]:
        return list(other.layers)

    def begin(self, embedded: Tensor) -> Tensor:
        """Make the input of the first layer from embeddings of the newest tokens: (N, D) -> (N, P, D)."""
        masks = self.mask.to(embedded.dtype).expand(len(embedded), self.config.depth, -1)
        return torch.cat([embedded[:, None], masks], dim=1)

    def forward(
        self,
        embedded: Tensor,
        draft_input: Tensor,
        depth: int,
        packing: Packing | None = None,
        begins: Tensor | None = None,
    ) -> list[Tensor]:
        """Draft a block at each slot of rows of conversations; the other arguments are those of `Chain.forward`.

        Args:
            begins: (N,) slots where blocks begin, of the rows end to end; None for all.

        Returns:
            K tensors (B, T, D): the k-th at slot t is place k of the block at slot t-k+1 and predicts x_{t+2}; 0 where
            no block begins there.
        """
        self.config.check_depth(depth)
        batch, count, _ = draft_input.shape
        packing = packing or Packing.one_per_row(batch, count, draft_input.device)
        context, rope = self.fuse(draft_input), self.rope_at(packing.positions)  # (B, T, D)
        at = torch.arange(batch * count, device=embedded.device) if begins is None else begins  # (N,)
        hidden = self.begin(embedded.to(context.dtype).flatten(0, 1)[at])  # (N, P, D)
        offsets = torch.arange(1, hidden.shape[1] + 1, device=embedded.device)
        block_rope = self.rope_at(packing.positions.expand(batch, -1).flatten()[at][:, None] + offsets)
        for layer in self.layers:
            keys_values = layer.context_keys_values(context, rope)
            queries, in_block = layer.queries(hidden, block_rope), layer.keys_values(hidden, block_rope)
            attended = attend_blocks(queries, keys_values, in_block, at, packing, self.config.window)
            hidden = layer.after_attention(hidden, attended)
        wide = hidden.new_zeros(batch, count + depth - 1, hidden.shape[-1])  # places beyond the row are cut
        return [wide.index_put((at // count, at % count + k - 1), hidden[:, k])[:, :count] for k in range(1, depth + 1)]


def attend_blocks(
    queries: Tensor, context: KeysValues, in_block: KeysValues, at: Tensor, packing: Packing, window: int | None = None
) -> Tensor:
    """Attend from N blocks (N, H, P, d) to context and block, in one softmax.

    Args:
        queries: (N, H, P, d)
        context: (B, kv heads, T, d) each.
        in_block: (N, kv heads, P, d) each.
        at: (N,) slots where they begin, of the rows end to end.
        window: slots of the context that a block sees; None for all.
    """
    (batch, kv_heads, count, width), (heads, places) = context[0].shape, queries.shape[1:3]
    # All places of a block see the same context, so they are laid side by side as heads of its slot.
    split = queries.new_zeros(batch * count, heads * places, width).index_copy(0, at, queries.flatten(1, 2))
    split = split.unflatten(0, (batch, count)).transpose(1, 2)  # (B, H * P, T, d)
    attended, norm = causal_block(split, *context, 0, packing, window)
    attended, norm = (x.transpose(1, 2).flatten(0, 1)[at].unflatten(1, (heads, places)) for x in (attended, norm))
    grouped = queries.unflatten(1, (kv_heads, -1))  # (N, kv, H/kv, P, d)
    scores = (grouped * width**-0.5) @ in_block[0][:, :, None].mT  # (N, kv, H/kv, P, P)
    norm = norm.view(*scores.shape[:-1], 1)
    weights = torch.cat([norm, scores.float()], -1).softmax(-1).to(in_block[1].dtype)
    out = attended.view(grouped.shape) * weights[..., :1] + weights[..., 1:] @ in_block[1][:, :, None]
    return out.flatten(1, 2)
