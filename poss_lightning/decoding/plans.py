"""What a round may propose: the one place that declares and explains these options."""

from dataclasses import dataclass, replace
from typing import Literal

from poss_lightning.draft.config import DraftConfig
from poss_lightning.ranges import Depth, Lookups, Nodes, TreeWidth, refuse_numbers


@dataclass(frozen=True)
class TreePlan:
    """The tree that a round drafts and verifies, and the looked-up tokens that join it.

    Args:
        depth: draft positions K; the sum of the draft's allocation by default, and 0 to draft nothing.
        nodes: drafted nodes to verify, root included.
        tree_width: children tried per node; 1 drafts chains.
        lookup: at most this many tokens that followed the same words earlier in the text join each tree.
        tree: "auto" sizes trees, within these numbers, for the most tokens per second here; "fixed" follows them.

    Raises:
        ValueError: a value outside its range, or too few nodes for one path.
    """

    depth: Depth | None = None
    nodes: Nodes = 60
    tree_width: TreeWidth = 10
    lookup: Lookups = 0
    tree: Literal["auto", "fixed"] = "auto"

    def __post_init__(self):
        refuse_numbers(TreePlan, vars(self))
        if self.tree not in ("auto", "fixed"):
            raise ValueError(f"tree is {self.tree!r}; it must be auto or fixed")
        if self.depth is not None and self.nodes <= self.depth:
            raise ValueError(
                f"nodes is {self.nodes}, which cannot hold a path of depth {self.depth} and its root: give at least "
                f"{self.depth + 1}"
            )

    @property
    def reach(self) -> int:
        """The most tokens that a round accepts."""
        return max(self.depth or 0, self.lookup)

    @property
    def candidates(self) -> int:
        """Nodes that are scored for such a tree, root included."""
        depth, width = self.depth or 0, self.tree_width
        return 1 + (width + width**2 * (depth - 1) if depth else 0)

    def for_draft(self, config: DraftConfig) -> "TreePlan":
        """Return the plan with the draft's own depth where none is given, and no more nodes than are scored.

        ValueError if the draft cannot draft so deep, or there are too few nodes.
        """
        depth = sum(config.allocation) if self.depth is None else self.depth
        config.check_depth(depth)
        plan = replace(self, depth=depth)
        return replace(plan, nodes=min(plan.nodes, plan.candidates))
