"""Recursive training: pass k predicts position k at every slot at once, on the draft's own features.

Pass 1 reads the target's features, pass k the output of pass k-1, one slot to the right. Its query at slot t sees one
key for every slot s <= t, made from the feature that a drafter would hold there (docs/METHOD.md, section 4). For k = 3,
with digits for the set z^m that a key comes from and `.` for hidden:

                key slot s
                0 1 2 3 4 5
    query  2    0 1 2 . . .
    slot   3    0 0 1 2 . .
     t     4    0 0 0 1 2 .
           5    0 0 0 0 1 2

That is one causal block (the zeros) and k-1 diagonals, which is how `attention.attend` takes them. With a window, the
block ends on the left too.
"""

import torch
from torch import Tensor

from poss_lightning.draft.attention import KeysValues, Packing, attend
from poss_lightning.draft.specialists import DraftModel


class Chain(DraftModel):
    """A draft that reads what it predicted, so that each position follows from the one before."""

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Make z of a slot from the token on its right and the feature on its left: (B, T, D) each -> (B, T, Z)."""
        return torch.cat([embedded.to(features.dtype), features], dim=-1)

    def next_features(self, predicted: Tensor) -> Tensor:
        """Return what `join` takes at the next position of what was predicted here: (B, T, D) -> (B, T, D)."""
        return predicted

    def forward(
        self,
        embedded: Tensor,
        draft_input: Tensor,
        depth: int,
        packing: Packing | None = None,
        begins: Tensor | None = None,
    ) -> list[Tensor]:
        """Unroll `depth` passes over rows of conversations.

        Args:
            embedded: (B, T, D), embeddings of the token to the right of each slot, x_{t+1}.
            draft_input: (B, T, R), what the draft reads of the target: f_t, or inner layers (with noise, in training).
            depth: number of passes K.
            packing: which conversation a slot belongs to; None for one per row, without padding.
            begins: of block drafts; an unroll begins everywhere.

        Returns:
            K tensors (B, T, D): pass k at slot t predicts f_{t+1}. It is valid from the k-th slot of a conversation on;
            earlier values are finite, and no valid slot reads them.
        """
        self.config.check_depth(depth)
        batch, count, _ = draft_input.shape
        packing = packing or Packing.one_per_row(batch, count, draft_input.device)
        rope = self.rope_at(packing.positions)
        z = [self.join(embedded, self.fuse(draft_input))]  # z^0, z^1, ..., (B, T, Z) each
        keys_values: dict[tuple[int, int], KeysValues] = {}  # by specialist and set, so that each is computed once
        outputs: list[Tensor] = []
        for k in range(1, depth + 1):
            makers = [self.config.kv_specialist(k, m + 1) for m in range(k)]
            for m, maker in enumerate(makers):
                if (maker, m) not in keys_values:
                    keys_values[maker, m] = self.layers[maker].keys_values(z[m], rope)
            context, *drafted = (keys_values[maker, m] for m, maker in enumerate(makers))
            layer = self.layers[self.config.specialist_at(k)]
            queries = layer.queries(z[k - 1], rope)
            # i slots to the left is set k-1-i
            attended = attend(queries, context, drafted[::-1], packing, self.config.window)
            outputs.append(layer.after_attention(z[k - 1], attended))
            if k < depth:
                features = self.next_features(outputs[-1])
                features = features.detach() if self.config.detach else features
                shifted = torch.cat([features[:, :1], features[:, :-1]], dim=1)  # F^k_t = output of pass k at slot t-1
                z.append(self.join(embedded, shifted))
        return outputs
