"""Trees of drafted tokens: batched, every parent before its children.

tokens   the  cat  dog  sat  ran         the ── cat ── sat
parents   0    0    0    1    2               └─ dog ── ran
depths    0    1    1    2    2

ancestors     0 1 2 3 4
          0   x . . . .
          1   x x . . .
          2   x . x . .
          3   x x . x .
          4   x . x . x
"""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.target.cache import Packed

ABSENT = -1  # the token of a node that is not verified: the target never emits it


class Tree(NamedTuple):
    """N nodes a row, root first (its own parent), every parent before its children."""

    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N)
    scores: Tensor  # (B, N), log-probability of the path from the root by the draft; 0 at the root


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """(B, N) -> (B, N, N): True where j is i itself or on its path to the root, at most `depth` steps away."""
    batch, nodes = parents.shape
    itself = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    ancestors = itself
    for _ in range(depth):
        ancestors = itself | ancestors.gather(1, parents[..., None].expand(-1, -1, nodes))
    return ancestors


def rerank(tree: Tree, nodes: int) -> Tree:
    """The `nodes` best nodes by path score, root included.

    A parent never scores below its child, and comes before it where they tie (the sort is stable), so the result is a
    tree.
    """
    scores = tree.scores.index_fill(1, torch.zeros(1, dtype=torch.long, device=tree.scores.device), 1)  # the root first
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]  # (B, n)
    kept = best.sort(dim=1).values
    numbers = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    places = torch.zeros_like(tree.tokens).scatter_(1, kept, numbers)
    parents = places.gather(1, tree.parents.gather(1, kept))
    return Tree(tree.tokens.gather(1, kept), parents, tree.scores.gather(1, kept))


def share_nodes(tree: Tree, total: int, active: Tensor) -> tuple[Tree, Packed]:
    """The `total` best nodes of a whole batch, as one budget (the idea of TETRIS, arXiv 2502.15197).

    Args:
        tree: (B, N)
        total: at least B; every root is kept.
        active: (B,) 0 where a row is finished, and keeps only its root.

    Returns:
        The tree with `ABSENT` for the tokens of nodes not kept, and the nodes kept.
    """
    scores = tree.scores.masked_fill((active == 0)[:, None], -torch.inf)
    scores[:, 0] = 1  # before any node that the draft is sure of
    best = scores.flatten().sort(descending=True, stable=True).indices[:total].sort().values  # (M,)
    kept = (
        torch.zeros_like(scores, dtype=torch.bool).flatten().scatter(0, best, torch.ones_like(best, dtype=torch.bool))
    )
    tokens = tree.tokens.where(kept.view_as(tree.tokens), ABSENT)
    width = tree.tokens.shape[1]
    return tree._replace(tokens=tokens), Packed(best // width, best % width)


def logit_rows(tree: Tree, packed: Packed | None) -> Tensor:
    """(B, N) the place of every node among those that were verified; 0 for one that was not."""
    if packed is None:
        return torch.arange(tree.tokens.numel(), device=tree.tokens.device).view_as(tree.tokens)
    places = torch.arange(len(packed.rows), device=tree.tokens.device)
    return torch.zeros_like(tree.tokens).index_put(tuple(packed), places)
