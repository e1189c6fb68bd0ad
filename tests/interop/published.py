"""Published files of EAGLE's family, made up, and the law that ties such a file to ours."""

from pathlib import Path

import torch
from torch import Tensor

from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.model import Target
from tests.support import naive
from tests.support.layouts import SHAPES, VOCABULARY, D, read, stated
from tests.support.tolerance import LAYER, close

FUSED = [2, 4, 5]  # layers of the target
SOME = torch.arange(1, VOCABULARY, 3)  # a smaller vocabulary
DEPTH = 6  # positions that are compared
THREE = ("layers.0", "layers.1", "layers.2")
# The names of eagle/model/cnets.py; its config.json has CONFIG's keys and the first of these (traineagle3/).
KEY, FUSED_BY = "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"
MIDLAYER = SHAPES | {f"self_attn.{name}_proj.weight": (rows, 2 * D) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
MIDLAYER |= {"input_layernorm.weight": (D,), "hidden_norm.weight": (D,)}


def eagle(layers: int = 1, bias: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights under the names of cnets1.py."""
    shapes = {"fc.weight": (D, 2 * D)} | ({"fc.bias": (D,)} if bias else {})
    shapes |= {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in SHAPES.items()}
    return _random(shapes, dtype)


def eagle3(
    ids: Tensor | None = SOME, dtype: torch.dtype = torch.float16, layers: tuple[str, ...] = ("midlayer",)
) -> dict[str, Tensor]:
    """Random weights under the names of cnets.py; None is the whole vocabulary."""
    proposed = range(VOCABULARY) if ids is None else ids.tolist()
    shapes = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (len(proposed), D)}
    shapes |= {f"{layer}.{name}": shape for layer in layers for name, shape in MIDLAYER.items()}
    marks = torch.tensor([token in proposed for token in range(VOCABULARY)])
    offsets = torch.tensor([token - row for row, token in enumerate(proposed)])
    return _random(shapes, dtype) | ({} if ids is None else {"d2t": offsets, "t2d": marks})


def _random(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=generator) * 0.2).to(dtype) for name, shape in shapes.items()}


def agree(folder: Path, draft: DraftModel, target: Target, config: dict | None = None) -> None:
    """What ours drafts from a prompt of 5 slots is what the twin of a published folder does: features, EAGLE-3 logits.

    Args:
        config: the keys of its config.json, where they are not as EAGLE publishes them.
    """
    generator, inner = torch.Generator().manual_seed(0), draft.config.aux_layers
    tokens = torch.randint(VOCABULARY, (4 + DEPTH,), generator=generator)
    outputs = torch.randn(5, draft.fc.in_features if inner else D, generator=generator)
    make = naive.PublishedEagle3 if inner else naive.PublishedDraft
    twin = make(read(folder), config or stated(folder), draft.config.allocation)
    expected = torch.stack(twin.chain(target.embed_head.embedding, tokens, outputs, DEPTH))
    ours = torch.stack(naive.chain(draft, target.embed_head.embed(tokens), outputs, 4, DEPTH))
    if inner:
        embed_head, features = target.embed_head.restrict(draft.vocabulary), ours
        ours = torch.full_like(expected, -torch.inf)  # (K, V)
        ours[:, draft.token_ids(torch.arange(len(embed_head.head)))] = draft.logits(features, embed_head)
    assert close(ours, expected, sums=DEPTH * LAYER)
