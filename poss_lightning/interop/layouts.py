"""Published layouts as data: what their files call our tensors, and what such a file can and cannot hold.

As ours, they join [embed(x_{t+1}); f_t] along fc's inputs in this order, turn queries and keys by halves, and have no
norm before attention (SafeAILab/EAGLE, eagle/model/cnets1.py; shrango/PosS, HASS/model/cnets_agent_layer_gen.py).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.target.spec import Ends, TargetSpec

NAMES = {  # ours -> theirs
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "layers.{}.q_proj.weight": "layers.{}.self_attn.q_proj.weight",
    "layers.{}.k_proj.weight": "layers.{}.self_attn.k_proj.weight",
    "layers.{}.v_proj.weight": "layers.{}.self_attn.v_proj.weight",
    "layers.{}.o_proj.weight": "layers.{}.self_attn.o_proj.weight",
    "layers.{}.norm.weight": "layers.{}.post_attention_layernorm.weight",
    "layers.{}.gate_proj.weight": "layers.{}.mlp.gate_proj.weight",
    "layers.{}.up_proj.weight": "layers.{}.mlp.up_proj.weight",
    "layers.{}.down_proj.weight": "layers.{}.mlp.down_proj.weight",
}
ABSENT = ("fc.bias",)  # may be missing: zeros
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # the target's; may be there


@dataclass(frozen=True)
class Layout:
    """How one kind of file holds a draft.

    Args:
        several: whether it holds several layers, each of which serves so many positions; else one layer.
        depth: passes that its drafts are trained for; None for the sum of the allocation.
        architecture: what its config.json names.
        names: of the tensors, ours -> theirs.
        embedding: whether its readers want the target's embedding in the file.
        bias: where fc's bias stands: in "fc" if it is not all zeros, in "fc" "always", or in the biases of "attention".
        even: whether its readers take it that a head is as wide as hidden_size / heads.
        token_map: whether a smaller vocabulary has a place beside it.
    """

    several: bool = False
    depth: int | None = 1
    architecture: str = "LlamaForCausalLM"
    names: tuple[tuple[str, str], ...] = tuple(NAMES.items())
    embedding: bool = True
    bias: str = "fc"
    even: bool = True
    token_map: bool = False

    def named(self, layers: int) -> dict[str, str]:
        """Ours -> theirs, for a draft of so many layers."""
        return {ours.format(i): theirs.format(i) for i in range(layers) for ours, theirs in self.names}

    def layers(self, tensors: Iterable[str]) -> int:
        """How many layers a file has, by its tensors' names: up to the last of which there is anything."""
        names = "|".join(re.escape(theirs).replace(r"\{\}", r"(\d+)") for _, theirs in self.names if "{}" in theirs)
        found = [re.fullmatch(names, name) for name in tensors]
        return max((int(match[match.lastindex]) + 1 for match in found if match), default=0)


LAYOUTS = {
    "eagle": Layout(),
    "hass": Layout(depth=3),
    "poss": Layout(several=True, depth=None),
    "vllm": Layout(embedding=False, bias="attention", even=False),
    "sglang": Layout(architecture="LlamaForCausalLMEagle", embedding=False, bias="always", even=False, token_map=True),
}


class Draft(NamedTuple):
    """What a folder of ours holds, every tensor in the dtype it was stored in."""

    config: DraftConfig
    state: dict[str, Tensor]


def to_ours(tensors: dict[str, Tensor], config: DraftConfig, layout: Layout) -> Draft:
    """Rename a published file's tensors; what is the target's is left out.

    Raises:
        ValueError: a tensor is missing, unknown, misshapen or not of floats; the message names it.
    """
    names = layout.named(len(config.allocation))
    given = {name: tensor for name, tensor in tensors.items() if name not in (EMBEDDING, HEAD)}
    if missing := [theirs for ours, theirs in names.items() if theirs not in given and ours not in ABSENT]:
        raise ValueError(f"{missing[0]} is missing" + _more(missing))
    if unknown := sorted(given.keys() - names.values()):
        raise ValueError(f"{unknown[0]} has no place in this layout" + _more(unknown))
    with torch.device("meta"):
        expected = Specialists(config).state_dict()
    state = {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    for ours, tensor in state.items():
        if tensor.shape != expected[ours].shape or not tensor.is_floating_point():
            raise ValueError(
                f"{names[ours]} is {tensor.dtype} {list(tensor.shape)}; it must be floats {list(expected[ours].shape)}"
            )
    state.setdefault("fc.bias", torch.zeros(config.target.hidden_size, dtype=state["fc.weight"].dtype))
    return Draft(config, state | {"scale": torch.ones(2 * config.target.hidden_size)})


def check_frozen(tensors: dict[str, Tensor], ends: Ends) -> None:
    """Raise ValueError where a file brings an embedding or a head that is not the target's, in the file's dtype."""
    for name, own in ((EMBEDDING, ends.embedding), (HEAD, ends.head)):
        if name not in tensors:
            continue
        if tensors[name].shape != own.shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)}; the target's is {list(own.shape)}")
        if differing := (tensors[name] != own.to(tensors[name].dtype)).any(1).sum().item():
            raise ValueError(
                f"{name} is not the target's: {differing} of {len(own)} rows differ; is it another target?"
            )


