"""Targets and drafts with random weights, for what depends on sizes alone: times and laws."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.target.model import Target
from poss_lightning.target.spec import TargetSpec
from tests.support.tiny import tiny_tokenizer


def random_spec(
    width: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, *, layers: int = 32
) -> TargetSpec:
    """A target of these sizes."""
    return TargetSpec(
        name="made up",
        hidden_size=width,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        context=8192,
        rope_theta=1e5,
        norm_eps=1e-5,
        layers=layers,
    )


def random_target(config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """A Llama of these sizes with the tests' tokenizer, of at most 320 tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, tiny_tokenizer(vocab_size=min(320, config.vocab_size)), "random")


def random_draft(
    target: Target,
    allocation: tuple[int, ...],
    depth: int = 6,
    seed: int = 0,
    vocabulary: list[int] | None = None,
    **config,
) -> Specialists:
    """Untrained specialists on the target's device, in its dtype; `config` has more of `DraftConfig`."""
    torch.manual_seed(seed)
    kept = None if vocabulary is None else torch.tensor(vocabulary)
    full = DraftConfig(
        target=target.spec,
        allocation=allocation,
        depth=depth,
        vocabulary_size=None if vocabulary is None else len(vocabulary),
        **config,
    )
    with torch.device(target.device):
        return Specialists(full, kept).to(target.dtype)
