"""What defines a draft: its target, its kind, which specialist serves which position, and whose keys it reads."""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from torch import Tensor

from poss_lightning.ranges import MAX_POSITIONS, Position, Size, Tokens, refuse_types
from poss_lightning.target_model.spec import TargetSpec

Kind = Literal["eagle2", "eagle3", "block"]
MIN_LAYERS = 4  # of a target whose inner layers are read
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")  # of EAGLE-3
# fields, by the kinds that have them
ONLY = {"eagle3": SWITCHES, "block": ("block_layers", "mask_token"), "eagle3 or block": ("inner_layers",)}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's rotary angles (`rope_type: llama3`), under its names: slow waves rotate `factor` times more slowly.

    Waves that rotate `high_freq_factor` times or more in the original context stay as they are, those that rotate
    `low_freq_factor` times or less are slowed, and the two are mixed for those between.

    Raises:
        ValueError: a number that cannot be; the message names it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        refuse_types(self, "rope_scaling's ")
        ascending = 0 < self.low_freq_factor < self.high_freq_factor < math.inf
        if not (ascending and 1 <= self.factor < math.inf and self.original_max_position_embeddings >= 1):
            raise ValueError(
                f"rope_scaling is {self}; it must have a factor and an original length of at least 1, and "
                "0 < low_freq_factor < high_freq_factor"
            )

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (fast + (1 - fast) / self.factor)


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The options of a draft for any target: each is one of `poss fit`, and a field of its config.

    Args:
        allocation: positions served by each specialist, e.g. [2, 2, 2]; the last also serves all that follow.
        depth: passes of the unroll in training; None for the sum of the allocation.
        detach: detach features between passes.
        intermediate_size: width of a specialist's MLP; None for the target's.
        kv: "separate", each specialist reads keys and values that it made itself; or "shared", all read those of the
            specialist that served a slot first (SPEED): one cache for all.
        kind: "eagle2"; for a store with inner layers "eagle3" (predicts no feature, and has its own head, which learns
            where the vocabulary holds the target's most likely token) or "block" (all positions in one pass).
        block_layers: decoder layers of a draft of kind block, stacked.
        window: sliding window, the number of slots that a query sees, with its own; None for all on its left.
        fc_norm: norm each inner layer before they are fused; only for kind eagle3, like norm_output (both: EAGLE-3.1).
        norm_output: let the next position read the normed output, as the head does.
        vocabulary_size: propose only that many tokens, the most common in the store's answers; None for all. A draft of
            kind eagle3 keeps the vocabulary of the draft it starts from, if that has the same size or this is None.

    Raises:
        ValueError: a field that cannot be; the message names it.
    """

    allocation: tuple[Position, ...] = (2, 2, 2)
    depth: Position | None = None
    detach: bool = True
    intermediate_size: Size | None = None
    kv: Literal["separate", "shared"] = "separate"
    kind: Kind = "eagle2"
    block_layers: Size = 1
    window: Tokens | None = None
    fc_norm: bool = False
    norm_output: bool = False
    vocabulary_size: Size | None = None

    def __post_init__(self):
        runs: Any = self.allocation
        is_list = isinstance(runs, list | tuple) and len(runs) and all(type(run) is int and run > 0 for run in runs)
        if not is_list or sum(runs) > MAX_POSITIONS:
            shown = [*runs] if isinstance(runs, tuple) else runs
            raise ValueError(
                f"allocation is {shown!r}; it must be a list of positive integers, e.g. [2, 2, 2], of {MAX_POSITIONS} "
                "positions at most"
            )
        object.__setattr__(self, "allocation", tuple(runs))
        refuse_types(self)

    def config_for(self, target: TargetSpec, **fields: Any) -> "DraftConfig":
        """Make the config of a draft for a target, with other fields of it. Raises ValueError, as that does."""
        return DraftConfig(**vars(self) | fields, target=target)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(DraftOptions):
    """What defines a draft; stored with it, and read by training and decoding alike.

    Args:
        target: the target it drafts for.
        norm_before_residual: continue the residual from the normed h, as vLLM's speculators trains it.
        norm_before_fc: norm all inner layers together before they are fused; never with `fc_norm`.
        rope_theta: base of the rotary angles; None for the target's. Many published EAGLE-3 drafts have their own.
        rope_scaling: Llama 3.1's scaling of the rotary angles, or a mapping of its fields; None for none.
        norm_eps: added to the mean square in norms; None for the target's.
        inner_layers: the target's layers that an EAGLE-3 or block draft reads; None for those of EAGLE-3's code.
        mask_token: the token whose embedding is the mask of a block draft; None for the last of the vocabulary.
        others: those of `DraftOptions`.

    Raises:
        ValueError: a field that cannot be; the message names it.
    """

    target: TargetSpec
    depth: Position = None  # pyright: ignore[reportAssignmentType] then the sum of the allocation
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    rope_theta: Annotated[float, Ge(1), Le(1e18)] | None = None
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, Ge(0), Le(1)] | None = None
    inner_layers: tuple[int, ...] | None = None
    mask_token: int | None = None

    def __post_init__(self):
        if self.depth is None:
            object.__setattr__(self, "depth", sum(self.allocation))
        if isinstance(self.rope_scaling, dict):  # of a file
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if self.inner_layers is not None:
            object.__setattr__(self, "inner_layers", tuple(self.inner_layers))
        super().__post_init__()
        for kinds, names in ONLY.items():
            for name in names if self.kind not in kinds else ():
                if (value := getattr(self, name)) != getattr(type(self), name):
                    raise ValueError(f"{name} is {value}, which only kind {kinds} has; this draft is {self.kind}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are both true; one of them must be false")
        if self.one_pass:
            self._check_block()
        self.check_depth(self.depth)
        if self.aux_layers and self.target.layers < MIN_LAYERS:
            raise ValueError(
                f"kind is {self.kind}, which reads inner layers of a target with {MIN_LAYERS} or more; "
                f"{self.target.name} has {self.target.layers}"
            )
        inside = range(1, self.target.layers)
        if self.inner_layers is not None and (not self.inner_layers or {*self.inner_layers} - {*inside}):
            raise ValueError(f"inner_layers is {list(self.inner_layers)}; {self.target.name} has 1 to {inside[-1]}")

    def _check_block(self) -> None:
        if len(self.allocation) > 1 or self.kv == "shared":
            raise ValueError(
                f"allocation is {list(self.allocation)} and kv {self.kv}; a draft of kind block has the same layers "
                "for all positions: give one number, and kv separate"
            )
        if not 0 <= self.mask_row < self.target.vocab_size:
            raise ValueError(f"mask_token is {self.mask_token}; {self.target.name} has {self.target.vocab_size} tokens")

    def check_depth(self, depth: int) -> None:
        """Raise ValueError where a depth exceeds the window, or the positions of a block.

        Each position must see all that led to it, and a block has no more places than it was trained with.
        """
        if self.one_pass and depth > self.depth:
            raise ValueError(f"depth is {depth}, and the block has {self.depth} positions; it must not be deeper")
        if self.window is not None and depth > self.window:
            raise ValueError(f"depth is {depth}, and the draft's window {self.window}; it must not be deeper")

    # --- traits of its kind ---

    @property
    def one_pass(self) -> bool:
        """Whether it drafts all positions at once, from masks, so that none reads a predicted feature."""
        return self.kind == "block"

    @property
    def mask_row(self) -> int:
        """The token whose embedding is a mask."""
        return self.target.vocab_size - 1 if self.mask_token is None else self.mask_token

    @property
    def own_head(self) -> bool:
        """Whether it learns an LM head of its own; else it takes the target's."""
        return self.kind == "eagle3"

    @property
    def predicts_feature(self) -> bool:
        """Whether it predicts the target's feature, which a loss can compare; else it norms what its head reads."""
        return self.kind == "eagle2"

    @property
    def eps(self) -> float:
        """What its norms add to the mean square."""
        return self.target.norm_eps if self.norm_eps is None else self.norm_eps

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs, auxiliary hidden states, it reads, as `Target.text_layers` counts them.

        () for none: then it reads the target's feature itself.

        By default those of EAGLE-3's published code: low, middle and high. Of a target with fewer than seven layers
        they are not in order, or not three.
        """
        if self.inner_layers is not None:
            return self.inner_layers
        count = self.target.layers
        return () if self.kind == "eagle2" else (2, count // 2, count - 3)

    @property
    def input_norms(self) -> int:
        """The number of norms of the draft's input, each over its part."""
        return len(self.aux_layers) if self.fc_norm else int(self.norm_before_fc)

    @property
    def layer_count(self) -> int:
        """The number of decoder layers: one per specialist, or those of a block draft."""
        return self.block_layers if self.one_pass else len(self.allocation)

    # --- who serves what ---

    @property
    def specialists(self) -> tuple[int, ...]:
        """The specialist, from 0, of each position that the allocation names."""
        return tuple(index for index, run in enumerate(self.allocation) for _ in range(run))

    def specialist_at(self, position: int) -> int:
        """Return the specialist (from 0) of a draft position (from 1); past the end it is the last one."""
        return self.specialists[min(position, len(self.specialists)) - 1]

    def kv_specialist(self, position: int, first: int) -> int:
        """Return whose keys and values `position` reads of a slot that position `first` was first to read.

        Examples:
            >>> for kv in ("separate", "shared"):
            ...     config = DraftConfig(target=target, allocation=(2, 2), kv=kv)
            ...     [config.kv_specialist(position, first=2) for position in (2, 3, 4)]
            [0, 1, 1]
            [0, 0, 0]
        """
        return self.specialist_at(first if self.kv == "shared" else position)

    # --- its file ---

    def to_json(self) -> str:
        """Return the content of config.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str | Path) -> "DraftConfig":
        """Parse what `to_json` wrote.

        Raises:
            ValueError: it is not JSON, or a field is missing, unknown or wrong; the message names file and field.
        """
        try:
            stored = json.loads(text)
            return cls(**stored | {"target": TargetSpec(**stored["target"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # JSON's among them
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{where} is not a draft's config ({error}); its fields are {names}") from error
