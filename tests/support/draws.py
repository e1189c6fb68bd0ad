"""What drafts gain that see the noise of a draw: the same drawn texts, replayed by both rules.

    python -m tests.support.draws OUT --temperature 1.0     writes OUT/records.jsonl.gz and OUT/run.json

The target draws each text once, by plain decoding. Then rounds are drafted along it, as `poss replay` does: `chain`,
`16` and `60` see the noise of the text; `chain-blind` and so on are the published rule, which drafts the most likely
tokens whatever is drawn. `--scales 1.5` adds `16-x1.5`, which scores nodes by `log_softmax((l + T g) / 1.5)`.
`poss compare OUT --reference 60-blind` prints τ and the paired difference.
"""

import argparse
import gzip
import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from tqdm import tqdm

from poss_lightning.decoding import drafting
from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.drafting import Drafter, top_log_probs
from poss_lightning.decoding.trees import ancestor_mask, rerank
from poss_lightning.decoding.verification import judge
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import describe, provenance
from poss_lightning.evaluation.records import Record, to_line
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.files import atomic
from poss_lightning.sampling import Sampling, TokenSampler
from poss_lightning.target.model import Target

TREES = {"chain": (6, 7, 1), "16": (6, 16, 4), "60": (6, 60, 10)}  # depth, nodes, tree width
BLIND = "-blind"
UNKNOWN = -2  # the token behind the end of a text: no draft proposes it


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def rounds(drafter: Drafter, sampler: TokenSampler | None, text: list[int], features: torch.Tensor, start: int, nodes):
    """What each round accepts of a text that begins at `start`; rounds that it does not show whole are left out.

    Args:
        sampler: of this text; None for the published rule.
        features: (T, D), the target's after each token.
    """
    depth, accepted, root = drafter.depth, [], start
    tokens = torch.tensor([text + [UNKNOWN] * (depth + 2)])
    drafter.start(1, len(text) + depth + 2)
    drafter.append_context(tokens[:, 1 : root + 1], features[None, :root], torch.tensor([root]))
    drafter.slots.advance_host([root])
    while root + depth < len(text):
        noise = sampler and sampler.noise(torch.arange(root + 1, root + depth + 2)[None])
        tree = rerank(drafter.draft_tree(Fixed(depth, nodes), noise), nodes)
        ancestors = ancestor_mask(tree.parents, depth)
        places = (root + ancestors.sum(-1)).clamp(max=tokens.shape[1] - 1)
        verdict = judge(tree, ancestors, tokens.gather(1, places), depth)
        accepted.append(int(verdict.accepted))
        step = accepted[-1] + 1
        if root + step >= len(text):
            break
        drafter.append_context(verdict.tokens[:, :step], features[None, root : root + step], torch.tensor([step]))
        drafter.slots.advance_host([step])
        root += step
    return accepted


def rules(tree: str, sampler: TokenSampler | None, scales: list[float]) -> list[tuple[str, TokenSampler | None, float]]:
    """Names of methods, what they see, and the scale of their scores, on which no chain depends."""
    scaled = [] if tree == "chain" else [(f"{tree}-x{scale}", sampler, scale) for scale in scales]
    return [(tree, sampler, 1.0), (tree + BLIND, None, 1.0), *scaled]


def scaled_log_probs(logits, count, noise=None, scale: float = 1.0):
    if scale == 1:
        return top_log_probs(logits, count, noise)
    return top_log_probs((logits.float() + noise) / scale, count)


@torch.inference_mode()
def drawn_text(target: Target, prompt: list[int], limit: int, sampling: Sampling, seed: int):
    """Prompt and answer, and the target's features after each token (T, D)."""
    (decoded,) = Autoregressive(target).decode([prompt], limit, sampling=sampling, generator=seeded(seed))
    text = prompt + decoded.tokens
    return text, target.text_features(torch.tensor([text], device=target.device))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", default="embedded-hass")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--limit", type=int, help="questions of each suite")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scales", type=float, nargs="*", default=[], help="others than 1 that are tried")
    options = parser.parse_args()
    target, sampling = Target.load("embedded", device="cpu"), Sampling(options.temperature)
    draft = Specialists.from_pretrained(options.draft).to(target.dtype).eval()
    drafters = {name: Drafter(draft, target.embed_head, depth, width) for name, (depth, _, width) in TREES.items()}
    records = []
    for number, question in enumerate(tqdm(read_suites(None, options.limit), unit="question")):
        prompt, seed = (
            target.chat.prompt([{"role": "user", "content": question.turns[0]}]),
            options.seed * 1000 + number,
        )
        text, features = drawn_text(target, prompt, options.max_new_tokens, sampling, seed)
        sampler = TokenSampler(1, target.spec.vocab_size, target.device)
        sampler.begin(sampling, [prompt], seeded(seed))
        for name, drafter in drafters.items():
            for method, sees, scale in rules(name, sampler, options.scales):
                with patch.object(drafting, "top_log_probs", partial(scaled_log_probs, scale=scale)):
                    accepted = rounds(drafter, sees, text, features, len(prompt), TREES[name][1])
                said = text[len(prompt) :][: 1 + sum(count + 1 for count in accepted)]
                facts = {"suite": question.suite, "id": question.id, "turn": 0, "method": method, "repeat": 0}
                facts |= {"seed": options.seed, "prompt_tokens": len(prompt), "new_tokens": len(said), "seconds": {}}
                records.append(Record(**facts, accepted=accepted, tokens=said, text=""))
    methods = {
        method: {"depth": depth, "nodes": nodes, "tree_width": width, **describe(draft)}
        for name, (depth, nodes, width) in TREES.items()
        for method, *_ in rules(name, None, options.scales)
    }
    config = {name: value for name, value in vars(options).items() if name != "out"}
    config |= {"target": target.spec.name, "fingerprint": target.spec.fingerprint, "dtype": target.dtype_name}
    facts = {"command": sys.argv, "config": config, "methods": methods, **provenance(target.device)}
    options.out.mkdir(parents=True, exist_ok=True)
    with atomic(options.out / "run.json") as path:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    with atomic(options.out / "records.jsonl.gz") as path:
        path.write_bytes(gzip.compress("".join(f"{to_line(record)}\n" for record in records).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
