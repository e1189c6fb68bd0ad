"""When a loss or a gradient is not finite: report where it came from, and save a reproducer."""

import json
import re
from pathlib import Path

import torch
from lightning import Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from poss_lightning.draft.specialists import Specialists
from poss_lightning.features.schedule import Step
from poss_lightning.features.stream import Batch
from poss_lightning.files import atomic
from poss_lightning.ranks import gather_objects
from poss_lightning.training.strategies import save_draft

BATCH, NOTE = "batch.safetensors", "note.json"
TENSORS = ("tokens", "features", "draft_input", "greedy", "counts", "positions")
LISTS = ("lengths", "ids", "spans")
SHOWN = 8  # conversations that a message names


class NotFinite(ValueError):
    """A loss or a gradient is infinite or not a number; the message says whose, and where the reproducer is."""


def is_finite(losses: list[Tensor], draft: Specialists) -> bool:
    """Whether a step's losses, (K,) each, and this process's gradients are finite; waits for the device.

    DeepSpeed keeps its gradients to itself, and skips a step when they are not finite; here only its losses count.
    """
    gradients = [parameter.grad for parameter in draft.parameters() if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return bool(torch.stack([tensor.isfinite().all() for tensor in losses + local]).all())


def report_nonfinite(trainer: Trainer, draft: Specialists, batches: list[Batch], losses: list[Tensor]) -> str:
    """Say where a step stopped being finite, and save a reproducer. All processes must call it.

    Args:
        draft: as the trainer's strategy holds it, divided perhaps.
        batches: of this process in this optimizer step.
        losses: their weighted losses, (K,) each.
    """
    local = locate_losses(draft, batches, losses)
    everywhere = gather_objects(local) if trainer.world_size > 1 else [local]
    findings = "; ".join(filter(None, everywhere)) or locate_gradients(draft, batches)
    folder = Path(trainer.log_dir or trainer.default_root_dir) / f"not-finite-{trainer.global_step}"
    save_draft(draft, folder, writes=trainer.is_global_zero)
    if local or not any(everywhere):
        save_batches(folder / f"rank-{trainer.global_rank}", batches, findings)
    return f"step {trainer.global_step}: {findings}; {folder} reproduces it"


def locate_losses(draft: Specialists, batches: list[Batch], losses: list[Tensor]) -> str | None:
    """Pass, specialist and conversations of losses that are not finite; None where all are.

    Args:
        batches: of this process in this optimizer step.
        losses: their weighted losses, (K,) each.
    """
    findings = []
    for batch, sums in zip(batches, losses, strict=True):
        if wrong := ((~sums.isfinite()).nonzero()[:, 0] + 1).tolist():
            specialists = sorted({draft.config.specialist_at(k) + 1 for k in wrong})
            parts = zip(batch.ids, batch.parts(), strict=True)
            bad_ids = [name for name, part in parts if not _all_finite(batch.draft_input[part])]
            where = f"the features of {_names(bad_ids)} are not either" if bad_ids else f"in {_names(batch.ids)}"
            findings += [f"the loss of pass {_names(wrong)} (specialist {_names(specialists)}) is not finite: {where}"]
    return "; ".join(findings) or None


def locate_gradients(draft: Specialists, batches: list[Batch]) -> str:
    """Parameters whose gradients are not finite, though the losses are."""
    bad = [name for name, value in draft.named_parameters() if value.grad is not None and not _all_finite(value.grad)]
    specialists = []
    for index in range(len(draft.layers)):
        if any(re.match(rf"layers\.{index}\.", name) for name in bad):
            passes = [k for k in range(1, draft.config.depth + 1) if draft.config.specialist_at(k) == index]
            specialists.append(f"specialist {index + 1} (pass {_names(passes)})")
    whose = _names(specialists or bad or ["some specialist"])
    ids = [name for batch in batches for name in batch.ids]
    return f"the gradient of {whose} is not finite, though the losses are: in {_names(ids)}"


def _all_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _names(things: list) -> str:
    more = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(map(str, things[:SHOWN])) + more


def save_batches(folder: Path, batches: list[Batch], findings: str) -> None:
    """Write every batch of this process in the step, and the findings."""
    for number, batch in enumerate(batches):
        tensors = {name: getattr(batch, name).detach().cpu() for name in TENSORS}
        # Copied, as the draft's input may be the features themselves, and a file holds no tensor twice.
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        state |= {"answers": batch.step.answers.cpu(), "step_tokens": batch.step.tokens.cpu()}
        with atomic(folder / f"{number}-{BATCH}") as path:
            save_file(state, path)
        note = {name: getattr(batch, name) for name in LISTS} | {"said": findings, "batches": batch.step.batches}
        with atomic(folder / f"{number}-{NOTE}") as path:
            path.write_text(json.dumps(note, indent=1) + "\n")


def load_batch(folder: Path, number: int = 0) -> Batch:
    """A batch that `save_batches` wrote; `Specialists.from_pretrained` loads the draft beside it."""
    state, note = load_file(folder / f"{number}-{BATCH}"), json.loads((folder / f"{number}-{NOTE}").read_text())
    step = Step(state.pop("answers"), state.pop("step_tokens"), note["batches"])
    note["spans"] = [[(start, stop) for start, stop in spans] for spans in note["spans"]]
    return Batch(**{name: state[name] for name in TENSORS}, **{name: note[name] for name in LISTS}, step=step)
