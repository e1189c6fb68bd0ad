"""The draft model: one `fc`, and one decoder layer for every run of positions. Its config says which serves which.

Its two kinds differ in what a slot's z is, and in whose head turns a prediction into logits (docs/METHOD.md, 2 and 9):

                       eagle2                                eagle3
    read of the target the feature f                         outputs g of three inner layers, side by side
    fuse               F = f                                 h = fc(scale * g), 3D -> D
    join, z            fc(scale * [e; F]), 2D -> D           [e; h], or [e; F̂] where the draft made F̂ itself
    logits of F̂        the target's head, its ends' scale    the draft's own lm_head(norm(F̂))
"""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.layer import Norm, NormedSpecialist, Rotation, Specialist, rotation
from poss_lightning.draft.unroll import unroll
from poss_lightning.files import atomic, fetch
from poss_lightning.target.spec import Ends, Product, project

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADS = Path(str(files("poss_lightning") / "draft" / "heads"))  # drafts of the embedded target, shipped


class Specialists(nn.Module):
    """S decoder layers behind one `fc`. The embedding is the target's (`Ends`) and no part of it; so is EAGLE-2's head.

    Args:
        config: the sizes and the allocation.
        vocabulary: (V,) token ids the draft may propose, ascending; None for all.
    """

    def __init__(self, config: DraftConfig, vocabulary: Tensor | None = None):
        super().__init__()
        if (None if vocabulary is None else len(vocabulary)) != config.vocabulary_size:
            raise ValueError(f"vocabulary_size is {config.vocabulary_size}, which the vocabulary given does not have")
        spec = config.target
        if vocabulary is not None and not (
            (vocabulary.diff() > 0).all() and vocabulary[0] >= 0 and vocabulary[-1] < spec.vocab_size
        ):
            raise ValueError(f"vocabulary must be ascending token ids below {spec.vocab_size}")
        width, intermediate = spec.hidden_size, config.intermediate_size or spec.intermediate_size
        sizes = (width, intermediate, spec.heads, spec.kv_heads, spec.head_dim, spec.norm_eps)
        self.config = config
        self.fuses = config.kind == "eagle3"  # fuses inner layers, and has a head of its own
        layer, parts = (NormedSpecialist, len(config.layers)) if self.fuses else (Specialist, 2)
        self.fc = nn.Linear(parts * width, width, bias=not self.fuses)
        self.layers = nn.ModuleList(layer(*sizes) for _ in config.allocation)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("scale", torch.ones(self.fc.in_features))  # of what `fc` reads; not learnt
        if self.fuses:
            self.norm = Norm(width, eps=spec.norm_eps)
            self.lm_head = nn.Linear(width, config.vocabulary_size or spec.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if not self.fuses:
            nn.init.zeros_(self.fc.bias)

    def forward(self, embedded: Tensor, features: Tensor, depth: int, packing: Packing | None = None) -> list[Tensor]:
        """The unroll, so that a strategy that shards or wraps the draft sees one call a step; see `unroll`."""
        return unroll(self, embedded, features, depth, packing)

    def fuse(self, read: Tensor) -> Tensor:
        """What is read of the target as features that `join` takes: (B, T, R) -> (B, T, D)."""
        return self.fc(read * self.scale.to(read.dtype)) if self.fuses else read

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """z of a slot: the token on its right with the feature on its left, (B, T, D) each -> (B, T, Z)."""
        joined = torch.cat([embedded.to(features.dtype), features], dim=-1)
        return joined if self.fuses else self.fc(joined * self.scale.to(joined.dtype))

    def logits(self, predicted: Tensor, ends: Ends, product: Product = project) -> Tensor:
        """Of predicted features (..., D), over the draft's vocabulary: (..., V); `ends` are cut to it."""
        (read,), own = self.own_head([predicted])
        return ends.logits(read, product) if own is None else product(read, own)

    def own_head(self, predictions: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """What a head reads of predicted features (..., D), and the draft's own head (V, D); None for the target's."""
        return ([self.norm(one) for one in predictions], self.lm_head.weight) if self.fuses else (predictions, None)

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotary angles of slots at positions (B or 1, T)."""
        spec = self.config.target
        return rotation(positions, spec.head_dim, self.config.rope_theta or spec.rope_theta)

    def serving(self, position: int) -> Specialist:
        """The layer that serves draft position `position` (from 1)."""
        return self.layers[self.config.serving(position)]

    def normalise(self, embedded: Tensor, features: Tensor) -> None:
        """Let `fc` read all with a mean square of 1: root mean squares of embeddings (D,) and what is fused (R,).

        A few dimensions of a target's features are many times larger than the rest, and would rule its gradient.
        """
        least = 1e-3 * features.median()  # a dimension that is dead in these samples is not blown up
        features = features.clamp(min=least)
        self.scale.copy_(1 / (features if self.fuses else torch.cat([embedded, features])))

    def take_head(self, ends: Ends) -> None:
        """Let an own head begin as the target's, whose `ends` are cut to the draft's vocabulary."""
        if self.fuses:
            self.lm_head.weight.data.copy_(ends.head * ends.scale)

    def start_from(self, other: "Specialists") -> None:
        """Take `fc`, its scale and the rotary base, and for every specialist the layer that serves its first position.

        Of an own head what both vocabularies have.

        The published start of PosS is a single layer, copied into every specialist. A wider MLP starts from a narrower.

        Raises:
            ValueError: the sizes or the targets differ otherwise.
        """
        if difference := self.config.target.difference(other.config.target):
            raise ValueError(f"the draft to start from has another target: {difference}")
        if self.config.kind != other.config.kind:
            raise ValueError(f"the draft to start from is {other.config.kind}, and this one {self.config.kind}")
        try:
            self.fc.load_state_dict(other.fc.state_dict())
            self.scale.copy_(other.scale)
            self.config = replace(self.config, rope_theta=other.config.rope_theta)
            for index, layer in enumerate(self.layers):
                first = self.config.served.index(index) + 1  # its first position
                layer.start_from(other.serving(first))
            if self.fuses:
                self.norm.load_state_dict(other.norm.state_dict())
                self._start_head(other)
        except RuntimeError as error:
            raise ValueError(f"the draft to start from has other sizes: {error}") from error

    def _start_head(self, other: "Specialists") -> None:
        total = self.config.target.vocab_size
        mine, theirs = (
            torch.arange(total) if draft.vocabulary is None else draft.vocabulary.cpu() for draft in (self, other)
        )
        self.lm_head.weight.data[torch.isin(mine, theirs)] = other.lm_head.weight.data[torch.isin(theirs, mine)]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors; a file is replaced only when the new one is whole."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        with atomic(Path(folder) / WEIGHTS) as path:
            save_file(state, path)
        with atomic(Path(folder) / CONFIG) as path:
            path.write_text(self.config.to_json())

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "Specialists":
        """Read a draft, in float32 however it was stored, from a local folder, a hub id, or one of the shipped heads.

        Raises:
            FileNotFoundError: none of them, or a file is missing.
            ValueError: the config or the weights contradict it; the message names file and tensor.
        """
        folder = locate(source)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} is not a draft: it has no {name}")
        config = DraftConfig.from_json((folder / CONFIG).read_text(), folder / CONFIG)
        try:
            state = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is torn, or no safetensors file: {error}") from error
        try:
            draft = cls(config, state.get("vocabulary"))
            state.setdefault("scale", draft.scale)  # drafts of before there was one
            draft.load_state_dict(state)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {error}") from error
        return draft


def shipped() -> list[str]:
    """Names of the heads that come with the package, e.g. embedded-hass."""
    return sorted(folder.name for folder in HEADS.iterdir()) if HEADS.is_dir() else []


def here(source: str | Path) -> Path:
    """Where a draft would be on this machine: the folder of that name, or else the shipped head."""
    return HEADS / source if source in shipped() and not Path(source).is_dir() else Path(source)


def locate(source: str | Path) -> Path:
    """The folder of a draft: a local one, a shipped head's, or a hub id's after its download.

    Raises:
        FileNotFoundError: none of them.
    """
    if (folder := here(source)).is_dir():
        return folder
    return fetch(str(source), "draft", [CONFIG, WEIGHTS], f", nor a shipped head: {', '.join(shipped()) or 'none'}")
