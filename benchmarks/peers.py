"""`make bench-peers`: an EAGLE-3 training step of ours beside that of speculators, vLLM's library, on equal terms.

Both have the same weights, slots, passes, vocabulary and dtype, and the loss of speculators (the KL divergence from the
target, a mean over slots for each pass). Gradients are compared first: they show that both do the same. On a CPU
speculators has its eager attention and losses, as its fused ones need a GPU; there it takes those. With `--train N`
both are trained on a store, N steps from the same weights, and measured by our engine. Prints a table, and writes
runs/bench/peers.json.
"""

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig

from benchmarks.measure import once, peak_bytes
from benchmarks.random_target import random_spec
from benchmarks.train import LLAMA_3_8B, SMOLLM2
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.evaluation.records import read_records
from poss_lightning.evaluation.replay import replay
from poss_lightning.features.store import FeatureStore, Sample
from poss_lightning.features.stream import Batch, collate
from poss_lightning.files import atomic
from poss_lightning.interop.convert import convert
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.tensors import Draft, to_theirs
from poss_lightning.losses.passes import pass_losses
from poss_lightning.machine import choose_dtype
from poss_lightning.reports.summary import by_method, summarise
from poss_lightning.target.model import Target
from poss_lightning.target.spec import EmbedHead
from poss_lightning.training.module import SpecialistTraining

LAYERS = 30  # of the target, of which three are read
LEARNING_RATE = 1e-3  # of those that are trained
BOTH = ("ours", "theirs")


class Row(NamedTuple):
    """T slots in one row; of each the token on its right, and what the target says there."""

    tokens: Tensor  # (1, T)
    inputs: Tensor  # (1, T, 3D) what a draft reads of the target
    features: Tensor  # (1, T, D) what the target's head reads behind the token
    hidden: Tensor  # (1, T, D) before the target's final norm: theirs norms it again
    counts: Tensor  # (1, T) how many passes count
    packing: Packing
    texts: Tensor  # (1, T) the number of the text


class Problem:
    """A draft of ours and one of theirs with its weights.

    Args:
        draft: of kind eagle3, with a vocabulary.
        head: the target's embedding and head.
        norm: (D,) weight of the target's final norm.
        slots: T, at most.
        dtype: in which products are computed; weights are float32.
        learning_rate: of AdamW, for both.
    """

    def __init__(
        self,
        draft: Specialists,
        head: EmbedHead,
        norm: Tensor,
        slots: int,
        dtype: torch.dtype,
        learning_rate: float = 0.0,
    ):
        self.draft, self.dtype, self.device = draft, dtype, draft.fc.weight.device.type
        self.depth = draft.config.depth
        self.embed_head = head.restrict(draft.vocabulary)
        self.peer = make_peer(draft, head, norm, slots).to(draft.fc.weight.device)
        draft.lm_head.requires_grad_(self.peer.lm_head.weight.requires_grad)
        self.optimizers = {
            name: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=learning_rate)
            for name, model in (("ours", draft), ("theirs", self.peer))
        }
        self.loss_config = resolve_loss_config("kl_div", "eager" if self.device == "cpu" else "fused")

    def ours(self, row: Row) -> Tensor:
        """Cross-entropy against the target: the divergence, but for a constant."""
        embedded = self.embed_head.embed(row.tokens).to(self.dtype)
        predictions = self.draft(embedded, row.inputs, self.depth, row.packing)
        passes = torch.arange(1, self.depth + 1, device=row.counts.device)[:, None]
        losses = pass_losses(
            [self.draft.head_input(each) for each in predictions],
            row.features,
            row.counts,
            self.embed_head.head.to(self.dtype),
            weights={"token": 1.0},
            draft_head=self.draft.lm_head.weight,
            pass_weights=1 / (row.counts >= passes).sum(1).clamp(min=1),
        )
        return losses.total

    def theirs(self, row: Row) -> Tensor:
        _, loss, _ = self.peer(
            hidden_states=row.inputs,
            input_ids=row.tokens,
            document_ids=row.texts,
            loss_mask=row.counts > 0,
            verifier_last_hidden_states=row.hidden,
            ttt_steps=self.depth,
            loss_config=self.loss_config,
        )
        return loss

    def step(self, name: str, row: Row) -> Tensor:
        """A step of `ours` or `theirs`: the loss."""
        optimizer = self.optimizers[name]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.ours(row) if name == "ours" else self.theirs(row)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


