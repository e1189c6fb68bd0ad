"""Published layouts as data: what their files call our tensors, and which drafts such a file can express.

EAGLE, HASS and PosS, as ours, join [embed(x_{t+1}); f_t] along fc's inputs in this order and have no norm before
attention (SafeAILab/EAGLE, eagle/model/cnets1.py; shrango/PosS, HASS/model/cnets_agent_layer_gen.py). EAGLE-3, as ours,
joins [norm(embed(x_{t+1})); norm(h_t)] for attention in this order, and fuses outputs of inner layers from low to high
(SafeAILab/EAGLE, eagle/model/cnets.py). SPEED is EAGLE-3 with a layer for each run of positions, all reading one cache
(shrango/PosS, specforge/specforge/modeling/draft/llama3_poss_eagle.py). The format of the library speculators
(`speculators.py`) is EAGLE-3 with one numbered layer. DFlash is kind block (z-lab/dflash, dflash/model.py). All of them
rotate queries and keys by halves.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from poss_lightning.draft.config import SWITCHES, DraftConfig, Kind

LAYER = {  # ours -> theirs, within a layer
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
HEAD_NORMS = {"input_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
NORMS = {"input_norm": "input_layernorm", "hidden_norm": "hidden_norm"}

NAMES = {  # by kind of draft: tensors with the same name as ours, and the names within a layer
    "eagle2": (("fc.weight", "fc.bias"), LAYER),
    "eagle3": (("fc.weight", "norm.weight", "lm_head.weight"), LAYER | NORMS),
    "block": (("fc.weight", "norm.weight"), LAYER | HEAD_NORMS),
}
CONTEXT_NORM = ("context_norm.weight", "hidden_norm.weight")  # ours, theirs: of a block draft
FC_NORM, INPUT_NORM = "fc_norm.{}.weight", "input_norm.weight"  # ours, theirs: the same one a layer, or one for all
OPTIONAL = ("fc.bias",)  # zeros where it is missing
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # the target's; a file may have them
TO_TARGET, TO_DRAFT = "d2t", "t2d"  # EAGLE-3's smaller vocabulary
NUMBERED = "layers.0.hidden_norm.weight"  # files of SPEED and of speculators have this tensor, and no others have


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one kind of file holds a draft.

    Args:
        kind: of the drafts.
        layer: prefix of the names of a layer's tensors.
        several: whether it has several layers, each of which serves some positions; else one layer.
        kv: as in `DraftConfig`, where it has several layers.
        depth: passes that its drafts are trained for; None for the sum of the allocation.
        architecture: the name in its config.json.
        embedding: whether the loading code needs the target's embedding in the file.
        bias: where fc's bias is: in "fc" if it is not all zeros, in "fc" "always", or in the biases of "attention".
        even: whether the loading code assumes that a head is hidden_size / heads wide.
        vocabulary: where a smaller vocabulary is: in tensors "d2t" and "t2d", or in a "token_map" beside the file.
        knows: fields of `DraftConfig` that are usually off, which its code reads in its config.json.
        states_draft: whether its config.json holds ours, and so any allocation and kv.
        nested: whether its config.json is of the library speculators.
    """

    kind: Kind = "eagle2"
    layer: str = "layers.{}"
    several: bool = False
    kv: Literal["separate", "shared"] = "separate"
    depth: int | None = 1
    architecture: str = "LlamaForCausalLM"
    embedding: bool = True
    bias: str = "fc"
    even: bool = True
    vocabulary: str | None = None
    knows: frozenset[str] = frozenset()
    states_draft: bool = False
    nested: bool = False

    @property
    def names(self) -> dict[str, str]:
        """Ours -> theirs, with {} for a layer's number."""
        same, within = NAMES[self.kind]
        layer = {f"layers.{{}}.{ours}.weight": f"{self.layer}.{theirs}.weight" for ours, theirs in within.items()}
        return {name: name for name in same} | layer | dict([CONTEXT_NORM] if self.kind == "block" else [])

    @property
    def positions(self) -> int:
        """That a single layer serves in our config, where a file does not state it."""
        return 7 if self.kind == "eagle3" else 6

    def number_names(self, layers: int, input_norms: int = 0) -> dict[str, str]:
        """Ours -> theirs, for a draft with that many layers, and with so many norms of what it reads."""
        norms = {FC_NORM.format(i): FC_NORM.format(i) if input_norms > 1 else INPUT_NORM for i in range(input_norms)}
        return {ours.format(i): theirs.format(i) for i in range(layers) for ours, theirs in self.names.items()} | norms

    def count_layers(self, tensors: Iterable[str]) -> int:
        """How many layers a file has, from its tensors' names: up to the last layer with a tensor."""
        if "{}" not in self.layer:
            return 1
        matches = [re.match(self.layer.replace("{}", r"(\d+)") + r"\.", name) for name in tensors]
        return max((int(match[1]) + 1 for match in matches if match), default=0)


