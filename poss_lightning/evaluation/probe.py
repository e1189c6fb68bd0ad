"""What a draft is worth, seen during validation: not by its loss, but by the tokens a target takes from it."""

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from poss_lightning.decoding.engine import Speculative
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.evaluation.suites import OWN, read_suites
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Batch
from poss_lightning.metrics import AcceptanceLength, PositionAcceptance, rounds
from poss_lightning.target.model import Target
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.strategies import gather_draft


class Replay(lightning.Callback):
    """Replays held-out answers greedily after every validation, without the target, and logs τ and pos-acc.

    `val/tau_tree`, `val/tau_chain`, `val_pos_acc_tree/depth_k` and `val_pos_acc_chain/depth_k`. Answers that the target
    did not write itself, greedily, are harder to meet than its own; see `replay_rounds`.

    Args:
        answers: how many, of all processes together: the first whole batches of validation that hold as many.
        nodes: of a tree, root included.
        tree_width: children tried a node.
    """

    def __init__(self, answers: int = 16, nodes: int = 60, tree_width: int = 10):
        if answers < 1:
            raise ValueError(f"answers is {answers}; it must be at least 1")
        self.answers, self.nodes, self.tree_width = answers, nodes, tree_width
        self.samples: list[Sample] = []

    def on_validation_batch_end(
        self, trainer, pl_module: SpecialistTraining, outputs, batch: Batch, batch_idx: int, dataloader_idx=0
    ) -> None:
        if sum(len(sample.spans) for sample in self.samples) * trainer.world_size < self.answers:
            self.samples += samples(batch)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        shown, self.samples = self.samples, []
        if trainer.sanity_checking:
            return
        draft = gather_draft(pl_module.draft).to(pl_module.device, pl_module.embed_head.embedding.dtype).eval()
        draft.vocabulary = None  # the module's ends are cut to it already
        depth = pl_module.eval_depth
        for kind, nodes, tree_width in (("chain", depth + 1, 1), ("tree", max(self.nodes, depth + 1), self.tree_width)):
            replayed = replay_rounds(draft, pl_module.embed_head, shown, depth, nodes, tree_width)
            accepted = [count for sample in replayed for answer in sample for count in answer]
            length, positions = AcceptanceLength(), PositionAcceptance(depth)  # of all processes
            _log(pl_module, accepted, length, positions, f"val/tau_{kind}", f"val_pos_acc_{kind}")


class Probe(lightning.Callback):
    """Decodes a few prompts greedily after every validation, with the target, and logs `probe/tau` and pos-acc.

    Slower than `Replay`, but the decoding itself: of any prompts, with everything that a kernel or a dtype does to it.

    Args:
        target: "embedded", a local folder or a hub id; the name under which the store was made by default.
        suites: files of prompts, or names of the project's own; the first turn of each is decoded. By default twelve
            that are in no suite, so that a draft chosen here is not chosen on what it is measured on.
        prompts: how many of them, taken evenly.
        max_new_tokens: decoded of each.
        nodes: of a tree, root included.
        tree_width: children tried a node.
    """

    def __init__(
        self,
        target: str | None = None,
        suites: list[str] | None = None,
        prompts: int = 6,
        max_new_tokens: int = 48,
        nodes: int = 60,
        tree_width: int = 10,
    ):
        if prompts < 1:
            raise ValueError(f"prompts is {prompts}; it must be at least 1")
        questions = read_suites([str(OWN / "probe")] if suites is None else suites)
        self.questions = questions[:: max(1, len(questions) // prompts)][:prompts]
        self.name, self.new_tokens, self.nodes, self.tree_width = target, max_new_tokens, nodes, tree_width

    def setup(self, trainer: lightning.Trainer, pl_module: SpecialistTraining, stage: str) -> None:
        """Load the target before the first step.

        Raises:
            ValueError: it is not the one that the store was made with.
        """
        if stage == "fit":
            spec = pl_module.draft.config.target
            self.target = Target.load(self.name or spec.name, device=str(trainer.strategy.root_device))
            if difference := self.target.spec.difference(spec):
                raise ValueError(f"the probe's target is not the store's: {difference}")

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: SpecialistTraining) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        depth = sum(pl_module.draft.config.allocation)
        engine = Speculative(self.target, gather_draft(pl_module.draft), depth, max(self.nodes, depth + 1), self.tree_width)
        decoded = [engine.decode([prompt], self.new_tokens)[0] for prompt in self._prompts()]
        accepted = [count for answer in decoded for count in answer.accepted]
        # Every process decodes the same prompts with the same draft, so there is nothing to reduce.
        length, positions = AcceptanceLength(sync_on_compute=False), PositionAcceptance(depth, sync_on_compute=False)
        _log(pl_module, accepted, length, positions, "probe/tau", "probe_pos_acc_tree")

    def _prompts(self) -> list[list[int]]:
        chat = self.target.chat
        return [chat.prompt([{"role": "user", "content": question.turns[0]}]) for question in self.questions]


def samples(batch: Batch) -> list[Sample]:
    """The conversations of a batch in which anything counts."""
    found = []
    for name, part in zip(batch.ids, batch.parts(), strict=True):
        if spans := answered(batch.counts[part]):
            features = batch.features[part]
            read = batch.inputs[part].unflatten(-1, (-1, features.shape[-1]))  # (T, R/D, D), without noise here
            found.append(Sample(name, batch.tokens[part], batch.greedy[part], spans, features, read))
    return found


def answered(counts: Tensor) -> list[tuple[int, int]]:
    """The assistant spans of a conversation that has these counts (T,); what `counted_passes` was given."""
    first = (counts == 1).nonzero()[:, 0]
    last = ((counts > 0) & (counts.roll(-1) <= 1)).nonzero()[:, 0]
    return [(start + 1, stop + 3) for start, stop in zip(first.tolist(), last.tolist(), strict=True)]


def _log(
    module: SpecialistTraining,
    accepted: list[int],
    length: AcceptanceLength,
    positions: PositionAcceptance,
    tau: str,
    by_depth: str,
) -> None:
    """τ as `tau` and pos-acc as `by_depth` of rounds that accepted so many; all processes come here."""
    counts = torch.tensor(accepted, dtype=torch.long, device=module.device)
    length, positions = length.to(module.device), positions.to(module.device)
    length.update(counts)
    positions.update(*rounds(counts, len(positions.reached)))
    mean = length.compute()
    if mean.isnan():
        return rank_zero_warn(f"there is no {tau}, as no answer is long enough for one round: give more or longer ones")
    module.log(tau, mean, prog_bar=True)
    module.log_by_depth(by_depth, positions.compute())
