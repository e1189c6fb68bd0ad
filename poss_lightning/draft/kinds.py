"""The kinds of drafts, which differ in what they read of the target, and in whose head turns a prediction into logits.

Two read what they predicted (docs/METHOD.md, 2 and 9); the third, `block`, drafts all positions at once (`block.py`):

                    eagle2                                eagle3
    draft input     the feature f                         outputs g of three inner layers, side by side
    fuse            F = f                                 h = fc(scale * g), 3D -> D; each third normed with fc_norm,
                                                          and all together with norm_before_fc
    join, z         fc(scale * [e; F]), 2D -> D           [e; h], or [e; F̂] where the draft made F̂ itself
    next position   F̂                                     F̂, or norm(F̂) with norm_output
    logits of F̂     the target's head, scaled or capped   the draft's own lm_head(norm(F̂))
"""

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from poss_lightning.draft.block import Block
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import (
    CONFIG,
    TRAINED_ON,
    WEIGHTS,
    check_draft,
    check_state,
    decode_digests,
    find_draft,
    load_checkpoint,
)
from poss_lightning.draft.layer import Norm, NormedSpecialist
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.draft.unroll import Chain
from poss_lightning.prepack import Product
from poss_lightning.target_model.spec import EmbedHead


class Eagle2(Chain):
    """Predicts the target's next feature from its last ones; the target's head reads it."""

    def fuse(self, draft_input: Tensor) -> Tensor:
        return draft_input

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        joined = super().join(embedded, features)
        return self.fc(joined * self.scale.to(joined.dtype))

    def normalise(self, embedded: Tensor, draft_input: Tensor) -> None:
        super().normalise(embedded, draft_input)
        self.scale[: len(embedded)] = 1 / embedded


class Eagle3(Chain):
    """Reads inner layers of the target, and has an LM head of its own, so that it predicts no feature."""

    layer_type = NormedSpecialist

    def add_modules(self, config: DraftConfig) -> None:
        width = config.target.hidden_size
        if norms := config.input_norms:
            self.fc_norm = nn.ModuleList(Norm(self.fc.in_features // norms, eps=config.eps) for _ in range(norms))
        self.norm = Norm(width, eps=config.eps)
        self.lm_head = nn.Linear(width, config.vocabulary_size or config.target.vocab_size, bias=False)

    def fuse(self, draft_input: Tensor) -> Tensor:
        if self.config.input_norms:
            parts = draft_input.chunk(len(self.fc_norm), dim=-1)
            draft_input = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return super().fuse(draft_input)

    def next_features(self, predicted: Tensor) -> Tensor:
        return self.norm(predicted) if self.config.norm_output else predicted

    def head_input(self, predicted: Tensor) -> Tensor:
        return self.norm(predicted)

    def logits(self, predicted: Tensor, embed_head: EmbedHead, product: Product | None = None) -> Tensor:
        return self.lm_head(self.head_input(predicted))

    def normalise(self, embedded: Tensor, draft_input: Tensor) -> None:
        if self.config.input_norms:  # their output, if all vectors of a layer were equally long
            parts = draft_input.unflatten(-1, (len(self.fc_norm), -1))
            draft_input = (parts / parts.square().mean(-1, keepdim=True).sqrt()).flatten()
        super().normalise(embedded, draft_input)

    def init_fc_norm(self, draft_input: Tensor) -> None:
        """Let `fc_norm` keep vectors of usual length as they are, for an `fc` that was trained without it.

        Args:
            draft_input: (R,) root mean squares of the draft's input.
        """
        for norm, part in zip(self.fc_norm, draft_input.chunk(len(self.fc_norm)), strict=True):
            norm.get_parameter("weight").data.fill_(part.square().mean().sqrt())

    def init_head(self, embed_head: EmbedHead) -> None:
        self.lm_head.weight.data.copy_(embed_head.head * embed_head.scale)

    def copy_from(self, other: DraftModel) -> None:
        if other.config.norm_before_fc:  # and no option of a training makes one
            self.fc_norm = copy.deepcopy(other.fc_norm)
        super().copy_from(other)
        total = self.config.target.vocab_size
        ids, other_ids = (
            torch.arange(total) if draft.vocabulary is None else draft.vocabulary.cpu() for draft in (self, other)
        )
        self.lm_head.weight.data[torch.isin(ids, other_ids)] = other.lm_head.weight.data[torch.isin(other_ids, ids)]


PREFIX = "draft."  # of the draft's tensors in the state of `DraftModule`
KINDS: dict[str, type[DraftModel]] = {"eagle2": Eagle2, "eagle3": Eagle3, "block": Block}


def make_draft(config: DraftConfig, vocabulary: Tensor | None = None) -> DraftModel:
    """Make a draft of its kind with random weights; arguments and errors are those of `DraftModel`."""
    return KINDS[config.kind](config, vocabulary)


def load_draft(source: str | Path) -> DraftModel:
    """Load a draft from a local folder, a hub id, a shipped draft's name, or a checkpoint of a training, *.ckpt.

    It is in float32, however it is stored. A checkpoint of any strategy needs neither a GPU nor a process group.

    Raises:
        FileNotFoundError: there is no such draft, or a file is missing.
        ValueError: something else is there, or config and weights contradict each other; the message names both.
    """
    config, state, digests, where = _read_checkpoint(source) if str(source).endswith(".ckpt") else _read_folder(source)
    try:
        check_state(state)
        draft = make_draft(config, state.get("vocabulary"))
        draft.trained_on = decode_digests(digests)
        draft.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{where} does not fit its config: {error}") from error
    return draft


Parts = tuple[DraftConfig, dict[str, Tensor], str, Path]  # with the digests of what it was trained on, and the file


def _read_checkpoint(source: str | Path) -> Parts:
    stored, path = load_checkpoint(Path(source)), Path(source)
    weights = {
        name.removeprefix(PREFIX): value for name, value in stored["state_dict"].items() if name.startswith(PREFIX)
    }
    return DraftConfig.from_json(stored["draft"], path), weights, stored.get(TRAINED_ON, ""), path


def _read_folder(source: str | Path) -> Parts:
    check_draft(folder := find_draft(source), source)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a draft: it has no {name}")
    config, file = DraftConfig.from_json((folder / CONFIG).read_text(), folder / CONFIG), folder / WEIGHTS
    try:
        with safe_open(file, "pt") as opened:
            return config, load_file(file), (opened.metadata() or {}).get(TRAINED_ON, ""), file
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or not a safetensors file: {error}") from error
