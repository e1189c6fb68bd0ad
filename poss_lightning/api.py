"""The engine in three lines of Python, with the arguments of transformers' `generate`:

    model = load("embedded", draft="runs/demo/poss2/draft-last")
    inputs = model.tokenizer("Why is the sky blue?", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=64)

transformers' own assisted generation cannot take such a draft: it asks for a chain, and this drafts a tree.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from poss_lightning.corpus.turns import read_message
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Decoded, Decoder, Progress
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import choose_lookup
from poss_lightning.decoding.plans import Plan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import Specialists
from poss_lightning.sampling import Sampling
from poss_lightning.target.model import Target
from poss_lightning.target.template import token_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

NEW_TOKENS = 20  # transformers' default
ANSWER_TOKENS = 256  # of an answer to a question, at most


def load(
    target: "str | Path | PreTrainedModel" = "embedded",
    draft: str | Path | Specialists | None = None,
    plan: Plan | None = None,
    tokenizer=None,
    dtype: str = "auto",
    device: str = "auto",
    tree: Literal["auto", "fixed"] = "auto",
    chat_template_kwargs: dict[str, Any] | None = None,
) -> "Model":
    """Load a target, sped up by a draft.

    Args:
        target: "embedded", a local folder or a hub id; or a loaded causal LM of transformers, which is left unchanged.
        draft: folder, hub id or shipped draft, or loaded specialists; without one the target decodes alone, or with
            the plan's looked-up tokens.
        plan: the tree of each round; by default the draft's own depth, with 10 looked-up tokens where `tree` is "auto".
        tokenizer: required with a loaded target.
        dtype: of a target that is named: "auto" (what the device multiplies fastest), "bfloat16", "float16" or
            "float32".
        device: "auto" ("cuda", else "mps", else "cpu"), or one of these.
        tree: "auto" sizes trees by expected tokens per second on this machine, within the plan; "fixed" follows it.
        chat_template_kwargs: variables of the chat template, for `Model.chat`: {"enable_thinking": False}.

    Raises:
        FileNotFoundError: target or draft does not exist.
        ValueError: a target that is not supported or not the draft's, or a folder that holds no draft.
    """
    if isinstance(draft, str | Path):
        draft = load_draft(draft)  # first, as a target takes its time
    if isinstance(target, str | Path):
        loaded = Target.load(str(target), dtype, device, chat_template_kwargs=chat_template_kwargs)
    elif (dtype, device) != ("auto", "auto"):
        raise ValueError(f"dtype is {dtype} and device {device}; a {type(target).__name__} in hand keeps its own")
    elif tokenizer is None:
        raise ValueError(f"tokenizer is None; a {type(target).__name__} in hand needs its own")
    else:
        name = target.config.name_or_path or type(target).__name__
        loaded = Target(target, tokenizer, name, chat_template_kwargs)
    plan = plan or Plan(lookup=choose_lookup(None, draft is not None, tree))
    if draft is None and not plan.lookup:
        return Model(Autoregressive(loaded))
    return Model(Speculative.from_draft(loaded, draft, plan, tree))


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
    def tau(self) -> float | None:
        """Tokens per round over the texts of the last `generate`; None without rounds."""
        accepted = [count for text in self.decoded for count in text.accepted]
        return sum(accepted) / len(accepted) + 1 if accepted else None

    def generate(
        self,
        input_ids: Tensor,
        generation_config: "GenerationConfig | None" = None,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        eos_token_id: int | list[int] | Tensor | None = None,
        pad_token_id: int | Tensor | None = None,
        repetition_penalty: float | None = None,
        num_return_sequences: int | None = None,
        streamer: "BaseStreamer | None" = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue the prompts; return them with their padding and what follows: (B, T) -> (B, T + new).

        Every argument means what it means in transformers; its other arguments raise a TypeError here. The model's own
        generation_config is not read: the defaults are 20 new tokens, greedy; with `do_sample`, temperature 1 and top_k
        50. A prompt padded on the right continues from its last real token. No text exceeds the target's context.

        Args:
            input_ids: (B, T)
            generation_config: gives those of the other arguments that are None; one that sets others is refused.
            attention_mask: (B, T) 0 where there is padding, on either side; None takes pad tokens for padding, unless
                they are stop tokens too.
            max_length: `max_new_tokens` + T; where both are given, `max_new_tokens` holds.
            eos_token_id: stop tokens; the target's by default, [] for none.
            pad_token_id: fills finished texts; by default the tokenizer's, or else a stop token.
            streamer: for one prompt, given its tokens as they are accepted.
            generator: on the CPU, for drawing; or give a `seed`.

        Raises:
            TypeError: input_ids is not a tensor.
            ValueError: input_ids of another shape or dtype, a number outside its range, or a mask with holes.
        """
        if generation_config is not None:
            arguments = dict(locals())
            given = {name: arguments[name] for name in _CONFIGURED if arguments[name] is not None}
            given |= {"streamer": streamer, "generator": generator, "seed": seed}
            options = _read_config(generation_config, given)
            return self.generate(input_ids, attention_mask=attention_mask, **options)
        _check_tokens(input_ids)
        if seed is not None:
            if generator is not None:
                raise ValueError("seed and generator are both given: choose one")
            generator = torch.Generator().manual_seed(seed)
        if (copies := 1 if num_return_sequences is None else num_return_sequences) != 1:
            if copies < 1 or not do_sample:
                raise ValueError(f"num_return_sequences is {copies}; it must be 1, or more with do_sample=True")
            input_ids = input_ids.repeat_interleave(copies, 0)
            attention_mask = None if attention_mask is None else attention_mask.repeat_interleave(copies, 0)
        chats, ends = self.target.chat.stops, token_ids(eos_token_id, "eos_token_id")
        stops = chats if eos_token_id is None else frozenset(ends)
        pads = [*token_ids(pad_token_id, "pad_token_id"), *token_ids(self.tokenizer.pad_token_id)]
        pad = next(iter([*pads, *ends, *sorted(chats), 0]))
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        sampling = _sampling(bool(do_sample), 1.0 if repetition_penalty is None else repetition_penalty, **options)
        is_padding = pad_token_id is not None or (pad == self.tokenizer.pad_token_id and pad not in chats)
        prompts = _unpadded(input_ids, attention_mask, pad if is_padding and pad not in stops else None)
        limit = _limit(max_new_tokens, max_length, input_ids.shape[1])
        watch = None
        if streamer is not None:
            if len(prompts) > 1:
                raise ValueError(f"streamer is for one prompt, and input_ids has {len(prompts)}")
            streamer.put(input_ids.cpu())

            def watch_stream(step: Progress) -> None:
                streamer.put(torch.tensor(step.tokens[0]))

            watch = watch_stream
        decoded = self.decoded = self.decoder.decode(prompts, limit, stops, sampling, generator, watch)
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
        if arguments.get("num_return_sequences") not in (None, 1):
            raise ValueError("num_return_sequences is for `generate`; a chat has one answer")
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        for number, message in enumerate(messages):
            if isinstance(message, dict) and message.get("content") is None and not message.get("tool_calls"):
                raise ValueError(f"message {number} has no content; give a text")
        prompt = self.target.chat.prompt([read_message(turn, f"message {i}") for i, turn in enumerate(messages)])
        config = arguments.get("generation_config")
        of_config = set() if config is None else config.to_diff_dict().keys() & {"max_new_tokens", "max_length"}
        if max_new_tokens is None and arguments.get("max_length") is None and not of_config:
            max_new_tokens = ANSWER_TOKENS
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        output = self.generate(**inputs, max_new_tokens=max_new_tokens, **arguments)
        return self.target.chat.text(output[0, len(prompt) :].tolist())


