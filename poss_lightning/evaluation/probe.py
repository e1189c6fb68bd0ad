"""Real decodes during validation: what the draft is worth, not what its loss says."""

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_warn

from poss_lightning.decoding.engine import Speculative
from poss_lightning.evaluation.suites import OWN, read_suites
from poss_lightning.metrics import AcceptanceLength, PositionAcceptance, rounds
from poss_lightning.target.model import Target
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.strategies import whole


class Probe(lightning.Callback):
    """Decodes a few prompts greedily after every validation and logs τ and the tree's pos-acc.

    Args:
        target: "embedded", a local folder or a hub id; the name under which the store was made by default.
        suites: files of prompts, or names of the project's own; the first turn of each is decoded. By default twelve
            that are in no suite, so that a draft chosen here is not chosen on what it is measured on.
        prompts: how many of them, taken evenly.
        new_tokens: decoded of each.
        nodes: of a tree, root included.
        top_k: children tried a node.
    """

    def __init__(
        self,
        target: str | None = None,
        suites: list[str] | None = None,
        prompts: int = 6,
        new_tokens: int = 48,
        nodes: int = 60,
        top_k: int = 10,
    ):
        if prompts < 1:
            raise ValueError(f"prompts is {prompts}; it must be at least 1")
        questions = read_suites([str(OWN / "probe")] if suites is None else suites)
        self.questions = questions[:: max(1, len(questions) // prompts)][:prompts]
        self.name, self.new_tokens, self.nodes, self.top_k = target, new_tokens, nodes, top_k

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
        engine = Speculative(self.target, whole(pl_module.draft), depth, max(self.nodes, depth + 1), self.top_k)
        decoded = [engine.decode([prompt], self.new_tokens)[0] for prompt in self._prompts()]
        accepted = torch.tensor([count for answer in decoded for count in answer.accepted], dtype=torch.long)
        if not len(accepted):
            return rank_zero_warn("the probe's answers are too short for one round: give it more prompts or new_tokens")
        length, positions = AcceptanceLength(sync_on_compute=False), PositionAcceptance(depth, sync_on_compute=False)
        length.update(accepted)
        positions.update(*rounds(accepted, depth))
        # Every process decodes the same prompts with the same draft, so there is nothing to reduce.
        pl_module.log("probe/tau", length.compute().to(pl_module.device), prog_bar=True)
        for k, value in enumerate(torch.atleast_1d(positions.compute()), 1):
            if not value.isnan():
                pl_module.log(f"probe_pos_acc_tree/depth_{k}", value.to(pl_module.device))

    def _prompts(self) -> list[list[int]]:
        chat = self.target.chat
        return [chat.prompt([{"role": "user", "content": question.turns[0]}]) for question in self.questions]
