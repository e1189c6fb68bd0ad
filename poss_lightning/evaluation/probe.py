"""The callback that measures a draft during validation by the tokens that its target accepts, not by its loss."""

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_warn

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Batch
from poss_lightning.metrics import PositionAcceptance
from poss_lightning.ranges import Count, Nodes, TreeWidth, check_numbers
from poss_lightning.training.module import DraftModule
from poss_lightning.training.strategies import gather_draft


class Replay(lightning.Callback):
    """Replays held-out answers greedily after every validation, and those of a test, without the target.

    It logs `val/tau_tree`, `val/tau_chain`, `val_pos_acc_tree/depth_k` and `val_pos_acc_chain/depth_k`, which are lower
    on answers that are not the target's own greedy ones; see `replay_rounds`.

    Args:
        answers: how many at least, over all processes; the first validation batches are taken whole.
        nodes: nodes of a tree, root included.
        tree_width: children tried per node.
    """

    @check_numbers
    def __init__(self, answers: Count = 16, nodes: Nodes = 60, tree_width: TreeWidth = 10):
        self.answers, self.nodes, self.tree_width = answers, nodes, tree_width
        self.samples: list[Sample] = []

    def on_validation_batch_end(
        self, trainer, pl_module: DraftModule, outputs, batch: Batch, batch_idx: int, dataloader_idx=0
    ) -> None:
        if sum(len(sample.spans) for sample in self.samples) * trainer.world_size < self.answers:
            self.samples += answered_samples(batch)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: DraftModule) -> None:
        samples, self.samples = self.samples, []
        if trainer.sanity_checking:
            return
        dtype = pl_module.embed_head.embedding.dtype
        draft = gather_draft(pl_module.draft, device=pl_module.device, dtype=dtype).eval()
        depth = pl_module.eval_depth
        for kind, nodes, width in (("chain", depth + 1, 1), ("tree", max(self.nodes, depth + 1), self.tree_width)):
            replayed = replay_rounds(draft, pl_module.embed_head, samples, TreePlan(depth, nodes, width))
            accepted = [count for sample in replayed for answer in sample for count in answer]
            stage = pl_module.stage
            _log(pl_module, accepted, depth, f"{stage}/tau_{kind}", f"{stage}_pos_acc_{kind}")

    on_test_batch_end = on_validation_batch_end  # pyright: ignore[reportAssignmentType] of a DraftModule
    on_test_epoch_end = on_validation_epoch_end  # pyright: ignore[reportAssignmentType]


def answered_samples(batch: Batch) -> list[Sample]:
    """Return the conversations of a batch that have answers of two or more tokens, with the spans of those answers."""
    samples = []
    for name, edges, part in zip(batch.ids, batch.spans, batch.parts(), strict=True):
        starts = [(max(start, 1), stop) for start, stop in edges]  # the first token of a text is never predicted
        if spans := [(start, stop) for start, stop in starts if stop - start >= 2]:
            features = batch.features[part]
            layers = batch.draft_input[part].unflatten(-1, (-1, features.shape[-1]))  # (T, R/D, D), without noise here
            samples.append(Sample(name, batch.tokens[part], batch.target_argmax[part], spans, features, layers))
    return samples


def _log(module: DraftModule, accepted: list[int], depth: int, tau: str, by_depth: str) -> None:
    """Log τ and pos-acc of rounds that accepted this many tokens under these names; every process must call it."""
    positions = PositionAcceptance(depth).to(module.device)
    positions.update(torch.tensor(accepted, dtype=torch.long, device=module.device))
    shares = torch.atleast_1d(positions.compute())  # (K,), which torchmetrics would squeeze
    if shares[0].isnan():
        rank_zero_warn(f"there is no {tau}, as no answer is long enough for a round: give more or longer ones")
        return module.log_shared(tau, shares[0], logger=False)  # for a ModelCheckpoint
    module.log_shared(tau, 1 + shares.cumprod(0).sum(), prog_bar=True)
    module.log_by_depth(by_depth, shares)
