"""A tiny tokenizer with a chat template, made in memory: deterministic, no network, milliseconds."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
LINES = [
    "The draft proposes what the target would say, and the target says it.\n\n\n",
    "How many legs has a horse? A horse has four legs.\n\n\n",
    "user assistant system: answer the question, please.\n\n\n",
]


def tiny_tokenizer(template: str | None = CHATML, vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE over any text: 3 special tokens, 256 bytes, the rest merges learnt from `LINES` (88 at most)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    fast.chat_template = template
    return fast
