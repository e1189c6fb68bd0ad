"""`make bench-plan`: the memory that `poss plan` predicts, against the peak of a real training's tensors.

Each case trains two steps through Lightning on the CPU, with random weights and a random batch. All tensor allocations
of the run are counted, from the making of the module on. Prints a table and writes runs/bench/plan.json.
"""

import gc
import json
import logging
import warnings
from functools import partial
from typing import Literal, NamedTuple

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import peak_bytes
from benchmarks.random_target import random_spec
from poss_lightning.draft.specialists import DraftConfig
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Batch, collate
from poss_lightning.files import atomic
from poss_lightning.losses.passes import chunk_on
from poss_lightning.target.spec import EmbedHead, TargetSpec
from poss_lightning.training.memory import memory
from poss_lightning.training.module import SpecialistTraining
from poss_lightning.training.plan import TARGETS, TIED
from poss_lightning.training.setup import Setup

ALLOWED = 0.15
sizes = partial(random_spec, layers=8)  # a made-up target


class Case(NamedTuple):
    """A training to predict and to measure; its batch is one packed row."""

    target: TargetSpec
    allocation: tuple[int, ...]
    depth: int
    lengths: list[int]  # of the conversations
    vocabulary: int | None = None
    precision: str = "bf16-mixed"
    answers: float = 1.0
    detach: bool = True
    kind: Literal["eagle2", "eagle3"] = "eagle2"
    optimizer: Literal["adamw", "muon"] = "adamw"

    def config(self) -> DraftConfig:
        return DraftConfig(
            target=self.target,
            allocation=self.allocation,
            depth=self.depth,
            detach=self.detach,
            vocabulary_size=self.vocabulary,
            kind=self.kind,
        )

    def setup(self, device: Literal["cpu", "cuda"] = "cpu") -> Setup:
        tied = self.target.name in TIED
        return Setup(
            config=self.config(),
            tied=tied,
            tokens=sum(self.lengths),
            conversation=max(self.lengths),
            answers=self.answers,
            precision=self.precision,
            device=device,
            chunk=chunk_on(device),
            optimizer=self.optimizer,
        )


NARROW, WIDE = sizes(128, 352, 4, 2, 32, 2000), sizes(512, 2048, 8, 8, 64, 1000)
EMBEDDED = TARGETS["smollm2-135m"]
CASES = [
    Case(NARROW, (2, 2, 2), 6, [512], precision="32-true"),
    Case(NARROW, (2, 2, 2), 6, [1024]),
    Case(NARROW, (2, 2, 2), 6, [512, 700, 36, 800]),
    Case(NARROW, (2, 2, 2), 6, [4096]),
    Case(NARROW, (1, 1, 1, 1, 1, 1), 6, [300, 212], answers=0.5),
    Case(NARROW, (6,), 1, [1024], precision="32-true"),
    Case(NARROW, (3, 3), 8, [1024, 1024], vocabulary=500, detach=False),
    Case(WIDE, (2, 1), 3, [64]),
    Case(WIDE, (6,), 1, [512, 512], precision="32-true"),
    Case(sizes(128, 1024, 4, 4, 32, 200), (6,), 1, [2048]),
    Case(sizes(64, 176, 8, 2, 16, 50000), (3, 3), 6, [1024]),
    Case(NARROW, (3, 3, 2), 8, [1024], detach=False, kind="eagle3"),
    Case(WIDE, (8,), 8, [200, 312], vocabulary=500, precision="32-true", detach=False, kind="eagle3"),
    Case(WIDE, (2, 1), 3, [64], optimizer="muon"),
    Case(EMBEDDED, (3, 3), 6, [512], vocabulary=8192),
    Case(EMBEDDED, (2, 2, 2), 6, [300, 212]),
]


class Random:
    """What the module asks of a feature store."""

    def __init__(self, case: Case):
        self.target, self.tied = case.target, case.target.name in TIED
        self.read = case.target.hidden_size * (len(case.config().layers) or 1)

    def embed_head(self) -> EmbedHead:
        embedding = torch.randn(self.target.vocab_size, self.target.hidden_size, dtype=torch.bfloat16)
        return EmbedHead(embedding, embedding if self.tied else embedding.clone())

    def common_tokens(self, size: int) -> Tensor:
        return torch.arange(size)

    def select(self, layers: tuple[int, ...]) -> "Random":
        return self

    def root_mean_square(self) -> Tensor:
        return torch.ones(self.read)


def batch(case: Case) -> Batch:
    """One packed row; `answers` of every conversation are the assistant's, and its inputs are a copy, as with noise."""
    samples = []
    for number, length in enumerate(case.lengths):
        tokens, spans = torch.zeros(length, dtype=torch.long), [(length - round(case.answers * length), length)]
        parts = torch.randn(length, 1 + len(case.config().layers), case.target.hidden_size, dtype=torch.bfloat16)
        samples.append(Sample(str(number), tokens, tokens, spans, parts[:, 0].clone(), parts[:, 1:].clone()))
    made = collate([samples])
    return made._replace(draft_input=made.draft_input.clone())


def train(case: Case, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Two steps: only the second has AdamW's moments, and the gradients of the one before."""
    module = SpecialistTraining(
        Random(case),
        list(case.allocation),
        case.depth,
        case.detach,
        vocabulary_size=case.vocabulary,
        kind=case.kind,
        optimizer=case.optimizer,
    )
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=case.precision,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch(case)] * 2, batch_size=None, collate_fn=lambda planned: planned))
    del module, trainer
    gc.collect()  # modules and trainer hold each other, and must not be freed in the next run


def compare(case: Case, device: Literal["cpu", "cuda"] = "cpu") -> dict:
    """Bytes predicted and measured, their ratio, and the predicted parts."""
    predicted, measured = memory(case.setup(device)), peak_bytes(lambda: train(case, device), device)
    figures = {"predicted": predicted.total, "measured": measured, "ratio": predicted.total / measured}
    return figures | {"parts": predicted._asdict()}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = []
    print(
        f"{'width':>6}{'V':>7}  {'allocation':<20}{'depth':>6}{'T':>6}  {'precision':<12}{'MB':>8}{'of':>8}{'ratio':>7}"
    )
    for case in CASES:
        figures = compare(case)
        results.append({"case": case._asdict() | {"target": case.target.__dict__}, **figures})
        print(
            f"{case.target.hidden_size:>6}{case.setup().vocabulary:>7}  {list(case.allocation)!s:<20}{case.depth:>6}"
            f"{sum(case.lengths):>6}  {case.precision:<12}{figures['predicted'] / 1e6:>8.1f}"
            f"{figures['measured'] / 1e6:>8.1f}{figures['ratio']:>7.3f}  {figures['parts']['moment']}",
            flush=True,
        )
    furthest = max(abs(figures["ratio"] - 1) for figures in results)
    print(f"furthest off: {furthest:.1%}; allowed: {ALLOWED:.0%}")
    with atomic("runs/bench/plan.json") as path:
        path.write_text(
            json.dumps({**provenance(torch.device("cpu")), "furthest": furthest, "cases": results}, indent=1) + "\n"
        )
    if furthest > ALLOWED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
