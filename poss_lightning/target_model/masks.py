"""Attention masks of a tree, for every kind of layer: a full layer sees all, a sliding one the last few tokens.

A node's depth counts, not its slot. With a window of 2, after 3 verified tokens, the tree r(a(c) b(d(e))) sees

    slot       0 1 2 | r a b c d e
    position   0 1 2 | 3 4 4 5 5 6
    r          . . x | x . . . . .
    a          . . . | x x . . . .
    b          . . . | x . x . . .
    c          . . . | . x . x . .
    d          . . . | . . x . x .
    e          . . . | . . . . x x
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = dict[str, int | None]  # tokens that each kind of layer sees, itself included; None for all
Masks = Tensor | dict[str, Tensor]  # what a model's `attention_mask` takes: of all layers, or of each kind


def causal_ancestors(count: int, device: torch.device) -> Tensor:
    """Return the ancestors in a plain text: (1, n, n), lower triangle."""
    return torch.ones(1, count, count, dtype=torch.bool, device=device).tril()


def find_paths(ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """Find the depth of each node, and the node at each depth of its path: (…, n, n) -> (…, n), (…, n, n)."""
    nodes, depths = ancestors.shape[1], ancestors.sum(-1) - 1
    depth_of = depths[:, None].where(ancestors, nodes)  # of ancestors; the rest go where they are cut off
    numbers = torch.arange(nodes, device=ancestors.device).expand_as(depth_of)
    paths = torch.zeros(*depths.shape, nodes + 1, dtype=torch.long, device=ancestors.device)
    return depths, paths.scatter_(2, depth_of, numbers)[..., :nodes]


def layer_windows(config: PreTrainedConfig, context: int) -> Windows:
    """Return the windows of a model that reads `context` tokens; one of that size or larger hides nothing.

    Raises:
        NotImplementedError: the model has other kinds of layers (chunked, linear, …).
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])
    if other := sorted(kinds - {FULL, SLIDING}):
        raise NotImplementedError(f"it has layers of {', '.join(other)}; only {FULL} and {SLIDING} can read a tree")
    width = window if window and window < context else None
    return {kind: width if kind == SLIDING else None for kind in kinds}


def one_or_each(masks: dict[str, Tensor]) -> Masks:
    """Return the mask of the one kind of layer, or all by kind."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


def layer_masks(
    windows: Windows, visible: Tensor, positions: Tensor, lengths: Tensor, dtype: torch.dtype, copies: int
) -> Masks:
    """Make one mask, or one per kind of layer if there are several.

    They are added to the scores. As bools, torch would turn them into such numbers in every layer.

    Args:
        windows: of the kinds of layers.
        visible: (B, 1, n, extent) bool, from `Slots.tree_mask`.
        positions: (B, n) of the nodes, whose slots begin at `lengths` (B,).
        dtype: of the scores.
        copies: of a mask, one below the other.
    """
    masks = {}
    for kind, window in windows.items():
        seen = visible if window is None else visible & in_window(window, positions, lengths, visible.shape[-1])
        mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        masks[kind] = mask.repeat(1, 1, copies, 1) if copies > 1 else mask
    return one_or_each(masks)


def in_window(window: int, positions: Tensor, lengths: Tensor, extent: int) -> Tensor:
    """Return whether a slot's token is among the `window` tokens up to a node, on any branch: (B, 1, n, extent).

    Slots below `lengths` (B,) hold the token of that position; the slots after them hold the nodes at `positions`
    (B, n).
    """
    slots = torch.arange(extent, device=positions.device)
    after = slots - lengths[:, None]  # (B, extent)
    keys = torch.where(after < 0, slots, positions.gather(1, after.clamp(0, positions.shape[1] - 1)))  # (B, extent)
    return (keys[:, None] > (positions - window)[:, :, None])[:, None]
