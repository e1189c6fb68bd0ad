"""Judging a tree: tensors in, a small named result out. Nothing here knows of models or caches.

The target chooses one token after every node, greedily or drawn. A node is chosen where its token is the choice after
its parent, and the deepest node whose whole path is chosen ends what is accepted; the choice after it is the bonus.

The published rule visits a node's children in turn: accept x with probability p(x), else take x out of p, renormalise
and try the next; when none is left, draw the bonus token from what remains. Drafted children are certain proposals, so
both have one law.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree


class Verdict(NamedTuple):
    """What the target accepts of a tree."""

    path: Tensor  # (B, K+1) accepted nodes from the root on, ascending; filled with the last of them
    tokens: Tensor  # (B, K+1) what is emitted: the accepted tokens, then the bonus; filled with the bonus
    accepted: Tensor  # (B,) drafted tokens accepted: the first accepted + 1 of `tokens` are emitted


def judge(tree: Tree, ancestors: Tensor, choice: Tensor, depth: int) -> Verdict:
    """Find the deepest node whose path is all chosen, and the choice after it.

    Args:
        tree: N nodes; the children of a node differ.
        ancestors: (B, N, N), True where j is i itself or above it.
        choice: (B, N) the target's token after each node.
        depth: K, the deepest a path can be.

    Examples:
        The target says 6 after 5, 7 after 6, and 9 after 7:

        >>> tree = Tree(torch.tensor([[5, 6, 8, 7]]), torch.tensor([[0, 0, 0, 1]]), torch.zeros(1, 4))
        >>> ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
        >>> judge(tree, ancestors, choice=torch.tensor([[6, 7, 3, 9]]), depth=2)
        Verdict(path=tensor([[0, 1, 3]]), tokens=tensor([[6, 7, 9]]), accepted=tensor([2]))
    """
    nodes = torch.arange(choice.shape[1], device=choice.device)
    chosen = (tree.tokens == choice.gather(1, tree.parents)) | (nodes == 0)  # (B, N)
    depths = ancestors.sum(-1) - 1
    accepted, end = depths.where((chosen[:, None] | ~ancestors).all(-1), -1).max(-1)  # (B,)
    # A node of the path goes to its depth, all others to a column that is cut off.
    column = depths.where(ancestors[torch.arange(len(end), device=end.device), end], depth + 1)
    path = end[:, None].repeat(1, depth + 2).scatter(1, column, nodes.expand_as(column))[:, :-1]
    return Verdict(path, choice.gather(1, path), accepted)
