"""The draft: one `fc`, and a decoder layer for every run of positions; its config says which serves which.

Two kinds read what they predicted. They differ in what a slot's z is, and in whose head turns a prediction into
logits (docs/METHOD.md, 2 and 9); the third, `block`, drafts all positions at once (`draft/block.py`):

                    eagle2                                eagle3
    draft input     the feature f                         outputs g of three inner layers, side by side
    fuse            F = f                                 h = fc(scale * g), 3D -> D; each third normed with fc_norm,
                                                          and all together with norm_before_fc
    join, z         fc(scale * [e; F]), 2D -> D           [e; h], or [e; F̂] where the draft made F̂ itself
    next position   F̂                                     F̂, or norm(F̂) with norm_output
    logits of F̂     the target's head, scaled or capped   the draft's own lm_head(norm(F̂))
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from poss_lightning.draft.attention import Packing
from poss_lightning.draft.block import draft_blocks
from poss_lightning.draft.card import model_card, public_target
from poss_lightning.draft.config import DraftConfig, check_draft
from poss_lightning.draft.folder import (
    CONFIG,
    TRAINED_ON,
    WEIGHTS,
    check_state,
    decode_digests,
    encode_digests,
    find_draft,
)
from poss_lightning.draft.layer import BlockLayer, Norm, NormedSpecialist, Rope, Specialist, rope_at
from poss_lightning.draft.unroll import unroll
from poss_lightning.files import atomic
from poss_lightning.prepack import Product
from poss_lightning.target.spec import EmbedHead

# options that a draft takes over with the weights that it starts from
INHERITED = ("rope_theta", "rope_scaling", "norm_before_residual", "norm_before_fc")


class Layers(nn.ModuleList):
    """The layers of specialists, or of a block draft, in order; it tells a type checker what they are."""

    if TYPE_CHECKING:

        def __getitem__(self, index: int) -> Specialist: ...

        def __iter__(self) -> Iterator[Specialist]: ...


class Specialists(nn.Module):
    """Specialists that share one `fc`, and borrow the target's embedding, and in EAGLE-2 its head (`EmbedHead`).

    Args:
        config: the sizes and the allocation.
        vocabulary: (V,) token ids the draft may propose, ascending; None for all.

    Attributes:
        trained_on: digests of the texts that it was trained on, see `features/texts.py`; empty where they are unknown.

    Raises:
        ValueError: a vocabulary that contradicts the config, or is not ascending token ids.
    """

    trained_on: frozenset[int] = frozenset()
    vocabulary: Tensor | None
    scale: Tensor  # (inputs of `fc`,)
    fc_norm: nn.ModuleList  # a norm for each layer that is read, or one for all, where the config says so
    norm: Norm  # before the head, unless it predicts the target's feature
    lm_head: nn.Linear  # where the config says `own_head`
    context_norm: Norm  # this and the next where it says `one_pass`
    mask: Tensor  # (D,) the embedding of the mask token

    def __init__(self, config: DraftConfig, vocabulary: Tensor | None = None):
        super().__init__()
        spec = config.target
        _check_vocabulary(vocabulary, config)
        self.config = config
        parts, width = len(config.layers) or 2, spec.hidden_size
        self.fc = nn.Linear(parts * width, width, bias=not config.reads_inner_layers)
        sizes: dict[str, Any] = {
            "width": width,
            "intermediate": config.intermediate_size or spec.intermediate_size,
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "norm_eps": config.eps,
        }
        if config.one_pass:
            self.layers = Layers(BlockLayer(**sizes) for _ in range(config.layer_count))
            self.context_norm = Norm(width, eps=config.eps)
            self.register_buffer("mask", torch.zeros(width))
        elif config.reads_inner_layers:
            sizes["norm_before_residual"] = config.norm_before_residual
            self.layers = Layers(NormedSpecialist(**sizes) for _ in config.allocation)
        else:
            self.layers = Layers(Specialist(**sizes) for _ in config.allocation)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("scale", torch.ones(self.fc.in_features))  # of the input of `fc`; not learnt
        if norms := config.input_norms:
            part = self.fc.in_features // norms
            self.fc_norm = nn.ModuleList(Norm(part, eps=config.eps) for _ in range(norms))
        if not config.predicts_feature:
            self.norm = Norm(width, eps=config.eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, config.vocabulary_size or spec.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        embedded: Tensor,
        draft_input: Tensor,
        depth: int,
        packing: Packing | None = None,
        begins: Tensor | None = None,
    ) -> list[Tensor]:
        """The unroll, or a block at each slot: one call per step, for strategies that shard or wrap the draft.

        Args:
            begins: (B, T) slots where a block is to begin; None for all. Other kinds begin everywhere.
        """
        if self.config.one_pass:
            return draft_blocks(self, embedded, draft_input, depth, packing, begins)
        return unroll(self, embedded, draft_input, depth, packing)

    @property
    def stack(self) -> list[BlockLayer]:
        """The layers of a block draft, each of which reads the one before."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    # --- one step ---

    def fuse(self, draft_input: Tensor) -> Tensor:
        """The draft's input of the target as features that `join` takes: (B, T, R) -> (B, T, D)."""
        if not self.config.reads_inner_layers:
            return draft_input
        if self.config.input_norms:
            parts = draft_input.chunk(len(self.fc_norm), dim=-1)
            draft_input = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused = self.fc(draft_input * self.scale.to(draft_input.dtype))
        return self.context_norm(fused) if self.config.one_pass else fused

    def next_features(self, predicted: Tensor) -> Tensor:
        """What `join` takes at the next position of what was predicted here: (B, T, D) -> (B, T, D)."""
        return self.norm(predicted) if self.config.norm_output else predicted

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """z of a slot: the token on its right with the feature on its left, (B, T, D) each -> (B, T, Z)."""
        joined = torch.cat([embedded.to(features.dtype), features], dim=-1)
        return joined if self.config.reads_inner_layers else self.fc(joined * self.scale.to(joined.dtype))

    def rope_at(self, positions: Tensor) -> Rope:
        """Rotary angles of slots at positions (B or 1, T)."""
        spec = self.config.target
        return rope_at(positions, spec.head_dim, self.config.rope_theta or spec.rope_theta, self.config.rope_scaling)

    def head_input(self, predicted: Tensor) -> Tensor:
        """What the head reads of predicted features: (..., D) -> (..., D)."""
        return predicted if self.config.predicts_feature else self.norm(predicted)

    def token_ids(self, rows: Tensor) -> Tensor:
        """Rows of the head -> the target's token ids."""
        return rows if self.vocabulary is None else self.vocabulary[rows]

    def logits(self, predicted: Tensor, embed_head: EmbedHead, product: Product | None = None) -> Tensor:
        """Logits of predicted features (..., D) over the draft's vocabulary, to which `embed_head` is cut: (..., V).

        `product` is how to multiply by the head of `embed_head`.
        """
        features = self.head_input(predicted)
        return self.lm_head(features) if self.config.own_head else embed_head.logits(features, product)

    # --- how it begins ---

    def normalise(self, embedded: Tensor, draft_input: Tensor) -> None:
        """Scale the inputs of `fc` to a mean square of 1, else its gradient is that of a few much larger dimensions.

        Args:
            embedded: (D,) root mean squares of embeddings.
            draft_input: (R,) root mean squares of the draft's input.
        """
        if self.config.input_norms:  # its output, if all vectors of a layer were equally long
            parts = draft_input.unflatten(-1, (len(self.fc_norm), -1))
            draft_input = (parts / parts.square().mean(-1, keepdim=True).sqrt()).flatten()
        least = 1e-3 * draft_input.median()  # a dimension that is dead in these samples is not blown up
        draft_input = draft_input.clamp(min=least)
        self.scale.copy_(1 / (draft_input if self.config.reads_inner_layers else torch.cat([embedded, draft_input])))

    def init_fc_norm(self, draft_input: Tensor) -> None:
        """Let `fc_norm` keep vectors of usual length as they are, for an `fc` that was trained without it.

        Args:
            draft_input: (R,) root mean squares of the draft's input.
        """
        for norm, part in zip(self.fc_norm, draft_input.chunk(len(self.fc_norm)), strict=True):
            norm.get_parameter("weight").data.fill_(part.square().mean().sqrt())

    def init_head(self, embed_head: EmbedHead) -> None:
        """Copy the target's head, cut to the draft's vocabulary, into a head of its own, and the mask's embedding."""
        if self.config.own_head:
            self.lm_head.weight.data.copy_(embed_head.head * embed_head.scale)
        if self.config.one_pass:
            self.mask.copy_(embed_head.embedding[self.config.mask_row])

    def start_from(self, other: "Specialists") -> None:
        """Take over the weights and rotary angles of another draft; of an own head, the rows that both have.

        Every specialist becomes the one that serves its first position in `other`. The published start of PosS is a
        single layer, copied into every specialist. A wider MLP may start from a narrower one.

        Raises:
            ValueError: the targets, kinds, layers, norms or other sizes differ.
        """
        ours, theirs = self.config, other.config
        if difference := ours.target.difference(theirs.target):
            raise ValueError(f"the draft to start from has a different target: {difference}")
        for name in ("kind", "layers", "norm_eps"):
            if (own := getattr(ours, name)) != (its := getattr(theirs, name)):
                raise ValueError(f"the draft to start from has {name} {its}, and this one {own}")
        for name in ("fc_norm", "norm_output"):
            if getattr(theirs, name) and not getattr(ours, name):
                raise ValueError(f"the draft to start from has {name}, and this one has not: make {name} true")
        try:
            self._copy(other)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the draft to start from has other sizes: {error}") from error

    def _copy(self, other: "Specialists") -> None:
        self.config = config = replace(self.config, **{name: getattr(other.config, name) for name in INHERITED})
        self.trained_on = other.trained_on
        if other.config.norm_before_fc:  # and no option of a training makes one
            self.fc_norm = copy.deepcopy(other.fc_norm)
        apart = ("layers.", "lm_head.", "vocabulary")
        shared = {name: value for name, value in other.state_dict().items() if not name.startswith(apart)}
        self.load_state_dict(shared, strict=False)
        if config.one_pass:
            sources = list(other.layers)
        else:
            firsts = [config.specialists.index(index) + 1 for index in range(len(self.layers))]
            sources = [other.layers[other.config.specialist_at(first)] for first in firsts]
        for layer, source in zip(self.layers, sources, strict=True):
            layer.start_from(source)
        if config.own_head:
            total = config.target.vocab_size
            ids, other_ids = (
                torch.arange(total) if draft.vocabulary is None else draft.vocabulary.cpu() for draft in (self, other)
            )
            kept = other.lm_head.weight.data[torch.isin(other_ids, ids)]
            self.lm_head.weight.data[torch.isin(ids, other_ids)] = kept

    # --- its folder ---

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, each atomically."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        header = {TRAINED_ON: encode_digests(self.trained_on)} if self.trained_on else None
        with atomic(Path(folder) / WEIGHTS) as path:
            save_file(state, path, header)
        with atomic(Path(folder) / CONFIG) as path:
            path.write_text(self.config.to_json())

    def push_to_hub(
        self, repo_id: str, *, private: bool = False, license: str | None = None, measured: str = ""
    ) -> str:
        """Upload the draft to the Hugging Face hub with its model card; every command then takes its id as a draft.

        Log in first, with `hf auth login`. An existing repository gets a new commit.

        Args:
            repo_id: OWNER/NAME of the repository.
            private: make a new repository private.
            license, measured: see `draft.card.model_card`.

        Returns:
            The address of the repository.

        Raises:
            HFValidationError, HfHubHTTPError: no such id, or the hub refuses.
        """
        api, uploaded = HfApi(), copy.copy(self)
        target = replace(self.config.target, name=public_target(self.config.target.name))
        uploaded.config = replace(self.config, target=target)
        with TemporaryDirectory() as folder:
            uploaded.save_pretrained(folder)
            model_card(self, repo_id, license, measured).save(Path(folder) / "README.md")
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload draft")
        return str(url)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "Specialists":
        """Load a draft from a local folder, a hub id, or a shipped draft's name, in float32 however it is stored.

        Raises:
            FileNotFoundError: there is no such draft, or a file is missing.
            ValueError: something else is there, or config and weights contradict each other; the message names both.
        """
        check_draft(source)
        folder = find_draft(source)
        check_draft(source, folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} is not a draft: it has no {name}")
        config = DraftConfig.from_json((folder / CONFIG).read_text(), folder / CONFIG)
        try:
            state = load_file(folder / WEIGHTS)
            with safe_open(folder / WEIGHTS, "pt") as file:
                header = file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is damaged, or not a safetensors file: {error}") from error
        try:
            check_state(state)
            draft = cls(config, state.get("vocabulary"))
            draft.trained_on = decode_digests(header.get(TRAINED_ON, ""))
            draft.load_state_dict(state)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {error}") from error
        return draft


def _check_vocabulary(vocabulary: Tensor | None, config: DraftConfig) -> None:
    if (None if vocabulary is None else len(vocabulary)) != config.vocabulary_size:
        raise ValueError(f"vocabulary_size is {config.vocabulary_size}, unlike the length of the vocabulary")
    total = config.target.vocab_size
    if vocabulary is not None and not ((vocabulary.diff() > 0).all() and vocabulary[0] >= 0 and vocabulary[-1] < total):
        raise ValueError(f"vocabulary must be ascending token ids below {total}")
