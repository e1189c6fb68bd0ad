"""Judging a tree: tensors in, a small named result out. Nothing here knows of models or caches.

The published rule visits a node's children in turn: accept x with probability p(x), else take x out of p, renormalise
and try the next; when none is left, draw the bonus token from what remains. Drafted children are certain proposals, so
this equals one draw from p: if it is a child, go there, else it is the bonus (tests/decoding/test_verification.py
enumerates both). Greedy decoding is the same walk with the likeliest token for the draw.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree


class Verdict(NamedTuple):
    """What the target accepts of a tree."""

    path: Tensor  # (B, K+1) accepted nodes from the root on, ascending; filled with the last of them
    tokens: Tensor  # (B, K+1) what is emitted: the accepted tokens, then the bonus; filled with the bonus
    accepted: Tensor  # (B,) drafted tokens accepted: the first accepted + 1 of `tokens` are emitted


def judge(
    tree: Tree,
    logits: Tensor,
    logit_rows: Tensor,
    sample: Callable[[Tensor, Tensor], Tensor],
    position: Tensor,
    depth: int,
    may_look: bool = False,
) -> Verdict:
    """Walk from the root to the child that is the target's choice, while there is one.

    Args:
        tree: N nodes; the children of a node differ.
        logits: (M, V) the target's after the nodes that were verified.
        logit_rows: (B, N) which of them is a node's.
        sample: logits (B, V) and positions (B,) -> the target's token there; the same whenever it is asked again.
        position: (B,) of the token after the root, in the text.
        depth: K, the deepest a path can be.
        may_look: leave the walk where no row goes on, which the host must look at; the verdict is the same.
    """
    rows = torch.arange(len(position), device=position.device)
    node, accepted = torch.zeros_like(position), torch.zeros_like(position)
    path, tokens = [node], []
    for _ in range(depth + 1):  # a row that has found its bonus finds it again
        choice = sample(logits[logit_rows[rows, node]], position + accepted)  # (B,)
        child = (tree.tokens == choice[:, None]) & (tree.parents == node[:, None])  # (B, N)
        child[:, 0] = False  # the root is its own parent
        is_child, place = child.max(-1)
        node, accepted = torch.where(is_child, place, node), accepted + is_child
        path.append(node)
        tokens.append(choice)
        if may_look and not is_child.any():
            break
    rest = depth + 1 - len(tokens)
    path, tokens = path[:-1] + path[-1:] * rest, tokens + tokens[-1:] * rest
    return Verdict(torch.stack(path, dim=1), torch.stack(tokens, dim=1), accepted)
