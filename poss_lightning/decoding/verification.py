"""Judging a tree: tensors in, a small named result out. Greedy; nothing here knows of models or caches."""

from typing import NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.trees import Tree, depths, matched, path_to


class Verdict(NamedTuple):
    """What of a tree the target takes."""

    path: Tensor  # (B, K+1) accepted nodes from the root on, ascending; filled with 0 past the end
    tokens: Tensor  # (B, K+1) what is emitted: the accepted tokens, then the bonus; filled with the bonus past it
    accepted: Tensor  # (B,) drafted tokens accepted: the first accepted + 1 of `tokens` are real
    bonus: Tensor  # (B,) the target's own token after the path


def judge_greedy(tree: Tree, above: Tensor, choice: Tensor, depth: int) -> Verdict:
    """Walk to the child that is the target's choice, while there is one.

    Args:
        tree: N nodes.
        above: (B, N, N) ancestors.
        choice: (B, N) the target's likeliest token after each node.
        depth: K, the deepest a path can be.
    """
    taken = matched(tree, above, choice)  # (B, N)
    steps = depths(above).masked_fill(~taken, -1)
    accepted, end = steps.max(dim=1)  # children of a node differ, so no two paths of one length are taken
    bonus = choice.gather(1, end[:, None])  # (B, 1)
    path = path_to(end, above, depth)
    # The token emitted after the i-th node of the path is the target's choice there, drafted or bonus alike.
    emitted = choice.gather(1, path)
    beyond = torch.arange(depth + 1, device=path.device) > accepted[:, None]
    return Verdict(path, emitted.where(~beyond, bonus), accepted, bonus[:, 0])
