"""`poss generate`: one answer, as fast as the draft makes it."""

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import Specialists
from poss_lightning.target.model import Target


def generate(
    prompt: str,
    draft: str | None = None,
    target: str = "embedded",
    new_tokens: int = 256,
    depth: int | None = None,
    nodes: int = 60,
    top_k: int = 10,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> None:
    """Answer one prompt and say how fast it was.

    Args:
        prompt: what the user asks.
        draft: draft folder or hub id; without one the target decodes alone.
        target: "embedded", a local folder or a hub id.
        new_tokens: at most that many.
        depth: draft positions K; the draft's own (the sum of its allocation) by default.
        nodes: of a tree, root included.
        top_k: children tried a node; 1 drafts chains.
        dtype: bfloat16, float16 or float32.
        device: cpu or cuda.
    """
    loaded = Specialists.from_pretrained(draft) if draft else None
    model = Target.load(target, dtype, device)
    decoder = Speculative(model, loaded, depth, nodes, top_k) if loaded else Autoregressive(model)
    answer = decoder.decode([model.chat.prompt([{"role": "user", "content": prompt}])], new_tokens)[0]
    print(model.chat.text(answer.tokens))
    rate = len(answer.tokens) / answer.seconds["total"]
    length = f", {sum(answer.accepted) / len(answer.accepted) + 1:.2f} tokens a round" if answer.accepted else ""
    print(f"\n{len(answer.tokens)} tokens, {rate:.1f} a second{length}")
