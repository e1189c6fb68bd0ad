"""Targets and drafts with random weights, for what depends on sizes alone: times and laws."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.target.model import Target
from poss_lightning.target.spec import TargetSpec

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


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


def random_target(
    config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Target:
    """A Llama of these sizes; its tokenizer knows bytes, as tokens 0 to 255, and <stop>, 256."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary | {"<stop>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<stop>")
    fast.chat_template = TEMPLATE
    return Target(model, fast, "random")


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