def check_config(given: dict[str, Any], spec: TargetSpec) -> None:
    """Raise ValueError where a published config.json says something that the target, from which we take it, does not.

    What it leaves out is what the published code takes then (eagle/model/configs.py).
    """
    rotary = given.get("rope_parameters") or given
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    heads = given.get("num_attention_heads")
    for name, value, own in (
        ("hidden_size", given.get("hidden_size"), spec.hidden_size),
        ("vocab_size", given.get("vocab_size"), spec.vocab_size),
        ("num_attention_heads", heads, spec.heads),
        ("num_key_value_heads", given.get("num_key_value_heads") or heads, spec.kv_heads),
        ("head_dim", given.get("head_dim") or spec.hidden_size // spec.heads, spec.head_dim),
        ("rms_norm_eps", given.get("rms_norm_eps", 1e-6), spec.norm_eps),
        ("rope_theta", rotary.get("rope_theta", 10000.0), spec.rope_theta),
        ("rope_scaling", kind, "default"),
        ("hidden_act", given.get("hidden_act", "silu"), "silu"),
    ):
        if not _same(value, own):
            raise ValueError(f"config.json: {name} is {value!r}; a draft of ours for {spec.name} has {own!r}")
    if not isinstance(width := given.get("intermediate_size"), int):
        raise ValueError(f"config.json: intermediate_size is {width!r}; it must be the width of a layer's MLP")


def check_holds(config: DraftConfig, layout: Layout) -> None:
    """Raise ValueError where a draft of ours computes what a layout cannot say."""
    spec, layers, run = config.target, len(config.allocation), config.allocation[0]
    positions = range(1, sum(config.allocation) + 1)
    if layers > 1 and not layout.several:
        raise ValueError(f"it has {layers} specialists and this layout one layer; --to poss takes several")
    if any(config.serving(k) != min((k - 1) // run, layers - 1) for k in positions):
        raise ValueError(
            f"allocation {list(config.allocation)} with order {config.order}: in this layout each specialist serves as "
            "many positions as the first, one after another, and the last goes on"
        )
    if layers > 1 and config.kv == "shared":
        raise ValueError("its specialists share keys and values (kv: shared), those of this layout do not")
    if config.vocabulary_size is not None and not layout.token_map:
        raise ValueError(
            "it proposes a smaller vocabulary, and this layout asks the whole head; `poss vocabulary DRAFT CORPUS OUT "
            "--size null` gives it back"
        )
    if (spec.logit_scale, spec.logit_cap) != (1.0, None):
        raise ValueError("its target scales or caps logits, and this layout's head does not")
    if layout.even and spec.heads * spec.head_dim != spec.hidden_size:
        raise ValueError(
            f"its target's heads are {spec.head_dim} wide; this layout's readers take hidden_size / heads, "
            f"{spec.hidden_size // spec.heads}"
        )


def to_theirs(draft: Draft, layout: Layout, ends: Ends) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A published file's tensors and its config.json.

    The scale of fc's inputs goes into its weights, each product rounded once to their dtype: exact where the scale is a
    power of two, and so where it is 1; else drafts differ by that rounding.
    """
    state, spec = draft.state, draft.config.target
    weight, bias = state["fc.weight"], state["fc.bias"]
    folded = (weight.float() * state["scale"].float()).to(weight.dtype)
    state = state | {"fc.weight": folded}
    biased = layout.bias == "always" or (layout.bias == "fc" and bool(bias.any()))
    moved = layout.bias == "attention" and bool(bias.any())
    names = layout.named(len(draft.config.allocation))
    tensors = {theirs: state[ours] for ours, theirs in names.items() if ours != "fc.bias" or biased}
    if moved:
        tensors |= attention_biases(state)
    if layout.embedding:
        tensors[EMBEDDING] = ends.embedding.to(weight.dtype)
    config = {
        "architectures": [layout.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": draft.config.intermediate_size or spec.intermediate_size,
        "max_position_embeddings": spec.context,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,  # that a token passes through: PosS' readers are told how many there are
        "rms_norm_eps": spec.norm_eps,
        "rope_scaling": None,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": ends.tied,
        "torch_dtype": str(weight.dtype).removeprefix("torch."),
        "vocab_size": spec.vocab_size,
    }
    # EAGLE reads "bias" as fc's, and takes true where there is none; vLLM and SGLang read it as attention's.
    return tensors, config | ({"attention_bias": True} if moved else {} if biased else {"bias": False})


def attention_biases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """fc's bias b as biases of the first layer's attention, for readers whose fc has none.

    No norm stands between: for queries, keys, values W (z + b) = W z + W b; for the residual (z + b) + o = z + (o + b).
    """
    bias = state["fc.bias"]
    made = {name: state[f"layers.0.{name}.weight"].double() @ bias.double() for name in ("q_proj", "k_proj", "v_proj")}
    return {
        f"layers.0.self_attn.{name}.bias": value.to(bias.dtype) for name, value in (made | {"o_proj": bias}).items()
    }


def _same(a: Any, b: Any) -> bool:
    floats = isinstance(a, float) and isinstance(b, float)
    return a == b or (floats and isclose(a, b, rel_tol=1e-6))  # a target read from a GGUF file has them in float32


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
