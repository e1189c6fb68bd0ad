"""Published layouts as data: what their files call our tensors, and which drafts such a file can express.

EAGLE, HASS and PosS, as ours, join [embed(x_{t+1}); f_t] along fc's inputs in this order and have no norm before
attention (SafeAILab/EAGLE, eagle/model/cnets1.py; shrango/PosS, HASS/model/cnets_agent_layer_gen.py). EAGLE-3, as ours,
joins [norm(embed(x_{t+1})); norm(h_t)] for attention in this order, and fuses outputs of inner layers from low to high
(SafeAILab/EAGLE, eagle/model/cnets.py). SPEED is EAGLE-3 with a layer for each run of positions, all reading one cache
(shrango/PosS, specforge/specforge/modeling/draft/llama3_poss_eagle.py). The format of the library speculators
(`speculators.py`) is EAGLE-3 with one numbered layer. DFlash is kind block (z-lab/dflash, dflash/model.py). All of them
rotate queries and keys by halves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from poss_lightning.draft import folder
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
NORMS = {"input_norm": "input_layernorm", "hidden_norm": "hidden_norm"}
HEAD_NORMS = {"input_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
NAMES = {  # by kind of draft, ours -> theirs: outside the layers, and within one
    "eagle2": ({"fc": "fc"}, LAYER),
    "eagle3": ({"fc": "fc", "norm": "norm", "lm_head": "lm_head"}, LAYER | NORMS),
    "block": ({"fc": "fc", "norm": "norm", "context_norm": "hidden_norm"}, LAYER | HEAD_NORMS),
}
BIAS = "fc.bias"  # of EAGLE-2's drafts; zeros where a file lacks it
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # the target's; a file may have them
TO_TARGET, TO_DRAFT = "d2t", "t2d"  # EAGLE-3's smaller vocabulary
NUMBERED = "layers.0.hidden_norm.weight"  # of EAGLE-3's layers alone: SPEED, speculators and ModelOpt number them


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one kind of file holds a draft."""

    kind: Kind = "eagle2"
    layer: str = "layers.{}"  # prefix of the names of a layer's tensors
    several: bool = False  # whether it has several layers, each of which serves some positions
    kv: Literal["separate", "shared"] = "separate"  # as in `DraftConfig`, where it has several layers
    depth: int | None = 1  # passes that its drafts are trained for; None for the sum of the allocation
    architecture: str = "LlamaForCausalLM"  # the name in its config.json
    embedding: bool = True  # whether the loading code needs the target's embedding in the file
    bias: Literal["fc", "always", "attention"] = "fc"  # where fc's bias is: there unless all zeros, always, moved
    vocabulary: Literal["d2t", "token_map"] | None = None  # a smaller one's place: tensors, or a file of its own
    knows: tuple[str, ...] = ()  # fields of `DraftConfig` that are off by default and that its code reads
    states_draft: bool = False  # whether its config.json holds ours, and so any allocation and kv
    nested: bool = False  # whether its config.json is that of the library speculators

    def number_names(self, config: DraftConfig) -> dict[str, str]:
        """Map our names of a draft's tensors to theirs."""
        outside, within = NAMES[self.kind]
        names = outside | {
            f"layers.{i}.{ours}": f"{self.layer.format(i)}.{theirs}"
            for i in range(config.layer_count)
            for ours, theirs in within.items()
        }
        if config.norm_before_fc:
            names["fc_norm.0"] = "input_norm"
        elif config.fc_norm:
            names |= {name: name for name in (f"fc_norm.{i}" for i in range(config.input_norms))}
        weights = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}
        return weights | ({BIAS: BIAS} if self.kind == "eagle2" else {})

    def count_layers(self, tensors: Iterable[str]) -> int:
        """Count the layers in a file with tensors of these names."""
        if "{}" not in self.layer:
            return 1
        return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


