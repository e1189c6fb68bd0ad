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


class Tree(NamedTuple):
    """N nodes per row, root first (its own parent), every parent before its children."""

    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N)
    scores: Tensor  # (B, N), log-probability of the path from the root by the draft; 0 at the root


def root_tree(root: Tensor) -> Tree:
    """Make a tree of its root alone (B, 1)."""
    return Tree(root, torch.zeros_like(root), torch.zeros_like(root, dtype=torch.float32))


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """Mark where j is i itself or on its path to the root, in trees of this depth or less: (B, N) -> (B, N, N).

    Examples:
        >>> ancestor_mask(torch.tensor([[0, 0, 1]]), depth=2).int().tolist()
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    """
    batch, nodes = parents.shape
    ancestors = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    for _ in range(depth.bit_length()):  # after i of these, mask and `parents` reach 2^i steps up
        ancestors = ancestors | ancestors.gather(1, parents[..., None].expand(-1, -1, nodes))
        parents = parents.gather(1, parents)
    return ancestors


def node_depths(parents: Tensor, depth: int) -> Tensor:
    """Return the depth of each node (B, N) of trees of at most this depth; the root's is 0."""
    at = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    depths = torch.zeros_like(parents)
    for _ in range(depth):
        depths += at > 0
        at = parents.gather(1, at)
    return depths


def rerank(tree: Tree, nodes: int) -> Tree:
    """Keep the `nodes` best nodes by path score, root included.

    A parent never scores below its child, and comes before it where they tie (the sort is stable), so the result is a
    tree.

    Examples:
        >>> scores = torch.tensor([[0.0, -1.0, -4.0, -2.0]])
        >>> tree = rerank(Tree(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 0]]), scores), nodes=3)
        >>> tree.tokens.tolist(), tree.parents.tolist()
        ([[5, 6, 8]], [[0, 0, 0]])
    """
    scores = tree.scores.index_fill(1, torch.zeros(1, dtype=torch.long, device=tree.scores.device), 1)  # the root first
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]  # (B, n)
    best = best.sort(dim=1).values
    index = torch.arange(best.shape[1], device=best.device).expand_as(best)
    new_index = torch.zeros_like(tree.tokens).scatter_(1, best, index)
    parents = new_index.gather(1, tree.parents.gather(1, best))
    return Tree(tree.tokens.gather(1, best), parents, tree.scores.gather(1, best))