def random_problem(
    sizes: tuple[int, ...], slots: int, depth: int, vocabulary: int, device: str, dtype: torch.dtype
) -> tuple[Problem, Row]:
    """Random weights, and a row of slots that all count."""
    torch.manual_seed(0)
    spec = random_spec(*sizes, layers=LAYERS)
    width, total = spec.hidden_size, spec.vocab_size
    config = DraftConfig(
        target=spec, allocation=(depth,), depth=depth, kind="eagle3", detach=False, vocabulary_size=vocabulary
    )
    with torch.device(device):
        draft = Specialists(config, torch.arange(vocabulary))
        head = EmbedHead(torch.randn(total, width) * 0.1, torch.randn(total, width) * 0.1)
        draft.init_head(head.restrict(draft.vocabulary))
        counts = torch.full((1, slots), depth)
        counts[0, :depth] = torch.arange(1, depth + 1)  # a pass counts from its own slot on
        hidden = torch.randn(1, slots, width)
        row = Row(
            tokens=torch.randint(vocabulary, (1, slots)),
            inputs=torch.randn(1, slots, 3 * width).to(dtype),
            features=nn.functional.rms_norm(hidden, (width,), eps=spec.norm_eps).to(dtype),
            hidden=hidden.to(dtype),
            counts=counts,
            packing=Packing.one_per_row(1, slots, torch.device(device)),
            texts=torch.zeros(1, slots, dtype=torch.long),
        )
        return Problem(draft, head, torch.ones(width), slots, dtype), row


def make_peer(draft: Specialists, head: EmbedHead, norm: Tensor, slots: int) -> Eagle3DraftModel:
    """The model of speculators with a draft's weights, and a target's embedding, head and final norm (D,)."""
    spec, size = draft.config.target, draft.config.vocabulary_size
    layer = LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        num_hidden_layers=1,
        vocab_size=spec.vocab_size,
        max_position_embeddings=max(spec.context, slots + 64),
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )
    if head.embedding.device.type == "cpu":
        layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(draft.config.layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft.config.depth)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    peer = Eagle3DraftModel(config)
    tensors = to_theirs(Draft(draft.config, draft.state_dict()), LAYOUTS["speculators"], head)
    tensors["verifier_lm_head.weight"] = head.head[draft.vocabulary]
    tensors["verifier_norm.weight"] = norm
    left = peer.load_state_dict(tensors, strict=False)
    if left.missing_keys or left.unexpected_keys:
        raise ValueError(f"names of speculators are others: {left}")
    return peer.float()


def gradient_difference(problem: Problem, row: Row) -> dict[str, float]:
    """By parameter, the relative difference of the gradients of both."""
    names = LAYOUTS["speculators"].number_names(1, 0)
    found = {}
    for name in BOTH:
        problem.step(name, row)
    peer = dict(problem.peer.named_parameters())
    for ours, parameter in problem.draft.named_parameters():
        if parameter.grad is not None:
            theirs = peer[names[ours]].grad
            found[ours] = float((parameter.grad - theirs).norm() / theirs.norm())
    return found


def figures(problem: Problem, row: Row, pairs: int) -> dict[str, object]:
    """Seconds and memory of a step of both, in turn."""
    for name in BOTH:
        problem.step(name, row)  # not counted
    times = [[once(lambda name=name: problem.step(name, row), problem.device) for name in BOTH] for _ in range(pairs)]
    ratios = [theirs / ours for ours, theirs in times]
    peaks = {name: peak_bytes(lambda name=name: problem.step(name, row), problem.device) for name in BOTH}
    return {
        "seconds": dict(zip(BOTH, (median(of_one) for of_one in zip(*times, strict=True)), strict=True)),
        "speed_ratio": median(ratios),
        "speed_ratio_of_each_pair": sorted(round(ratio, 2) for ratio in ratios),
        "peak_megabytes_beyond_what_stays": {name: peak / 1e6 for name, peak in peaks.items()},
        "memory_ratio": peaks["ours"] / peaks["theirs"],
    }


# --- trained ---


