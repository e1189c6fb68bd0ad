"""What drafts of all kinds share: one `fc`, and a decoder layer for every run of positions; `kinds.py` has the rest."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import CONFIG, TRAINED_ON, WEIGHTS, encode_digests
from poss_lightning.draft.layer import Rope, Specialist, rope_at
from poss_lightning.files import atomic
from poss_lightning.prepack import Product
from poss_lightning.target_model.spec import EmbedHead

# Fields of the config that a draft takes over with the weights that it starts from.
INHERITED = ("rope_theta", "rope_scaling", "norm_before_residual", "norm_before_fc")


class DraftModel(nn.Module):
    """Specialists that share one `fc`, and borrow the target's embedding, and some its head (`EmbedHead`).

    A kind is a subclass (`draft/kinds.py`), which `make_draft` chooses. It has four methods of its own: `fuse` makes
    features of what the draft reads of the target, `forward` trains all positions, `head_input` and `logits` turn what
    it predicts into logits.

    Args:
        config: the sizes and the allocation.
        vocabulary: (V,) token ids the draft may propose, ascending; None for all.

    Attributes:
        trained_on: digests of the texts that it was trained on, see `features/source.py`; empty where they are unknown.

    Raises:
        ValueError: a vocabulary that contradicts the config, or is not ascending token ids.
    """

    layer_type: type[Specialist] = Specialist
    layers: Sequence[Specialist]  # an nn.ModuleList: of specialists, or of a block draft
    trained_on: frozenset[int] = frozenset()
    vocabulary: Tensor | None
    scale: Tensor  # (inputs of `fc`,)
    fc_norm: nn.ModuleList  # of a kind that has `input_norms`
    lm_head: nn.Linear  # of a kind that has its `own_head`

    def __init__(self, config: DraftConfig, vocabulary: Tensor | None = None):
        super().__init__()
        _check_vocabulary(vocabulary, config)
        self.config, width = config, config.target.hidden_size
        self.fc = nn.Linear((len(config.aux_layers) or 2) * width, width, bias=not config.aux_layers)
        layers = nn.ModuleList(self.layer_type(config) for _ in range(config.layer_count))
        self.layers = layers  # pyright: ignore[reportAttributeAccessIssue]
        self.add_modules(config)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("scale", torch.ones(self.fc.in_features))  # of the input of `fc`; not learnt
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:  # where a draw takes a millisecond
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def add_modules(self, config: DraftConfig) -> None:
        """Add what only this kind has."""

    # --- what a kind says ---

    def fuse(self, draft_input: Tensor) -> Tensor:
        """Make features of what the draft reads of the target: (B, T, R) -> (B, T, D)."""
        return self.fc(draft_input * self.scale.to(draft_input.dtype))

    def head_input(self, predicted: Tensor) -> Tensor:
        """Return what the head reads of predicted features: (..., D) -> (..., D)."""
        return predicted

    def logits(self, predicted: Tensor, embed_head: EmbedHead, product: Product | None = None) -> Tensor:
        """Return logits of predicted features over the draft's vocabulary: (..., D) -> (..., V).

        `product` is how to multiply by the head of `embed_head`.
        """
        return embed_head.logits(self.head_input(predicted), product)

    # --- one step ---

    def rope_at(self, positions: Tensor) -> Rope:
        """Compute rotary angles of slots at positions (B or 1, T)."""
        spec = self.config.target
        return rope_at(positions, spec.head_dim, self.config.rope_theta or spec.rope_theta, self.config.rope_scaling)

    def token_ids(self, rows: Tensor) -> Tensor:
        """Map rows of the head to the target's token ids."""
        return rows if self.vocabulary is None else self.vocabulary[rows]

    # --- how it begins ---

    def normalise(self, embedded: Tensor, draft_input: Tensor) -> None:
        """Scale the inputs of `fc` to a mean square of 1, else its gradient is that of a few much larger dimensions.

        Args:
            embedded: (D,) root mean squares of embeddings.
            draft_input: (R,) root mean squares of the draft's input.
        """
        least = 1e-3 * draft_input.median()  # a dimension that is dead in these samples is not blown up
        self.scale[-len(draft_input) :] = 1 / draft_input.clamp(min=least)

    def init_head(self, embed_head: EmbedHead) -> None:
        """Copy what it learns to change of the target's embedding and head, cut to the draft's vocabulary."""

    def start_from(self, other: "DraftModel") -> None:
        """Take over the weights and rotary angles of another draft; of an own head, the rows that both have.

        Every specialist becomes the one that serves its first position in `other`. The published start of PosS is a
        single layer, copied into every specialist. A wider MLP may start from a narrower one.

        Raises:
            ValueError: the targets, kinds, layers, norms or other sizes differ.
        """
        config, start = self.config, other.config
        if difference := config.target.difference(start.target):
            raise ValueError(f"the draft to start from has a different target: {difference}")
        for name in ("kind", "aux_layers", "norm_eps"):
            if (value := getattr(config, name)) != (other_value := getattr(start, name)):
                raise ValueError(f"the draft to start from has {name} {other_value}, and this one {value}")
        for name in ("fc_norm", "norm_output"):
            if getattr(start, name) and not getattr(config, name):
                raise ValueError(f"the draft to start from has {name}, and this one has not: make {name} true")
        try:
            self.copy_from(other)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the draft to start from has other sizes: {error}") from error

    def copy_from(self, other: "DraftModel") -> None:
        """Take over another draft's weights, after the checks of `start_from`."""
        self.config = replace(self.config, **{name: getattr(other.config, name) for name in INHERITED})
        self.trained_on = other.trained_on
        apart = ("layers.", "lm_head.", "vocabulary")
        shared = {name: value for name, value in other.state_dict().items() if not name.startswith(apart)}
        self.load_state_dict(shared, strict=False)
        for layer, source in zip(self.layers, self.sources(other), strict=True):
            layer.start_from(source)

    def sources(self, other: "DraftModel") -> list[Specialist]:
        """List the layer of another draft that each of its own layers starts from."""
        firsts = [self.config.specialists.index(index) + 1 for index in range(len(self.layers))]
        return [other.layers[other.config.specialist_at(first)] for first in firsts]

    # --- its folder ---

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, each atomically."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        header = {TRAINED_ON: encode_digests(self.trained_on)} if self.trained_on else None
        with atomic(Path(folder) / WEIGHTS) as path:
            save_file(state, path, header)
        with atomic(Path(folder) / CONFIG) as path:
            path.write_text(self.config.to_json())


def _check_vocabulary(vocabulary: Tensor | None, config: DraftConfig) -> None:
    if (None if vocabulary is None else len(vocabulary)) != config.vocabulary_size:
        raise ValueError(f"vocabulary_size is {config.vocabulary_size}, unlike the length of the vocabulary")
    total = config.target.vocab_size
    if vocabulary is not None and not are_ids(vocabulary, total):
        raise ValueError(f"vocabulary must be ascending token ids below {total}")


def are_ids(ids: Tensor, total: int) -> bool:
    """Return whether these are ascending ids of a vocabulary of `total` tokens."""
    return bool((ids.diff() > 0).all() and ((ids >= 0) & (ids < total)).all())
