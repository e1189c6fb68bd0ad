"""The engine in three lines of Python, with the arguments of transformers' `generate`:

    model = load("embedded", draft="runs/demo/poss2/draft-last")
    inputs = model.tokenizer("Why is the sky blue?", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=64)

transformers' own assisted generation cannot take such a draft: it asks for a chain, and this drafts a tree.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from transformers import GenerationConfig

from poss_lightning.corpus.turns import read_message
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.decoder import Decoded, Decoder, Progress
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.ranges import Seed, check_numbers
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.model import Target
from poss_lightning.target_model.template import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

NEW_TOKENS = 20  # transformers' default
ANSWER_TOKENS = 256  # of an answer to a question, at most


def load(
    target: "str | Path | PreTrainedModel",
    draft: str | Path | DraftModel | None = None,
    plan: TreePlan | None = None,
    tokenizer=None,
    dtype: str = "auto",
    device: str = "auto",
    chat_template_kwargs: dict[str, Any] | None = None,
    exact: bool | None = None,
) -> "Model":
    """Load a target, sped up by a draft.

    Args:
        target: "embedded", a local folder or a hub id; or a loaded causal LM of transformers, which is left unchanged.
        draft: folder, hub id or shipped draft, or loaded specialists; without one the target decodes alone, or with
            the plan's looked-up tokens.
        plan: the tree of each round; by default, with a draft, its own depth and 10 looked-up tokens.
        tokenizer: required with a loaded target.
        dtype: of a target that is named: "auto" (what the device multiplies fastest), "bfloat16", "float16" or
            "float32".
        device: "auto" ("cuda", else "mps", else "cpu"), or one of these.
        chat_template_kwargs: variables of the chat template, for `Model.chat`: {"enable_thinking": False}.
        exact: draft the very tokens of plain decoding, bit for bit, in any dtype; None does so on a CPU where a trial
            agrees (`Model.exact` says whether), True also on a GPU, where it takes time.

    Raises:
        FileNotFoundError: target or draft does not exist.
        ValueError: a target that is not supported, not the draft's, or not exact where that was asked; or a folder that
            holds no draft.
    """
    if isinstance(draft, str | Path):
        draft = load_draft(draft)  # first, as a target takes its time
    if isinstance(target, str | Path):
        loaded = Target.load(str(target), dtype, device, chat_template_kwargs=chat_template_kwargs, exact=exact)
    elif (dtype, device) != ("auto", "auto"):
        raise ValueError(f"dtype is {dtype} and device {device}; a {type(target).__name__} in hand keeps its own")
    elif tokenizer is None:
        raise ValueError(f"tokenizer is None; a {type(target).__name__} in hand needs its own")
    else:
        name = target.config.name_or_path or type(target).__name__
        loaded = Target(target, tokenizer, name, chat_template_kwargs, exact)
    plan = plan or TreePlan(lookup=0 if draft is None else DEFAULT_LOOKUP)
    if draft is None and not plan.lookup:
        return Model(Autoregressive(loaded))
    return Model(Speculative.from_draft(loaded, draft, plan))


class Model:
    """Continues texts as a causal LM of transformers does, by any decoder.

    Args:
        decoder: `Speculative`, or one of the baselines.

    Attributes:
        decoded: tokens, accepted tokens per round, and seconds of each text of the last `generate`.
    """

    def __init__(self, decoder: Decoder):
        self.decoder, self.target = decoder, decoder.target
        self.tokenizer = decoder.target.tokenizer
        self.decoded: list[Decoded] = []

    @property
    def device(self) -> torch.device:
        """Where the target computes."""
        return self.target.device

    @property
    def exact(self) -> bool:
        """Whether its texts are plain decoding's, bit for bit."""
        return self.decoder.exact

    @property
    def tau(self) -> float | None:
        """Tokens per round over the texts of the last `generate`; None without rounds."""
        accepted = [count for text in self.decoded for count in text.accepted]
        return sum(accepted) / len(accepted) + 1 if accepted else None

    @check_numbers
    def generate(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        streamer: "BaseStreamer | None" = None,
        generator: torch.Generator | None = None,
        seed: Seed | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Continue the prompts; return them with their padding and what follows: (B, T) -> (B, T + new).

        The model's own generation_config is not read: the defaults are 20 new tokens, greedy; with `do_sample`,
        temperature 1 and top_k 50. A prompt padded on the right continues from its last real token. No text exceeds the
        target's context.

        Args:
            input_ids: (B, T)
            generation_config: of transformers, as it takes it.
            attention_mask: (B, T) 0 where there is padding, on either side; None takes pad tokens for padding, unless
                they are stop tokens too.
            streamer: for one prompt, given its tokens as they are accepted.
            generator: on the CPU, for drawing; or give a `seed`.
            **arguments: fields of a generation config, which count before it and mean what they mean there, except that
                None is as not given: max_new_tokens, max_length, do_sample, temperature, top_k, top_p, min_p,
                repetition_penalty, num_return_sequences, eos_token_id ([] for none), pad_token_id.

        Raises:
            TypeError: input_ids is not a tensor, or an argument has another name.
            ValueError: input_ids of another shape or dtype, a field that does nothing here, a number outside its range,
                or a mask with holes.
        """
        size = self.target.spec.vocab_size
        config = _configure(generation_config, arguments, size)
        _check_tokens(input_ids)
        if seed is not None:
            if generator is not None:
                raise ValueError("seed and generator are both given: choose one")
            generator = torch.Generator().manual_seed(seed)
        if copies := config.num_return_sequences:
            input_ids = input_ids.repeat_interleave(copies, 0)
            attention_mask = None if attention_mask is None else attention_mask.repeat_interleave(copies, 0)
        chat_stops, ends = self.target.chat.stops, token_ids(config.eos_token_id, "eos_token_id", size)
        stops = chat_stops if config.eos_token_id is None else frozenset(ends)
        pads = [*token_ids(config.pad_token_id, "pad_token_id", size), *token_ids(self.tokenizer.pad_token_id)]
        pad = next(iter([*pads, *ends, *sorted(chat_stops), 0]))
        is_padding = config.pad_token_id is not None or (pad == self.tokenizer.pad_token_id and pad not in chat_stops)
        prompts = _unpadded(input_ids, attention_mask, pad if is_padding and pad not in stops else None)
        limit = _limit(config.max_new_tokens, config.max_length, input_ids.shape[1])
        watch = None
        if streamer is not None:
            if len(prompts) > 1:
                raise ValueError(f"streamer is for one prompt, and input_ids has {len(prompts)}")
            streamer.put(input_ids.cpu())

            def watch_stream(step: Progress) -> None:
                streamer.put(torch.tensor(step.tokens[0]))

            watch = watch_stream
        decoded = self.decoded = self.decoder.decode(prompts, limit, stops, _sampling(config), generator, watch)
        texts = [one.tokens for one in decoded]
        if streamer is not None:
            streamer.end()
        longest = max(map(len, texts))
        new = torch.tensor([text + [pad] * (longest - len(text)) for text in texts], device=input_ids.device)
        return torch.cat([input_ids, new], dim=1)  # (B, T + new)

    def chat(self, question: str | list[dict[str, Any]], max_new_tokens: int | None = None, **arguments: Any) -> str:
        """Answer a question, or the last of `messages`; `arguments` as in `generate`.

        It has at most 256 tokens unless `max_new_tokens` or `max_length` is given, here or in a generation config.
        Content in parts, `[{"type": "text", "text": "Hi"}]`, is joined.

        Raises:
            ValueError: a message without a role or a text, or one that the chat template refuses; it is named.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        for number, message in enumerate(messages):
            if isinstance(message, dict) and message.get("content") is None and not message.get("tool_calls"):
                raise ValueError(f"message {number} has no content; give a text")
        prompt = self.target.chat.prompt([read_message(turn, f"message {i}") for i, turn in enumerate(messages)])
        config = arguments.get("generation_config") or GenerationConfig()
        limits = (max_new_tokens, arguments.get("max_length"), config.max_new_tokens, config.max_length)
        if all(limit is None for limit in limits):
            max_new_tokens = ANSWER_TOKENS
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        output = self.generate(**inputs, max_new_tokens=max_new_tokens, **arguments)
        return self.target.chat.text(output[0, len(prompt) :].tolist())


# Fields of a generation config that are done here, and those that change no token.
SUPPORTED = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id")
SUPPORTED += ("pad_token_id", "repetition_penalty", "num_return_sequences")
IGNORED = ("transformers_version", "bos_token_id", "cache_implementation", "_from_model_config")


def _configure(config: GenerationConfig | None, arguments: dict[str, Any], vocabulary: int) -> GenerationConfig:
    """Return the config with the given arguments; refuse what differs from its default and is not done here."""
    config = copy.deepcopy(config) if config else GenerationConfig()
    for name in ("eos_token_id", "pad_token_id"):
        token_ids(arguments.get(name), name, vocabulary)  # in transformers a wrong one is a TypeError without a name
    if unknown := config.update(**{name: value for name, value in arguments.items() if value is not None}):
        raise TypeError(f"generate() got an unexpected keyword argument {next(iter(unknown))!r}")
    defaults = config._get_default_generation_params()
    for name, value in config.to_diff_dict().items():
        if name not in SUPPORTED + IGNORED and (isinstance(value, Tensor) or value != defaults.get(name)):
            raise ValueError(
                f"{name} is {value!r}, which is not done here: leave it out; fields of a generation config that are "
                f"done: {', '.join(SUPPORTED)}"
            )
    return config


def _check_tokens(input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids is a {type(input_ids).__name__}; give token ids, model.tokenizer(text, "
            'return_tensors="pt").input_ids, or ask model.chat(text)'
        )
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
        kind = f"{tuple(input_ids.shape)} of {input_ids.dtype}"
        raise ValueError(f"input_ids is {kind}; it must be (B, T) token ids, at least one of each")


@check_numbers
def _limit(max_new_tokens: Annotated[int | None, Ge(1)], max_length: Annotated[int | None, Ge(1)], length: int) -> int:
    """Return how many new tokens a prompt of `length` may have."""
    if max_new_tokens is not None or max_length is None:
        return max_new_tokens or NEW_TOKENS
    if max_length <= length:
        reason = f"the prompt has {length} tokens: it must be longer, by what is new"
        raise ValueError(f"max_length is {max_length} and {reason}")
    return max_length - length


def _sampling(config: GenerationConfig) -> Sampling:
    """Return how tokens are chosen; what has no effect without drawing has none here either."""
    usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0} if config.do_sample else {}
    given = {name: getattr(config, name) for name in (*usual, "repetition_penalty")}
    return Sampling(**usual | {name: value for name, value in given.items() if value is not None})


def _unpadded(tokens: Tensor, mask: Tensor | None, pad: int | None) -> list[list[int]]:
    """Return the prompts without padding; the mask (B, T) is 0 where there is padding, before or after a text."""
    if mask is None:
        mask = tokens != pad if pad is not None else torch.ones_like(tokens)
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(tokens.shape)}: give one for one")
    prompts = []
    for number, (row, real) in enumerate(zip(tokens.tolist(), mask.long().tolist(), strict=True)):
        inner = "".join(map(str, real)).strip("0")
        if not inner or "0" in inner:
            wrong = "has 0 between real tokens" if inner else "is all 0"
            raise ValueError(f"attention_mask of row {number} {wrong}; padding stands before or after a text")
        prompts.append([token for token, is_real in zip(row, real, strict=True) if is_real])
    return prompts
