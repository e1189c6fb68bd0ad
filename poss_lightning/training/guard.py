"""When a loss or a gradient is not finite: say where it came from, and leave behind what reproduces it."""

import json
from pathlib import Path

import torch
from lightning import Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor

from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.schedule import Step
from poss_lightning.features.stream import Batch
from poss_lightning.files import atomic
from poss_lightning.training.strategies import gather_draft

BATCH, NOTE = "batch.safetensors", "note.json"
TENSORS = ("tokens", "features", "inputs", "greedy", "counts", "positions")
SHOWN = 8  # names of conversations in a message


class NotFinite(ValueError):
    """A loss or a gradient that is infinite or not a number; the message says whose, and where the reproducer is."""


def finite(losses: list[Tensor], draft: Specialists) -> bool:
    """Whether a step's losses (K,) each, and this process's part of the gradients, are; waits for the device.

    DeepSpeed keeps its gradients to itself and skips a step when they are not; here its losses are looked at.
    """
    gradients = [parameter.grad for parameter in draft.parameters() if parameter.grad is not None]
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    return bool(torch.stack([part.isfinite().all() for part in losses + local]).all())


def report_nonfinite(trainer: Trainer, draft: Specialists, batches: list[Batch], losses: list[Tensor]) -> str:
    """Say whose fault it was, and leave behind what reproduces it. All processes come here.

    Args:
        draft: as the trainer's strategy has it, in parts perhaps.
        batches: of this process in this optimizer step.
        losses: their weighted losses, (K,) each.
    """
    blamed = locate_losses(draft, batches, losses)
    everyone = [blamed] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(everyone, blamed)
    said = list(filter(None, everyone)) or [locate_gradients(draft, batches)]
    folder = Path(trainer.log_dir or trainer.default_root_dir) / f"not-finite-{trainer.global_step}"
    together = gather_draft(draft)  # asks all processes
    if trainer.is_global_zero:
        together.save_pretrained(folder)
    if blamed or not any(everyone):
        save(folder / f"rank-{trainer.global_rank}", batches, "; ".join(said))
    return f"step {trainer.global_step}: {'; '.join(said)}; {folder} reproduces it"


def locate_losses(draft: Specialists, batches: list[Batch], losses: list[Tensor]) -> str | None:
    """Pass, specialist and conversations of losses that are not finite; None where all are.

    Args:
        batches: of this process in this optimizer step.
        losses: their weighted losses, (K,) each.
    """
    said = []
    for batch, sums in zip(batches, losses, strict=True):
        if wrong := ((~sums.isfinite()).nonzero()[:, 0] + 1).tolist():
            specialists = sorted({draft.config.specialist_at(k) + 1 for k in wrong})
            bad_ids = [
                name for name, part in zip(batch.ids, batch.parts(), strict=True) if not _is_finite(batch.inputs[part])
            ]
            where = f"the features of {_names(bad_ids)} are not either" if bad_ids else f"in {_names(batch.ids)}"
            said.append(f"the loss of pass {_names(wrong)} (specialist {_names(specialists)}) is not finite: {where}")
    return "; ".join(said) or None


def locate_gradients(draft: Specialists, batches: list[Batch]) -> str:
    """Parameters whose gradients are not finite, though the losses are."""
    wrong = [name for name, value in draft.named_parameters() if value.grad is not None and not _is_finite(value.grad)]
    passes = range(1, draft.config.depth + 1)
    specialist_of = {
        f"layers.{i}.": [k for k in passes if draft.config.specialist_at(k) == i] for i in range(len(draft.layers))
    }
    whose = [
        f"specialist {i + 1} (pass {_names(specialist_of[layer])})"
        for i, layer in enumerate(specialist_of)
        if any(name.startswith(layer) for name in wrong)
    ]
    ids = [name for batch in batches for name in batch.ids]
    of = _names(whose or wrong or ["some specialist"])
    return f"the gradient of {of} is not finite, though the losses are: in {_names(ids)}"


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _names(things: list) -> str:
    more = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(map(str, things[:SHOWN])) + more


def save(folder: Path, batches: list[Batch], said: str) -> None:
    """Write every batch of this process in the step, and what was said of them."""
    for number, batch in enumerate(batches):
        state = {name: getattr(batch, name).detach().cpu().contiguous() for name in TENSORS}
        state |= {"answers": batch.step.answers.cpu(), "step_tokens": batch.step.tokens.cpu()}
        with atomic(folder / f"{number}-{BATCH}") as path:
            save_file(state, path)
        note = {"said": said, "ids": batch.ids, "lengths": batch.lengths, "batches": batch.step.batches}
        with atomic(folder / f"{number}-{NOTE}") as path:
            path.write_text(json.dumps(note, indent=1) + "\n")


def load_batch(folder: Path, number: int = 0) -> Batch:
    """A batch that `save` left; the draft beside it is read by `Specialists.from_pretrained`."""
    state, note = load_file(folder / f"{number}-{BATCH}"), json.loads((folder / f"{number}-{NOTE}").read_text())
    step = Step(state.pop("answers"), state.pop("step_tokens"), note["batches"])
    return Batch(**state, lengths=note["lengths"], ids=note["ids"], step=step)