ANGLES = frozenset({"rope_scaling"})
VLLM = ANGLES | {*SWITCHES}  # what its EAGLE-3 code reads
EAGLE3 = Layout(
    kind="eagle3",
    layer="midlayer",
    depth=7,
    architecture="LlamaForCausalLMEagle3",  # ignored by EAGLE's own code, known to vLLM and SGLang
    embedding=False,
    even=False,
    vocabulary="d2t",
)
LAYOUTS = {  # by what a file is called; the engines' are of EAGLE-2's single layers
    "eagle": Layout(),
    "hass": Layout(depth=3),
    "poss": Layout(several=True, depth=None),
    "eagle3": EAGLE3,
    "speed": replace(EAGLE3, layer="layers.{}", several=True, depth=None, kv="shared"),
    # Its class takes the target's embedding only where it finds NaN, and transformers may leave any numbers there.
    "speculators": replace(
        EAGLE3,
        layer="layers.{}",
        architecture="Eagle3DraftModel",
        embedding=True,
        knows=VLLM | {"window"},
        nested=True,
    ),
    "dflash": Layout(
        kind="block", depth=None, architecture="DFlashDraftModel", embedding=False, even=False, knows=ANGLES
    ),
    "vllm": Layout(embedding=False, bias="attention", even=False, knows=ANGLES),
    "sglang": Layout(
        architecture="LlamaForCausalLMEagle",
        embedding=False,
        bias="always",
        even=False,
        vocabulary="token_map",
        knows=ANGLES,
    ),
}
ENGINES = {"vllm": VLLM, "sglang": ANGLES | {"fc_norm", "norm_output"}}  # what they read beside EAGLE-3's own code
# What serving/vllm_model.py loads into vLLM, by kind: what vLLM's own code has no place for.
POSS = "PossForCausalLM"
SERVED = {
    "eagle2": replace(
        LAYOUTS["vllm"],
        several=True,
        depth=None,
        architecture=POSS,
        bias="always",
        vocabulary="d2t",
        states_draft=True,
    ),
    "eagle3": replace(
        EAGLE3, layer="layers.{}", several=True, depth=None, architecture=POSS, knows=VLLM, states_draft=True
    ),
}


def find_layout(output_format: str, config: DraftConfig) -> Layout:
    """The layout that an output format names for a draft.

    Both engines load EAGLE-3 drafts as they are published. vLLM loads several specialists, and a smaller vocabulary of
    an EAGLE-2 draft, through our plugin.
    """
    smaller = config.kind == "eagle2" and config.vocabulary_size is not None
    if output_format == "vllm" and (len(config.allocation) > 1 or smaller):
        return SERVED[config.kind]
    if config.kind == "block" and output_format in ENGINES:  # both load it as it is published
        return LAYOUTS["dflash"]
    if config.kind == "eagle3" and output_format in ENGINES:
        return replace(EAGLE3, knows=ENGINES[output_format])
    return LAYOUTS[output_format]


def check_expressible(config: DraftConfig, layout: Layout) -> None:
    """Raise ValueError where a layout cannot express what a draft of ours computes."""
    spec, layers = config.target, len(config.allocation)
    if config.kind != layout.kind:
        takes = {"eagle2": "eagle, poss", "eagle3": "eagle3, speculators", "block": "dflash"}[config.kind]
        raise ValueError(
            f"its kind is {config.kind} and this layout's {layout.kind}; --output_format {takes} or vllm can express it"
        )
    for name in (*SWITCHES, "rope_scaling", "window"):
        if getattr(config, name) and name not in layout.knows:
            raise ValueError(f"it has {name}, which this layout's code does not know{_who_knows(name, config)}")
    if layers > 1 and not layout.several:
        others = "vllm" if config.kind == "eagle3" else "poss or vllm"
        raise ValueError(
            f"it has {layers} specialists and this layout one layer; --output_format {others} takes several"
        )
    if layers > 1 and not layout.states_draft:
        if len(set(config.allocation[:-1])) > 1:
            raise ValueError(
                f"its allocation is {list(config.allocation)}; in this layout each specialist serves as many positions "
                "as the first, one after another, and the last goes on"
            )
        if config.kv != layout.kv:
            raise ValueError(f"its kv is {config.kv}, and in this layout it is {layout.kv}")
    if config.vocabulary_size is not None and layout.vocabulary is None:
        raise ValueError(
            "it proposes a smaller vocabulary, and this layout uses the whole head; `poss export DRAFT OUT "
            f"--vocabulary_size {spec.vocab_size}` gives it back"
        )
    if not config.own_head and (spec.logit_scale, spec.logit_cap) != (1.0, None):
        raise ValueError("its target scales or caps logits, and this layout's head does not")
    if layout.even and spec.heads * spec.head_dim != spec.hidden_size:
        raise ValueError(
            f"its target's heads are {spec.head_dim} wide; this layout's code takes hidden_size / heads, "
            f"{spec.hidden_size // spec.heads}"
        )
    check_layers(config)


def _who_knows(name: str, config: DraftConfig) -> str:
    """The output formats for drafts of this kind that know a field, in words."""
    layouts = {output: find_layout(output, config) for output in LAYOUTS}
    known = [output for output, each in layouts.items() if each.kind == config.kind and name in each.knows]
    return f"; --output_format {' or '.join(known)} can express it" if known else ", nor any other"


def check_layers(config: DraftConfig) -> None:
    """Raise ValueError where code that loads EAGLE-3 files would take the outputs of other layers."""
    if list(config.layers) != sorted(set(config.layers)):
        raise ValueError(
            f"it fuses layers {list(config.layers)} of {config.target.layers}; published code takes ascending layers, "
            "and EAGLE-3's three need a target of 7 layers or more"
        )