# What a generation config may set; any other field is refused, as it would have no effect.
_CONFIGURED = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p")
_CONFIGURED += ("eos_token_id", "pad_token_id", "repetition_penalty", "num_return_sequences")
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_ONES = ("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale")  # 1 asks nothing
# Prefixes of fields that change no token here: caches, compilation, assistants and beams.
_MEANINGLESS = ("transformers_version", "bos_token", "decoder_start", "_from", "use_cache", "cache_", "max_cache_len")
_MEANINGLESS += ("compile_", "disable_compile", "low_memory", "prefill_chunk", "assistant_", "num_assistant")
_MEANINGLESS += ("prompt_lookup", "max_matching_ngram", "length_penalty", "early_stopping", "renormalize_logits")


def _read_config(config: "GenerationConfig", given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a generation config sets, overridden by those `given`.

    As in transformers, the config's temperature and the like hold only where tokens are drawn.
    """
    fields = config.to_diff_dict()
    if not (fields | given).get("do_sample"):
        fields = {name: value for name, value in fields.items() if name not in _DRAWING}
    for name in [name for name in fields if name not in _CONFIGURED]:
        value = fields.pop(name)
        if name.startswith(_MEANINGLESS):
            continue
        if isinstance(value, Tensor) or (value and not (value == 1 and name in _ONES)):
            raise ValueError(
                f"generation_config sets {name} to {value!r}, which is not done here: leave it out; this reads "
                f"{', '.join(_CONFIGURED)}"
            )
    return fields | given


def _check_tokens(input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids is a {type(input_ids).__name__}; give token ids, model.tokenizer(text, "
            'return_tensors="pt").input_ids, or ask model.chat(text)'
        )
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
        kind = f"{tuple(input_ids.shape)} of {input_ids.dtype}"
        raise ValueError(f"input_ids is {kind}; it must be (B, T) token ids, at least one of each")


def _limit(new: int | None, total: int | None, length: int) -> int:
    """Return how many new tokens a prompt of `length` may have."""
    if new is None and total is not None and total <= length:
        raise ValueError(f"max_length is {total} and the prompt has {length} tokens: it must be longer, by what is new")
    return new if new is not None else NEW_TOKENS if total is None else total - length


def _sampling(do_sample: bool, repetition_penalty: float, **options: Any) -> Sampling:
    """Return how tokens are drawn, with transformers' defaults; one that has no effect without drawing is refused."""
    given = {name: value for name, value in options.items() if value is not None}
    if not do_sample and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name} is {value}, which has no effect without do_sample=True")
    usual = {"temperature": 1.0, "top_k": 50} if do_sample else {}
    return Sampling(**(usual | given), repetition_penalty=repetition_penalty)


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
