"""A tiny random target, its tokenizer and drafts for it: everything a law needs, in milliseconds."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.model import Target

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
LINES = [
    "The draft proposes what the target would say, and the target says it.\n\n\n",
    "How many legs has a horse? A horse has four legs.\n\n\n",
    "user assistant system: answer the question, please.\n\n\n",
]


def tiny_tokenizer(
    template: str | None = CHATML, vocab_size: int = 320, special: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over any text: 3 special tokens, 256 bytes, the rest merges learnt from `LINES` (88 at most).

    Further special tokens follow these.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    named = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def tiny_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A random Llama of two layers; its logits are spread enough to differ from token to token."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SIZE | changes)))


def write_target(folder: Path, seed: int = 0, **changes) -> str:
    """The model and its tokenizer as a local folder."""
    tiny_model(seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_target(seed: int = 0, **changes) -> Target:
    return Target(tiny_model(seed, **changes), tiny_tokenizer(), "tiny")


def tiny_draft(
    target: Target, allocation: list[int], seed: int = 0, vocabulary: Tensor | None = None, **config
) -> DraftModel:
    """Random specialists, differing enough from each other that a wrong one shows."""
    torch.manual_seed(seed)
    size = None if vocabulary is None else len(vocabulary)
    sizes = {"allocation": tuple(allocation), "depth": sum(allocation), "vocabulary_size": size}
    draft = make_draft(DraftConfig(target=target.spec, **sizes | config), vocabulary)
    spread(draft, norms=not draft.config.predicts_feature)
    return draft


def spread(draft: DraftModel, norms: bool = False) -> None:
    """Draw matrices, and norms too, that are so far apart that every specialist matters."""
    std = 0.15 * (SIZE["hidden_size"] / draft.config.target.hidden_size) ** 0.5  # at any width softmax leaves a choice
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
        elif norms:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
