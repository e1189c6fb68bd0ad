"""The draft model: one `fc`, and one decoder layer for every run of positions. Its config says which serves which."""

import json
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from poss_lightning.draft.attention import Packing
from poss_lightning.draft.layer import Rotation, Specialist, rotation
from poss_lightning.draft.unroll import unroll
from poss_lightning.files import atomic
from poss_lightning.target.spec import TargetSpec

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADS = Path(str(files("poss_lightning") / "draft" / "heads"))  # drafts of the embedded target, shipped


@dataclass(frozen=True)
class DraftConfig:
    """What defines a draft; stored with it, and asked by training and decoding alike.

    Args:
        target: the target it drafts for.
        allocation: positions served by each specialist, e.g. [2, 2, 2]; past the end the last one goes on.
        depth: passes it was trained for.
        detach: whether features are detached between passes.
        intermediate_size: width of a specialist's MLP; None for the target's.
        vocabulary_size: rows of the target's head the draft may propose; None for all.
        order: the specialist, from 0, of each position, where they do not serve runs, e.g. [0, 1, 2, 0, 1, 2]; the
            allocation counts the same positions.
        kv: "separate", each specialist reads keys and values of its own making; or "shared", all read those that the
            specialist made which served a slot first (SPEED): one cache instead of one a specialist.
    """

    target: TargetSpec
    allocation: tuple[int, ...]
    depth: int
    detach: bool = True
    intermediate_size: int | None = None
    vocabulary_size: int | None = None
    order: tuple[int, ...] | None = None
    kv: str = "separate"

    def __post_init__(self):
        object.__setattr__(self, "allocation", tuple(self.allocation))
        object.__setattr__(self, "order", None if self.order is None else tuple(self.order))
        if not self.allocation or any(not isinstance(a, int) or a < 1 for a in self.allocation):
            raise ValueError(
                f"allocation is {list(self.allocation)}; it must be a list of positive integers, e.g. [2, 2, 2]"
            )
        for name in ("depth", "intermediate_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.kv not in ("separate", "shared"):
            raise ValueError(f"kv is {self.kv!r}; it must be separate or shared")
        if sorted(self.served) != (runs := [i for i, run in enumerate(self.allocation) for _ in range(run)]):
            raise ValueError(
                f"order is {list(self.order)}; for the allocation {list(self.allocation)} it must be a rearrangement "
                f"of {runs}"
            )

    @property
    def served(self) -> tuple[int, ...]:
        """The specialist, from 0, of each position that the allocation names."""
        return self.order or tuple(index for index, run in enumerate(self.allocation) for _ in range(run))

    def serving(self, position: int) -> int:
        """Which specialist (from 0) serves draft position `position` (from 1); past the end the last one goes on."""
        return self.served[min(position, len(self.served)) - 1]

    def projector(self, position: int, first: int) -> int:
        """Whose keys and values position `position` reads of a slot that position `first` was the first to read."""
        return self.serving(first if self.kv == "shared" else position)

    def projections(self, depth: int) -> set[tuple[int, int]]:
        """All (specialist, m) whose keys and values of the set z^m are read within `depth` passes."""
        return {(self.projector(k, m + 1), m) for k in range(1, depth + 1) for m in range(k)}

    def unserved(self, depth: int) -> set[int]:
        """Specialists that `depth` positions never come to."""
        return set(range(len(self.allocation))) - {self.serving(k) for k in range(1, depth + 1)}

    def to_json(self) -> str:
        """What config.json holds."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str | Path) -> "DraftConfig":
        """Read what `to_json` wrote; `where` it stood is for the message.

        Raises:
            ValueError: it is not JSON, or a field is missing or unknown; the message names file and field.
        """
        try:
            stored = json.loads(text)
            return cls(**{**stored, "target": TargetSpec(**stored["target"])})
        except (KeyError, TypeError, ValueError) as error:  # JSON's among them
            known = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"{where} is not a draft's config ({error}); its fields are {known}") from error


class Specialists(nn.Module):
    """S decoder layers behind one `fc`. Embedding and head are the target's (`Ends`) and not part of it.

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
        self.fc = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList(Specialist(*sizes) for _ in config.allocation)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("scale", torch.ones(2 * width))  # of what `fc` reads; not learnt
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.fc.bias)

    def forward(self, embedded: Tensor, features: Tensor, depth: int, packing: Packing | None = None) -> list[Tensor]:
        """The unroll, so that a strategy that shards or wraps the draft sees one call a step; see `unroll`."""
        return unroll(self, embedded, features, depth, packing)

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """z of a slot: the token on its right with the feature on its left, (B, T, D) each -> (B, T, D)."""
        joined = torch.cat([embedded.to(features.dtype), features], dim=-1)
        return self.fc(joined * self.scale.to(joined.dtype))

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotary angles of slots at positions (B or 1, T)."""
        return rotation(positions, self.config.target.head_dim, self.config.target.rope_theta)

    def serving(self, position: int) -> Specialist:
        """The layer that serves draft position `position` (from 1)."""
        return self.layers[self.config.serving(position)]

    def normalise(self, embedded: Tensor, features: Tensor) -> None:
        """Let `fc` read both halves with a mean square of 1: (D,) root mean squares of each.

        A few dimensions of a target's features are many times larger than the rest, and would rule its gradient.
        """
        least = 1e-3 * features.median()  # a dimension that is dead in these samples is not blown up
        self.scale.copy_(1 / torch.cat([embedded, features.clamp(min=least)]))

    def start_from(self, other: "Specialists") -> None:
        """Take `fc` and its scale, and for every specialist the layer of `other` that serves its first position.

        The published start of PosS is a single layer, copied into every specialist. A wider MLP starts from a narrower.

        Raises:
            ValueError: the sizes or the targets differ otherwise.
        """
        if difference := self.config.target.difference(other.config.target):
            raise ValueError(f"the draft to start from has another target: {difference}")
        try:
            self.fc.load_state_dict(other.fc.state_dict())
            self.scale.copy_(other.scale)
            for index, layer in enumerate(self.layers):
                first = self.config.served.index(index) + 1  # its first position
                layer.start_from(other.serving(first))
        except RuntimeError as error:
            raise ValueError(f"the draft to start from has other sizes: {error}") from error

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
            state.setdefault("scale", torch.ones(2 * config.target.hidden_size))  # drafts of before there was one
            draft = cls(config, state.get("vocabulary"))
            draft.load_state_dict(state)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {error}") from error
        return draft


def shipped() -> list[str]:
    """Names of the heads that come with the package, e.g. embedded-eagle."""
    return sorted(folder.name for folder in HEADS.iterdir()) if HEADS.is_dir() else []


def locate(source: str | Path) -> Path:
    """The folder of a draft: a local one, a shipped head's, or a hub id's after its download.

    Raises:
        FileNotFoundError: none of them.
    """
    if Path(source).is_dir():
        return Path(source)
    return HEADS / source if source in shipped() else _download(str(source))


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    except (OSError, ValueError) as error:  # what the hub client's many kinds derive from
        raise FileNotFoundError(
            f"draft {name!r} is neither a local folder nor a hub id that can be reached, nor a shipped head: "
            f"{', '.join(shipped()) or 'none'}"
        ) from error
