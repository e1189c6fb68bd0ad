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

from benchmarks.measure import compare_steps, report
from benchmarks.random_target import llama
from benchmarks.train import LLAMA_3_8B, SMOLLM2, Problem, largest_difference
from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.interop.layouts import LAYOUTS
from poss_lightning.interop.tensors import Draft, to_theirs
from poss_lightning.losses.chunks import Heads
from poss_lightning.losses.passes import LossSpec, pass_losses
from poss_lightning.machine import choose_dtype
from poss_lightning.target_model.describe import spec_of
from poss_lightning.target_model.spec import EmbedHead

DEPTH, VOCABULARY = 6, 32000


class Pair(Problem):
    """The same weights in our draft and in theirs, and one row of `slots` slots that all count."""

    def __init__(self, sizes: tuple[int, ...], slots: int, vocabulary: int, device: str, dtype: str):
        kind = {"kind": "eagle3", "detach": False, "vocabulary_size": vocabulary}
        spec = spec_of(llama(*sizes), "random")
        config = DraftConfig(target=spec, allocation=(DEPTH,), depth=DEPTH, **kind)
        super().__init__(config, slots, device, getattr(torch, dtype))
        with torch.device(device):
            self.tokens = torch.randint(vocabulary, (1, slots))
            head = EmbedHead((torch.randn(self.head.shape) * 0.1).to(self.dtype), self.head)
            self.embedded, self.embed_head = head.embed(self.tokens), head.restrict(self.draft.vocabulary)
            self.draft.init_head(self.embed_head)
            self.peer = make_peer(self.draft, head, torch.ones(spec.hidden_size), sizes).to(device)
        self.hidden = self.features  # before the target's final norm: theirs norms it again
        normed = nn.functional.rms_norm(self.hidden.float(), (spec.hidden_size,), eps=spec.norm_eps)
        self.features = normed.to(self.dtype)
        self.draft.lm_head.requires_grad_(self.peer.lm_head.weight.requires_grad)
        self.optimizers = {
            name: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.0)
            for name, model in (("ours", self.draft), ("theirs", self.peer))
        }
        self.loss_config = resolve_loss_config("kl_div", "eager" if device == "cpu" else "fused")

    def ours(self) -> Tensor:
        """Cross-entropy to the target: the divergence, up to a constant."""
        predictions = self.draft(self.embedded, self.inputs, self.depth, self.packing)
        passes = torch.arange(1, self.depth + 1, device=self.device)[:, None]
        losses = pass_losses(
            [self.draft.head_input(each) for each in predictions],
            self.features,
            self.counts,
            Heads(self.embed_head.head, self.draft.lm_head.weight),
            LossSpec(terms={"token": 1.0}),
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

    def gradient_difference(self) -> float:
        """The largest relative difference of a parameter's gradients, after a step of both."""
        for name in self.optimizers:
            self.step(name)
        names, theirs = LAYOUTS["speculators"].number_names(self.draft.config), dict(self.peer.named_parameters())
        learnt = [(name, own) for name, own in self.draft.named_parameters() if own.requires_grad]
        return largest_difference((own.grad, theirs[names[name]].grad) for name, own in learnt)


def make_peer(draft: DraftModel, head: EmbedHead, norm: Tensor, sizes: tuple[int, ...]) -> Eagle3DraftModel:
    """The model of speculators with a draft's weights, and a target's embedding, head and final norm (D,)."""
    layer = llama(*sizes, layers=1)
    if head.embedding.device.type == "cpu":
        layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft.config.vocabulary_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=list(draft.config.aux_layers),
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
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    sizes = SMOLLM2 if given.device == "cpu" else LLAMA_3_8B
    dtype = choose_dtype(given.dtype, given.device)
    difference = Pair(sizes, 256, 1000, given.device, "float32").gradient_difference()
    pair = Pair(sizes, given.slots, VOCABULARY, given.device, dtype)
    steps = {name: partial(pair.step, name) for name in pair.optimizers}
    results = {
        "speculators": version("speculators"),
        "dtype": dtype,
        **{"slots": given.slots, "depth": DEPTH, "vocabulary": VOCABULARY},
        "largest_relative_gradient_difference": difference,
        **compare_steps(steps, given.pairs, given.device),  # memory beyond weights and optimizer
    }
    report(results, "runs/bench/peers.json", given.device)


if __name__ == "__main__":
    main()