def train(
    steps: int, store: str, slots: int, depth: int, vocabulary: int, device: str, dtype: torch.dtype, out: Path
) -> Path:
    """Both from the same weights, on the same texts in the same order: drafts `ours` and `theirs` in the folder `out`.

    Each counts the slots that it counts: ours those that a round can reach, theirs all of the answers, and passes that
    began before an answer, or run on into the next text.
    """
    features = FeatureStore(store)
    torch.manual_seed(0)
    options: dict[str, Any] = {"kind": "eagle3", "detach": False, "vocabulary_size": vocabulary, "normalise": False}
    draft = SpecialistTraining(store, [depth], **options).draft.to(device)
    features = features.select(draft.config.layers)
    norm = Target.load(features.target.name, "float32", "cpu").model.get_decoder().norm.weight.data.to(device)
    problem = Problem(draft, features.embed_head().to(device, torch.float32), norm, slots, dtype, LEARNING_RATE)
    with tqdm(total=steps, unit="step", desc="training both") as bar:
        for row in islice(stored_rows(features, problem.embed_head, norm, slots, dtype), steps):
            losses = {name: float(problem.step(name, row)) for name in BOTH}
            bar.set_postfix(losses, refresh=False)
            bar.update()
    draft.save_pretrained(out / "ours")
    problem.peer.save_pretrained(out / "peer")
    convert(str(out / "peer"), str(out / "theirs"), input_format="speculators", target=features.target.name)
    return out


def stored_rows(store: FeatureStore, head: EmbedHead, norm: Tensor, slots: int, dtype: torch.dtype) -> Iterator[Row]:
    """The texts of a store in a random order, again and again, as many in a row as fit."""
    chosen: list[Sample] = []
    while True:
        for index in torch.randperm(len(store)).tolist():
            sample = store[index]
            if chosen and sum(len(each.tokens) for each in [*chosen, sample]) > slots:
                yield as_row(collate([chosen]), head, norm, dtype)
                chosen = []
            chosen.append(sample)


def as_row(batch: Batch, head: EmbedHead, norm: Tensor, dtype: torch.dtype) -> Row:
    """A row of a store, as `SpecialistTraining` reads it."""
    texts = torch.cat([torch.full((length,), number) for number, length in enumerate(batch.lengths[0])])
    device, features = norm.device, batch.features[:, 1:].float().to(norm.device)
    return Row(
        tokens=batch.tokens[:, 1:].to(device),
        inputs=batch.draft_input[:, :-1].to(device, dtype),
        features=features.to(dtype),
        hidden=(features / norm).to(dtype),
        counts=batch.counts[:, :-1].to(device) * head.has_row(batch.greedy[:, 1:].to(device)),
        packing=Packing(batch.lengths, batch.positions[:, :-1].to(device)),
        texts=texts[None, :-1].to(device),
    )


def measure(drafts: Path, answers: str, depth: int) -> dict[str, str]:
    """τ of both in our engine, with 95 % intervals over prompts."""
    replay(answers, str(drafts / "replay"), drafts={name: str(drafts / name) for name in BOTH}, depth=depth)
    rows = summarise(by_method(read_records(drafts / "replay")), reference="theirs")
    ours, theirs = (next(row for row in rows if (row.suite, row.method) == ("all", name)) for name in BOTH)
    found = {f"tau_{row.method}": row.values["tau_macro"].with_interval(".3f") for row in (ours, theirs)}
    return found | {"tau_ours_less_theirs": ours.gains["tau_macro"].with_interval("+.3f")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", help="auto is what this machine multiplies fastest")
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--train", type=int, default=0, help="then train both for so many steps, and measure their τ")
    parser.add_argument("--store", default="runs/lab/layers", help="features with inner layers, to train on")
    parser.add_argument("--answers", default="runs/lab/dev-layers", help="features of the answers to measure on")
    given = parser.parse_args()
    sizes = SMOLLM2 if given.device == "cpu" else LLAMA_3_8B
    dtype = choose_dtype(given.dtype, given.device)
    difference = gradient_difference(*random_problem(sizes, 256, given.depth, 1000, given.device, torch.float32))
    options = given.slots, given.depth, given.vocabulary
    problem, row = random_problem(sizes, *options, given.device, getattr(torch, dtype))
    results = {
        "speculators": version("speculators"),
        "dtype": dtype,
        **{name: getattr(given, name) for name in ("slots", "depth", "vocabulary")},
        "largest_relative_gradient_difference": max(difference.values()),
        **figures(problem, row, given.pairs),
    }
    if given.train:
        with TemporaryDirectory() as place:
            drafts = train(given.train, given.store, *options, given.device, getattr(torch, dtype), Path(place))
            results |= {"steps": given.train, **measure(drafts, given.answers, given.depth)}
    for name, value in results.items():
        print(f"  {name:<38} {value if not isinstance(value, float) else format(value, '.4g')}")
    with atomic("runs/bench/peers.json") as path:
        path.write_text(json.dumps({**provenance(torch.device(given.device)), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
