"""`make bench-peers`: an EAGLE-3 training step of ours beside that of speculators, vLLM's library, on equal terms.

Both have the same weights, slots, passes, vocabulary and dtype, and the loss of speculators (the KL divergence from the
target, a mean over slots for each pass). Gradients are compared first: they show that both do the same. On a CPU
speculators has its eager attention and losses, as its fused ones need a GPU; there it takes those. Prints a table, and
writes runs/bench/peers.json.
"""

import argparse
import json
from importlib.metadata import version
from statistics import median

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig

from benchmarks.measure import once, peak_bytes
from benchmarks.train import LLAMA_3_8B, SMOLLM2, random_spec
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import provenance
from poss_lightning.files import atomic
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.tensors import Draft, to_theirs
from poss_lightning.losses.passes import pass_losses
from poss_lightning.machine import choose_dtype
from poss_lightning.target.spec import EmbedHead

LAYERS = 30  # of the target, of which three are read


class Problem:
    """A draft of ours and one of theirs with its weights, and one row of slots that all count.

    Args:
        sizes: of the target.
        slots: T.
        depth: passes.
        vocabulary: of the draft.
        device: cpu or cuda.
        dtype: in which products are computed; weights are float32.
    """

    def __init__(
        self, sizes: tuple[int, ...], slots: int, depth: int, vocabulary: int, device: str, dtype: torch.dtype
    ):
        torch.manual_seed(0)
        spec = random_spec(sizes, LAYERS)
        width, total = spec.hidden_size, spec.vocab_size
        self.depth, self.device, self.dtype, self.slots = depth, device, dtype, slots
        ids = torch.arange(vocabulary)
        config = DraftConfig(
            target=spec, allocation=(depth,), depth=depth, kind="eagle3", detach=False, vocabulary_size=vocabulary
        )
        self.draft = Specialists(config, ids).to(device)
        hidden = torch.randn(1, slots, width, device=device)  # what the final norm of the target would read
        self.features = nn.functional.rms_norm(hidden, (width,), eps=spec.norm_eps).to(dtype)
        self.tokens = torch.randint(vocabulary, (1, slots), device=device)
        self.inputs = torch.randn(1, slots, 3 * width, device=device).to(dtype)
        head = EmbedHead(torch.randn(total, width, device=device) * 0.1, torch.randn(total, width, device=device) * 0.1)
        self.embed_head = head.restrict(ids.to(device))
        self.draft.init_head(self.embed_head)
        self.peer = make_peer(self.draft, head, slots).to(device)
        self.hidden = hidden.to(dtype)
        self.counts = torch.full((1, slots), depth, device=device)
        self.counts[0, :depth] = torch.arange(1, depth + 1)  # a pass counts from its own slot on
        self.packing = Packing.one_per_row(1, slots, torch.device(device))
        self.draft.lm_head.requires_grad_(self.peer.lm_head.weight.requires_grad)
        self.optimizers = {
            name: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.0)
            for name, model in (("ours", self.draft), ("theirs", self.peer))
        }
        self.loss_config = resolve_loss_config("kl_div", "eager" if device == "cpu" else "fused")

    def ours(self) -> Tensor:
        """Cross-entropy against the target: the divergence, but for a constant."""
        embedded = self.embed_head.embed(self.tokens).to(self.dtype)
        predictions = self.draft(embedded, self.inputs, self.depth, self.packing)
        losses = pass_losses(
            [self.draft.head_input(each) for each in predictions],
            self.features,
            self.counts,
            self.embed_head.head.to(self.dtype),
            weights={"token": 1.0},
            draft_head=self.draft.lm_head.weight,
            pass_weights=1 / (self.slots - torch.arange(self.depth, device=self.device)),
        )
        return losses.total

    def theirs(self) -> Tensor:
        _, loss, _ = self.peer(
            hidden_states=self.inputs,
            input_ids=self.tokens,
            document_ids=torch.zeros_like(self.tokens),
            loss_mask=torch.ones_like(self.tokens, dtype=torch.bool),
            verifier_last_hidden_states=self.hidden,
            ttt_steps=self.depth,
            loss_config=self.loss_config,
        )
        return loss

    def step(self, name: str) -> Tensor:
        """A step of `ours` or `theirs`: the loss."""
        optimizer = self.optimizers[name]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.ours() if name == "ours" else self.theirs()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


def make_peer(draft: Specialists, head: EmbedHead, slots: int) -> Eagle3DraftModel:
    """The model of speculators with a draft's weights, and a target's embedding and head."""
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
    tensors["verifier_norm.weight"] = torch.ones(spec.hidden_size)
    left = peer.load_state_dict(tensors, strict=False)
    if left.missing_keys or left.unexpected_keys:
        raise ValueError(f"names of speculators are others: {left}")
    return peer.float()


def gradient_difference(problem: Problem) -> dict[str, float]:
    """By parameter, the relative difference of the gradients of both."""
    names = LAYOUTS["speculators"].number_names(1, 0)
    found = {}
    for name in ("ours", "theirs"):
        problem.step(name)
    peer = dict(problem.peer.named_parameters())
    for ours, parameter in problem.draft.named_parameters():
        if parameter.grad is not None:
            theirs = peer[names[ours]].grad
            found[ours] = float((parameter.grad - theirs).norm() / theirs.norm())
    return found


def figures(problem: Problem, pairs: int) -> dict[str, object]:
    """Seconds and memory of a step of both, in turn."""
    names = ("ours", "theirs")
    for name in names:
        problem.step(name)  # not counted
    times = [[once(lambda name=name: problem.step(name), problem.device) for name in names] for _ in range(pairs)]
    ratios = [theirs / ours for ours, theirs in times]
    peaks = {name: peak_bytes(lambda name=name: problem.step(name), problem.device) for name in names}
    return {
        "seconds": dict(zip(names, (median(of_one) for of_one in zip(*times, strict=True)), strict=True)),
        "speed_ratio": median(ratios),
        "speed_ratio_of_each_pair": sorted(round(ratio, 2) for ratio in ratios),
        "peak_megabytes_beyond_what_stays": {name: peak / 1e6 for name, peak in peaks.items()},
        "memory_ratio": peaks["ours"] / peaks["theirs"],
    }


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
    small = Problem(sizes, 256, given.depth, 1000, given.device, torch.float32)
    difference = gradient_difference(small)
    problem = Problem(sizes, given.slots, given.depth, given.vocabulary, given.device, getattr(torch, dtype))
    results = {
        "speculators": version("speculators"),
        "dtype": dtype,
        **{name: getattr(given, name) for name in ("slots", "depth", "vocabulary")},
        "largest_relative_gradient_difference": max(difference.values()),
        **figures(problem, given.pairs),
    }
    for name, value in results.items():
        print(f"  {name:<38} {value if not isinstance(value, float) else format(value, '.4g')}")
    with atomic("runs/bench/peers.json") as path:
        path.write_text(json.dumps({**provenance(torch.device(given.device)), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
