"""Targets and drafts with random weights, for what depends on sizes alone: times and laws."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.model import Target
from tests.support.tiny import tiny_tokenizer


def llama(
    width: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, layers: int = 32
) -> LlamaConfig:
    """The config of a Llama of these sizes."""
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_target(config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """A Llama of this config with the tests' tokenizer, of at most 320 tokens."""
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
) -> DraftModel:
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
        return make_draft(full, kept).to(target.dtype)
