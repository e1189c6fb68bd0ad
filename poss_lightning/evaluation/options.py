"""What `poss generate` and `poss benchmark` decode with: a target, trees, and how tokens are chosen."""

from dataclasses import dataclass

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.ranges import Seed, Temperature, TopK, TopP, refuse_numbers
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.options import TargetOptions


@dataclass(frozen=True)
class DecodingOptions(TargetOptions, TreePlan):
    """Options of a target and of a plan, and of sampling.

    Args:
        temperature: sampling temperature; 0 is greedy. Drafts and our own loop draw alike.
        top_k: sample among the k most likely tokens; 0 for all.
        top_p: sample among the most likely tokens that hold this probability.
        seed: seed of sampling.
        exact: draft the tokens of plain decoding, bit for bit, in any dtype; by default on a CPU where a trial agrees.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Seed = 0
    exact: bool | None = None

    def __post_init__(self):
        refuse_numbers(DecodingOptions, vars(self))
        super().__post_init__()

    @property
    def plan(self) -> TreePlan:
        """The tree of a round."""
        return TreePlan(self.depth, self.nodes, self.tree_width, self.lookup, self.tree)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p)
