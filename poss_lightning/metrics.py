"""torchmetrics of acceptance and drift. States are sums and counts, so ranks and batches add up exactly.

pos-acc means the same in three places, which a name must tell apart: *unroll* (teacher-forced), *chain* (greedy chain
drafting) and *tree*. The first is counted by `unrolled`, the others by `rounds`.
"""

import torch
from torch import Tensor
from torchmetrics import Metric

from poss_lightning.machine import SUMS

BINS = 100  # of cosines from -1 to 1


def rounds(accepted: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Reached and passed, (K,) each, of decoding rounds: accepted (R,) drafted tokens a round.

    Position k was reached by the rounds that accepted k-1 or more, and passed by those that accepted k or more.
    """
    positions = torch.arange(1, depth + 1, device=accepted.device)
    return (accepted[:, None] >= positions - 1).sum(0), (accepted[:, None] >= positions).sum(0)


def unrolled(guesses: Tensor, greedy: Tensor, text: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Reached and passed, (K,) each, of the chains that begin at every slot of an unroll.

    A chain that begins at slot t reads pass i at slot t+i-1. It passes position i where the draft's guess is the
    target's, and goes on while the text follows the guess too: past that, the text no longer is what the draft wrote.

    Args:
        guesses: (K, B, T) token ids, pass by pass.
        greedy: (B, T) the target's likeliest token where each slot's guess stands, x_{t+2}.
        text: (B, T) the token of the text there.
        counts: (B, T) passes that count at a slot.
    """
    depth, _, count = guesses.shape
    reached, passed = torch.zeros(2, depth, dtype=torch.long, device=guesses.device)
    alive = counts >= 1  # (B, chains)
    for i in range(min(depth, count)):
        alive = alive[:, : count - i] & (counts[:, i:] > i)
        guess = guesses[i, :, i:]
        hit = alive & (guess == greedy[:, i:])
        reached[i], passed[i] = alive.sum(), hit.sum()
        alive = hit & (guess == text[:, i:])
    return reached, passed


class PositionAcceptance(Metric):
    """Acceptance of every position, given that all before it were accepted: compute() is (K,), nan where unreached."""

    full_state_update = False

    def __init__(self, depth: int, **kwargs):
        super().__init__(**kwargs)
        self.add_state("reached", torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("passed", torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, reached: Tensor, passed: Tensor) -> None:
        """Add counts (K,), from `rounds` or `unrolled`."""
        self.reached += reached
        self.passed += passed

    def compute(self) -> Tensor:
        return self.passed / self.reached


class AcceptanceLength(Metric):
    """τ: mean over rounds of accepted + 1, the bonus token counted (micro)."""

    full_state_update = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_state("tokens", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("rounds", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, accepted: Tensor) -> None:
        """Add rounds: accepted (R,) drafted tokens each."""
        self.tokens += (accepted + 1).sum()
        self.rounds += accepted.numel()

    def compute(self) -> Tensor:
        return self.tokens / self.rounds


class PassMeans(Metric):
    """Mean over slots of something summed pass by pass: compute() is (K,)."""

    full_state_update = False

    def __init__(self, depth: int, **kwargs):
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(depth, dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("slots", torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, sums: Tensor, slots: Tensor) -> None:
        """Add sums (K,) over slots (K,)."""
        self.sums += sums
        self.slots += slots

    def compute(self) -> Tensor:
        return self.sums / self.slots


class FeatureDrift(Metric):
    """How far the draft's features are from the target's at each depth.

    compute() gives mean `cosine`, relative `l2` and `norm_ratio`, (K,) each; and `histogram`, (K, BINS): the slots by
    their cosine, in bins of equal width from -1 to 1.
    """

    full_state_update = False

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
            live = counts > k
            ours, theirs = prediction[live].float(), features[live].float()  # (S, D)
            norm = theirs.norm(dim=-1)
            cosine = torch.cosine_similarity(ours, theirs, dim=-1)  # (S,)
            self.cosine[k] += cosine.sum()
            self.histogram[k] += torch.bincount(((cosine + 1) / 2 * BINS).long().clamp(0, BINS - 1), minlength=BINS)
            self.l2[k] += ((ours - theirs).norm(dim=-1) / norm).sum()
            self.norm_ratio[k] += (ours.norm(dim=-1) / norm).sum()
            self.slots[k] += live.sum()

    def compute(self) -> dict[str, Tensor]:
        means = {name: getattr(self, name) / self.slots for name in ("cosine", "l2", "norm_ratio")}
        return means | {"histogram": self.histogram}