METHODS = {"eagle2": "eagle", "eagle3": "eagle3", "block": "dflash"}  # of vLLM's --speculative-config, by kind
ANGLES = ("rope_scaling",)
LAYERS = (*ANGLES, "inner_layers")
VLLM = (*LAYERS, *SWITCHES)  # what its EAGLE-3 code reads
EAGLE3 = Layout(
    kind="eagle3",
    layer="midlayer",
    depth=7,
    architecture="LlamaForCausalLMEagle3",  # ignored by EAGLE's own code, known to vLLM and SGLang
    embedding=False,
    vocabulary="d2t",
)
SPEED = replace(EAGLE3, layer="layers.{}", several=True, depth=None, kv="shared")
DFLASH = Layout(kind="block", depth=None, architecture="DFlashDraftModel", embedding=False, knows=LAYERS)
ENGINE = Layout(embedding=False, knows=ANGLES)  # EAGLE-2's single layers in vLLM and SGLang
LAYOUTS = {  # by what a file is called
    "eagle": Layout(),
    "hass": Layout(depth=3),
    "poss": Layout(several=True, depth=None),
    "eagle3": EAGLE3,
    "speed": SPEED,
    # Its class takes the target's embedding only where it finds NaN, and transformers may leave any numbers there.
    "speculators": replace(
        EAGLE3,
        layer="layers.{}",
        architecture="Eagle3DraftModel",
        embedding=True,
        knows=(*VLLM, "window"),
        nested=True,
    ),
    "dflash": DFLASH,
}
ENGINES = {  # layouts of drafts that engines load by themselves, by kind; the last two as they are published
    "vllm": {
        "eagle2": replace(ENGINE, bias="attention"),
        "eagle3": replace(EAGLE3, knows=VLLM),
        "block": DFLASH,
    },
    "sglang": {
        "eagle2": replace(ENGINE, architecture="LlamaForCausalLMEagle", bias="always", vocabulary="token_map"),
        "eagle3": replace(EAGLE3, knows=(*LAYERS, "fc_norm", "norm_output")),
        "block": DFLASH,
    },
}
# What serving/vllm_model.py loads into vLLM, by kind: what vLLM's own code has no place for.
POSS = folder.SERVED
SERVED = {
    "eagle2": replace(
        ENGINE, several=True, depth=None, architecture=POSS, bias="always", vocabulary="d2t", states_draft=True
    ),
    "eagle3": replace(SPEED, architecture=POSS, knows=VLLM, states_draft=True),
}


def find_layout(output_format: str, config: DraftConfig) -> Layout:
    """Return the layout that an output format names for a draft.

    vLLM loads several specialists, and a smaller vocabulary of an EAGLE-2 draft, through our plugin.
    """
    smaller = config.kind == "eagle2" and config.vocabulary_size is not None
    if output_format == "vllm" and (len(config.allocation) > 1 or smaller):
        return SERVED[config.kind]
    return ENGINES[output_format][config.kind] if output_format in ENGINES else LAYOUTS[output_format]


def refuse(*reasons: tuple[bool, str]) -> None:
    """Raise ValueError with the message of the first reason that holds."""
    if message := next((message for holds, message in reasons if holds), None):
        raise ValueError(message)


def check_expressible(config: DraftConfig, layout: Layout) -> None:
    """Raise ValueError where a layout cannot express what a draft of ours computes."""
    spec, runs = config.target, config.allocation
    fields: dict[str, tuple[Any, Any]] = {"kind": (config.kind, layout.kind)}  # in the draft; in every such file
    for name in (*SWITCHES, "rope_scaling", "window", "inner_layers"):
        if name not in layout.knows:
            fields[name] = getattr(config, name), getattr(DraftConfig, name)
    if not layout.several:
        fields["number of specialists"] = len(runs), 1
    elif len(runs) > 1 and not layout.states_draft:
        fields["allocation"] = [*runs], [runs[0]] * (len(runs) - 1) + [runs[-1]]
        fields["kv"] = config.kv, layout.kv
    if layout.vocabulary is None:
        fields["vocabulary_size"] = config.vocabulary_size or spec.vocab_size, spec.vocab_size
    if not config.own_head:
        fields |= {"target's logit_scale": (spec.logit_scale, 1.0), "target's logit_cap": (spec.logit_cap, None)}
    if layout.kind == "eagle2" and layout.embedding:  # EAGLE's own code assumes it
        fields["target's head_dim"] = spec.head_dim, spec.hidden_size // spec.heads
    for name, (ours, theirs) in fields.items():
        if ours != theirs:
            raise ValueError(f"the draft's {name} is {ours}; in this output_format it must be {theirs}")
    check_layers(config)


def check_layers(config: DraftConfig) -> None:
    """Raise ValueError where published code would read other layers of the target: it takes them in ascending order."""
    layers = list(config.aux_layers)
    reason = (
        f"it fuses layers {layers} of {config.target.layers}; published code takes ascending layers, and EAGLE-3's "
    )
    refuse((layers != sorted({*layers}), reason + "three need a target of 7 layers or more"))
