"""A training step beside that of speculators, vLLM's library, on equal terms: `python -m benchmarks.peers`.

Both have the same weights, slots, passes, vocabulary and dtype, and the loss of speculators (the KL divergence from the
target, a mean over slots for each pass). Gradients are compared first, to show that both do the same. On a CPU
speculators uses its eager attention and losses, as its fused ones need a GPU. Prints figures and writes
runs/bench/peers.json.
"""

import argparse
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig

from benchmarks.measure import compare_steps, show, write
from benchmarks.random_target import random_spec
from benchmarks.train import LLAMA_3_8B, SMOLLM2
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import Specialists
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.tensors import Draft, to_theirs
from poss_lightning.losses.passes import pass_losses
from poss_lightning.machine import choose_dtype
from poss_lightning.target.spec import EmbedHead

LAYERS = 30  # of the target, of which three are read
BOTH = ("ours", "theirs")


class Row(NamedTuple):
    """T slots in one row."""

    tokens: Tensor  # (1, T) on the right of each slot
    inputs: Tensor  # (1, T, 3D) what a draft reads of the target
    features: Tensor  # (1, T, D) what the target's head reads after the token
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
    """

    def __init__(self, draft: Specialists, head: EmbedHead, norm: Tensor, slots: int, dtype: torch.dtype):
        self.draft, self.dtype, self.device = draft, dtype, draft.fc.weight.device.type
        self.depth = draft.config.depth
        self.embed_head = head.restrict(draft.vocabulary)
        self.peer = make_peer(draft, head, norm, slots).to(draft.fc.weight.device)
        draft.lm_head.requires_grad_(self.peer.lm_head.weight.requires_grad)
        self.optimizers = {
            name: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.0)
            for name, model in (("ours", draft), ("theirs", self.peer))
        }
        self.loss_config = resolve_loss_config("kl_div", "eager" if self.device == "cpu" else "fused")

    def ours(self, row: Row) -> Tensor:
        """Cross-entropy to the target: the divergence, up to a constant."""
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
        raise ValueError(f"these names of speculators are unexpected: {left}")
    return peer.float()


def gradient_difference(problem: Problem, row: Row) -> dict[str, float]:
    """The relative difference of each parameter's gradients."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", help="auto is what this machine multiplies fastest")
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    sizes = SMOLLM2 if given.device == "cpu" else LLAMA_3_8B
    dtype = choose_dtype(given.dtype, given.device)
    difference = gradient_difference(*random_problem(sizes, 256, given.depth, 1000, given.device, torch.float32))
    options = given.slots, given.depth, given.vocabulary
    problem, row = random_problem(sizes, *options, given.device, getattr(torch, dtype))
    steps = {name: partial(problem.step, name, row) for name in BOTH}
    results = {
        "speculators": version("speculators"),
        "dtype": dtype,
        **{name: getattr(given, name) for name in ("slots", "depth", "vocabulary")},
        "largest_relative_gradient_difference": max(difference.values()),
        **compare_steps(steps, given.pairs, given.device),  # memory beyond weights and optimizer
    }
    show(results)
    write("runs/bench/peers.json", results, given.device)


if __name__ == "__main__":
    main()
