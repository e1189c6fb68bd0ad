"""What the engine asks of whatever proposes tokens. A new strategy is one class with these names."""

from typing import Protocol

from torch import Tensor

from poss_lightning.decoding.blocks import BlockDrafter
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree
from poss_lightning.draft.block import Block
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.sampling import Noise
from poss_lightning.target_model.cache import Slots
from poss_lightning.target_model.spec import EmbedHead


class Drafter(Protocol):
    """Proposes a tree for each of B texts in each round. It changes how fast tokens come, never which.

    The engine calls `start`, then `append_context` with the prompts, then in every round `draft` and `append_context`.
    On CUDA a round is captured: its tensors keep their shapes and addresses, and nothing waits for the device.

    Attributes:
        depth: the longest path that it can propose.
        layers: inner layers of the target that it reads; () for the features.
        room: slots after the longest text that its cache writes in a round; 0 without a cache.
    """

    depth: int
    layers: tuple[int, ...]
    room: int

    def start(self, slots: Slots) -> None:
        """Begin other texts. `slots` are the target's: how long the texts are, and which slots come next."""

    def append_context(self, tokens: Tensor, draft_input: Tensor, counts: Tensor) -> None:
        """Take in newly verified slots, which `slots` counts already.

        Args:
            tokens: (B, n) the tokens on the right of the slots; the last real one is the next root.
            draft_input: (B, n, R) what the target computed on their left.
            counts: (B,) how many of the n are real.
        """

    def draft(self, root: Tensor, plan: TreePlan, noise: Noise | None = None) -> Tree:
        """Draft a tree under `root` (B, 1), the newest token of each text, of at most the plan's depth.

        The engine verifies its best nodes, as many as planned. `noise` is T g at the places below the root.
        """
        ...

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch; `slots` has them already."""

    def state(self) -> list[Tensor]:
        """Return the tensors that a round changes, and reads before it writes them, beside those of `slots`."""
        ...


def make_drafter(draft: DraftModel, embed_head: EmbedHead, plan: TreePlan) -> TreeDrafter:
    """Make the drafter for a draft of this kind; arguments and errors are those of `TreeDrafter`."""
    kind: type[TreeDrafter] = BlockDrafter if isinstance(draft, Block) else TreeDrafter
    return kind(draft, embed_head, plan)  # pyright: ignore[reportArgumentType]
