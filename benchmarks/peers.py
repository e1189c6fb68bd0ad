"""A training step beside that of speculators, vLLM's library, on equal terms: `python -m benchmarks.peers`.

Both have the same weights, slots, passes, vocabulary and dtype, and the loss of speculators (the KL divergence from the
target, a mean over slots for each pass). Gradients are compared first, to show that both do the same. On a CPU
speculators uses its eager attention and losses, as its fused ones need a GPU. Prints figures and writes
runs/bench/peers.json.
"""

import argparse
from functools import partial
from importlib.metadata import version

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


class Problem:
    """Random float32 weights, in our draft and in theirs, and one row of `slots` slots that all count."""

    def __init__(
        self, sizes: tuple[int, ...], slots: int, depth: int, vocabulary: int, device: str, dtype: torch.dtype
    ):
        torch.manual_seed(0)
        self.depth, self.device, self.dtype = depth, device, dtype
        spec = random_spec(*sizes, layers=LAYERS)
        width, total = spec.hidden_size, spec.vocab_size
        kind = {"kind": "eagle3", "detach": False, "vocabulary_size": vocabulary}
        with torch.device(device):
            self.draft = Specialists(
                DraftConfig(target=spec, allocation=(depth,), depth=depth, **kind), torch.arange(vocabulary)
            )
            head = EmbedHead(torch.randn(total, width) * 0.1, torch.randn(total, width) * 0.1)
            self.embed_head = head.restrict(self.draft.vocabulary)
            self.draft.init_head(self.embed_head)
            self.counts = torch.full((1, slots), depth)
            self.counts[0, :depth] = torch.arange(1, depth + 1)  # a pass counts from its own slot on
            hidden = torch.randn(1, slots, width)
            self.tokens = torch.randint(vocabulary, (1, slots))
            self.inputs = torch.randn(1, slots, 3 * width).to(dtype)
            self.features = nn.functional.rms_norm(hidden, (width,), eps=spec.norm_eps).to(dtype)
            self.hidden = hidden.to(dtype)  # before the target's final norm: theirs norms it again
            self.packing = Packing.one_per_row(1, slots, torch.device(device))
            self.peer = make_peer(self.draft, head, torch.ones(width), slots).to(device)
        self.draft.lm_head.requires_grad_(self.peer.lm_head.weight.requires_grad)
        self.optimizers = {
            name: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.0)
            for name, model in (("ours", self.draft), ("theirs", self.peer))
        }
        self.loss_config = resolve_loss_config("kl_div", "eager" if device == "cpu" else "fused")

    def ours(self) -> Tensor:
        """Cross-entropy to the target: the divergence, up to a constant."""
        embedded = self.embed_head.embed(self.tokens).to(self.dtype)
        predictions = self.draft(embedded, self.inputs, self.depth, self.packing)
        passes = torch.arange(1, self.depth + 1, device=self.device)[:, None]
        losses = pass_losses(
            [self.draft.head_input(each) for each in predictions],
            self.features,
            self.counts,
            self.embed_head.head.to(self.dtype),
            weights={"token": 1.0},
            draft_head=self.draft.lm_head.weight,
            pass_weights=1 / (self.counts >= passes).sum(1).clamp(min=1),
        )
        return losses.total

    def theirs(self) -> Tensor:
        _, loss, _ = self.peer(
            hidden_states=self.inputs,
            input_ids=self.tokens,
            document_ids=torch.zeros_like(self.tokens),
            loss_mask=self.counts > 0,
            verifier_last_hidden_states=self.hidden,
            ttt_steps=self.depth,
            loss_config=self.loss_config,
        )
        return loss

    def step(self, name: str) -> None:
        """A step of `ours` or `theirs`."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.ours() if name == "ours" else self.theirs()
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()

    def gradient_differences(self) -> dict[str, float]:
        """The relative difference of each parameter's gradients, after a step of both."""
        names, peer = LAYOUTS["speculators"].number_names(self.draft.config), dict(self.peer.named_parameters())
        for name in BOTH:
            self.step(name)
        pairs = {
            name: (parameter.grad, peer[names[name]].grad)
            for name, parameter in self.draft.named_parameters()
            if parameter.grad is not None
        }
        return {name: float((ours - theirs).norm() / theirs.norm()) for name, (ours, theirs) in pairs.items()}


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
    differences = Problem(sizes, 256, given.depth, 1000, given.device, torch.float32).gradient_differences()
    problem = Problem(sizes, given.slots, given.depth, given.vocabulary, given.device, getattr(torch, dtype))
    steps = {name: partial(problem.step, name) for name in BOTH}
    results = {
        "speculators": version("speculators"),
        "dtype": dtype,
        **{name: getattr(given, name) for name in ("slots", "depth", "vocabulary")},
        "largest_relative_gradient_difference": max(differences.values()),
        **compare_steps(steps, given.pairs, given.device),  # memory beyond weights and optimizer
    }
    show(results)
    write("runs/bench/peers.json", results, given.device)


if __name__ == "__main__":
    main()
