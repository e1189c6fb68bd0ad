"""Four steps of training by a plain loop without Lightning, every conversation alone; how far apart weights are.

And how large a tensor is made.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poss_lightning.draft.attention import Packing
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.features.stream import collate
from poss_lightning.training.module import DraftModule
from tests.support import naive
from tests.support.ranks import CLIP, DATA, MODEL, STEPS
from tests.support.tiny import spread

Weights = dict[str, torch.Tensor]


def write_initial(path: Path, store: str, **changes) -> None:
    """Weights to start from, spread so that every specialist matters."""
    torch.manual_seed(0)
    draft = DraftModule(store=store, **MODEL | changes).draft
    spread(draft)
    save_file(draft.state_dict(), path)


def plain_steps(store: str, initial: Path, share: int, clip: float = CLIP, **changes) -> Weights:
    module = DraftModule(store=store, **MODEL | changes)
    draft, depth, embed_head = module.draft, module.draft.config.depth, module.embed_head
    draft.load_state_dict(load_file(initial))
    optimizer = torch.optim.AdamW(draft.parameters(), betas=MODEL["betas"], weight_decay=MODEL["weight_decay"])
    clipped = []
    for step, conversations in enumerate(step_by_step(store, share, draft.config.aux_layers)):
        sums, slots = torch.zeros(depth, dtype=torch.float64), torch.zeros(depth)
        for conversation in conversations:
            batch = collate([[conversation]])
            embedded, packing = embed_head.embed(batch.tokens[:, 1:]), Packing(batch.lengths, batch.positions[:, :-1])
            predictions, counts = draft(embedded, batch.draft_input[:, :-1], depth, packing), batch.mask.passes
            given = batch.target_argmax[:, 1:], batch.features[:, 1:], embed_head.head
            sums = sums + plain_losses(draft, predictions, counts, *given)
            slots += torch.stack([(counts >= k).sum() for k in range(1, depth + 1)])
        optimizer.zero_grad()
        (sums / slots * MODEL["gamma"] ** torch.arange(depth)).sum().backward()
        clipped.append(bool(torch.nn.utils.clip_grad_norm_(draft.parameters(), clip) > clip))
        optimizer.param_groups[0]["lr"] = MODEL["learning_rate"] * min(1, (STEPS - step) / (STEPS - 1))
        optimizer.step()
    assert set(clipped) == {True, False} or changes
    return draft.state_dict()


def plain_losses(draft, predictions, counts, greedy, features, head) -> torch.Tensor:
    if not draft.config.own_head:
        return naive.pass_losses({"feature": 1.0, "token": 0.1, "topk": 1.0}, predictions, features, counts, head)
    read = [draft.norm(one) for one in predictions]
    said = torch.isin(greedy, draft.vocabulary)
    return naive.pass_losses({"token": 1.0}, read, features, counts * said, head, draft_head=draft.lm_head.weight)


def step_by_step(store: str, share: int, layers: tuple[int, ...] = ()) -> list[list]:
    """The conversations of every optimizer step."""
    data = FeatureDataModule(store, **DATA)
    data.source = data.source.select(layers)
    schedule, steps = data.train_dataloader().schedule, []
    for epoch in range(2):
        schedule.set_epoch(epoch)
        batches = schedule.batches()
        for start in range(0, len(batches), share):
            steps.append([data.source[i] for batch in batches[start : start + share] for i in batch])
    return steps[:STEPS]


def difference(weights: Weights, wanted: Weights, start: Weights) -> float:
    """Of what training changed, relative."""
    names = [name for name, value in start.items() if value.is_floating_point()]
    found, expected, before = (
        torch.cat([x[name].cpu().double().flatten() for name in names]) for x in (weights, wanted, start)
    )
    return float((found - expected).norm() / (expected - before).norm())


def weights(folder: Path) -> Weights:
    return load_file(folder / "weights.safetensors")


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(part) if isinstance(x, torch.Tensor)] for part in ((args, kwargs), out))
        known = {x.untyped_storage().data_ptr() for x in given}  # a view of one makes no memory
        new = (x.numel() for x in made if x.untyped_storage().data_ptr() not in known)
        self.largest = max([self.largest, *new])
        return out
