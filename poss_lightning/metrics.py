"""torchmetrics of acceptance and drift. States are sums and counts, so processes and batches add up exactly.

`PositionAcceptance` counts pos-acc of decoding rounds, of chains and of trees; `UnrollAcceptance` that of an unroll,
which is teacher-forced.
"""

import torch
from torch import Tensor
from torchmetrics import Metric

from poss_lightning.machine import SUMS

BINS = 100  # of cosines from -1 to 1


class PositionAcceptance(Metric):
    """pos-acc: the acceptance rate of every position, given that all before it were accepted.

    Examples:
        >>> acceptance = PositionAcceptance(depth=3)
        >>> acceptance.update(torch.tensor([0, 1, 3, 3]))  # drafted tokens accepted in each round
        >>> acceptance.compute()  # of 4 rounds 3 accepted position 1, of these 2 position 2, ...
        tensor([0.7500, 0.6667, 1.0000])

    compute() is (K,): 0 where no round reached a position, so that a mean over positions has all K; nan of no round.

    Args:
        depth: K.
    """

    full_state_update = False
    reached: Tensor  # (K,)
    passed: Tensor  # (K,)

    def __init__(self, depth: int, **kwargs):
        super().__init__(**kwargs)
        self.add_state("reached", torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("passed", torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, accepted: Tensor) -> None:
        """Add rounds by the number of drafted tokens that each accepted, (R,).

        A round that accepted k - 1 tokens or more reached position k; one that accepted k or more passed it.
        """
        positions = torch.arange(1, len(self.reached) + 1, device=accepted.device)
        self.reached += (accepted[:, None] >= positions - 1).sum(0)
        self.passed += (accepted[:, None] >= positions).sum(0)

    def compute(self) -> Tensor:
        return self.passed / self.reached.clamp(min=1) / (self.reached[0] > 0)


class UnrollAcceptance(PositionAcceptance):
    """pos-acc of the chains that begin at every slot of an unroll, teacher-forced."""

    def update(
        self, proposals: Tensor, greedy: Tensor, text: Tensor, counts: Tensor, begins: Tensor | None = None
    ) -> None:
        """Add an unroll.

        A chain that begins at slot t reads pass i at slot t + i - 1. It passes position i where the draft's proposal is
        the target's choice, and continues only if the text has that token, too.

        Args:
            proposals: (K, B, T) token ids, by pass.
            greedy: (B, T) the target's most likely token at the place of each slot's proposal, x_{t+2}.
            text: (B, T) the text's token there.
            counts: (B, T) passes that count at a slot.
            begins: (B, T) where chains were drafted; None for all slots.
        """
        depth, _, count = proposals.shape
        alive = counts >= 1 if begins is None else (counts >= 1) & begins  # (B, chains)
        for i in range(min(depth, count)):
            alive = alive[:, : count - i] & (counts[:, i:] > i)
            proposal = proposals[i, :, i:]
            hit = alive & (proposal == greedy[:, i:])
            self.reached[i] += alive.sum()
            self.passed[i] += hit.sum()
            alive = hit & (proposal == text[:, i:])


class PassSums(Metric):
    """Sums over slots of several values by pass: compute() is the sums (values, K) and the slots (K,)."""

    full_state_update = False
    sums: Tensor  # (values, K)
    slots: Tensor  # (K,)

    def __init__(self, values: int, depth: int, **kwargs):
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(values, depth, dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("slots", torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, sums: Tensor, slots: Tensor) -> None:
        """Add sums (values, K) over slots (K,)."""
        self.sums += sums
        self.slots += slots

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.sums, self.slots


class FeatureDrift(Metric):
    """How far the draft's features are from the target's at each depth.

    compute() gives the means `cosine`, relative `l2` and `norm_ratio`, (K,) each, and `histogram`, (K, BINS): numbers
    of slots by their cosine, in bins of equal width from -1 to 1.
    """

    full_state_update = False
    cosine: Tensor  # (K,) sums, like the next two
    l2: Tensor
    norm_ratio: Tensor
    slots: Tensor  # (K,)
    histogram: Tensor  # (K, BINS)

    def __init__(self, depth: int, **kwargs):
        super().__init__(**kwargs)
        for name in ("cosine", "l2", "norm_ratio", "slots"):
            self.add_state(name, torch.zeros(depth, dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("histogram", torch.zeros(depth, BINS, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predictions: list[Tensor], features: Tensor, counts: Tensor) -> None:
        """Add the slots that count.

        Args:
            predictions: K tensors (B, T, D), F̂ of f_{t+1} at slot t.
            features: (B, T, D), f_{t+1} at slot t.
            counts: (B, T), pass k counts where k <= counts.
        """
        for k, prediction in enumerate(predictions):
            counted = counts > k
            ours, theirs = prediction[counted].float(), features[counted].float()  # (S, D)
            norm = theirs.norm(dim=-1)
            cosine = torch.cosine_similarity(ours, theirs, dim=-1)  # (S,)
            self.cosine[k] += cosine.sum()
            self.histogram[k] += torch.bincount(((cosine + 1) / 2 * BINS).long().clamp(0, BINS - 1), minlength=BINS)
            self.l2[k] += ((ours - theirs).norm(dim=-1) / norm).sum()
            self.norm_ratio[k] += (ours.norm(dim=-1) / norm).sum()
            self.slots[k] += counted.sum()

    def compute(self) -> dict[str, Tensor]:
        means = {name: getattr(self, name) / self.slots for name in ("cosine", "l2", "norm_ratio")}
        return means | {"histogram": self.histogram}
