"""What longer memories would bring to prompt lookup: τ along the target's own answers, without decoding.

    python experiments/lookup/memory.py runs/lab/dev-layers

At every place of every answer, a draft proposes a tree and each memory a path. A tree that holds both accepts the
longer match. So the rounds of all combinations follow from these matches. Answers come in the order of the store, and
earlier ones are the memory of later ones:

    text          the text itself, as the engine looks it up
    +earlier      also all earlier texts: the longest match first, then the latest
    +successors   also the chain of the target's most likely successors of each token, as it was last read anywhere
                  (token recycling, arXiv 2408.08696, with one candidate per token)
    +leaf         what the text has after the draft's own best path, below that path
"""

import argparse

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from poss_lightning.decoding.budget import Fixed
from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP, Lookup
from poss_lightning.decoding.trees import Tree, rerank
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.stored import Answer, find_answers
from poss_lightning.features.store import FeatureStore
from poss_lightning.reports.statistics import Jackknife, compare_means, interval, leave_one_out, mean_over
from poss_lightning.target.spec import EmbedHead

DEPTH, NODES, TREE_WIDTH = 6, 16, 4
METHODS = {  # what is in the tree
    "text": ("text",),
    "text+earlier": ("earlier",),
    "text+successors": ("text", "successors"),
    "draft": ("draft",),
    "draft+text": ("draft", "text"),
    "draft+text+earlier": ("draft", "earlier"),
    "draft+text+successors": ("draft", "text", "successors"),
    "draft+text+leaf": ("draft", "text", "leaf"),
}


def match(path: list[int], following: list[int]) -> int:
    """How many tokens of a path are the text's next ones."""
    pairs = enumerate(zip(path, following, strict=False))
    return next((i for i, (ours, own) in pairs if ours != own), min(len(path), len(following)))


def match_tree(tree: Tree, following: list[int]) -> int:
    """How many of the text's next tokens a tree holds as a path."""
    (tokens,), (parents,) = tree.tokens.tolist(), tree.parents.tolist()
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True)) if i}
    node = 0
    for depth, token in enumerate(following):
        if (node := children.get((node, token), -1)) < 0:
            return depth
    return len(following)


def best_path(tree: Tree) -> list[int]:
    """The most likely child of the root, its most likely child, and so on."""
    tokens, parents, scores, path, node = *(part[0].tolist() for part in tree), [], 0
    while children := [i for i, parent in enumerate(parents) if i and parent == node]:
        path.append(tokens[node := max(children, key=scores.__getitem__)])
    return path


def drafted(drafter: Drafter, answer: Answer) -> tuple[list[int], list[int]]:
    """Drafted tokens that would be accepted at each place of an answer, and the best path's length where all are."""
    tokens, read = answer.tokens[None], answer.draft_input[None].to(drafter.draft.fc.weight)
    budget, found, whole, start = Fixed(DEPTH, NODES), [], [], answer.start
    drafter.start(1, tokens.shape[1] + DEPTH + 1)
    drafter.append_context(tokens[:, 1 : start + 1], read[:, :start], torch.tensor([start]))
    drafter.slots.advance_host([start])
    for place in range(start, tokens.shape[1] - 1):
        tree = rerank(drafter.draft_tree(budget), NODES)
        following, path = tokens[0, place + 1 :].tolist(), best_path(tree)
        found.append(match_tree(tree, following))
        whole.append(len(path) if match(path, following) == len(path) else 0)
        drafter.append_context(tokens[:, place + 1 : place + 2], read[:, place : place + 1], torch.tensor([1]))
        drafter.slots.advance_host([1])
    return found, whole


def looked_up(text: Tensor, begin: int, answer: Answer) -> list[int]:
    """Tokens that would be accepted at each place, where `text` holds earlier texts and, from `begin`, this one."""
    lookup, found = Lookup(DEFAULT_LOOKUP), []
    lookup.start(text[None], len(text) + DEFAULT_LOOKUP)
    for place in range(begin + answer.start, len(text) - 1):
        path, _ = lookup.find(torch.tensor([place]))
        found.append(match(path[0].tolist(), text[place + 1 :].tolist()))
    return found


def recycled(table: dict[int, int], successors: list[int], answer: Answer) -> list[int]:
    """The same for chains of successors; the table learns what the target says as it reads."""
    tokens, found = answer.tokens.tolist(), []
    for place in range(len(tokens) - 1):
        if place >= answer.start:
            path, token = [], tokens[place]
            while len(path) < DEFAULT_LOOKUP and token in table:
                path.append(token := table[token])
            found.append(match(path, tokens[place + 1 :]))
        table[tokens[place]] = successors[place]
    return found


def rounds_of(matches: list[int]) -> tuple[int, int]:
    """Rounds of an answer, and the tokens they give, up to its end."""
    place = count = 0
    while place < len(matches):
        place, count = place + matches[place] + 1, count + 1
    return count, len(matches)


def tau(rounds: list[tuple[int, int]]) -> Jackknife:
    count, tokens = np.array(rounds).T
    left = leave_one_out(len(count))
    return Jackknife((left @ tokens) / (left @ count), count > 0)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--draft", default="embedded-hass")
    options = parser.parse_args()
    draft = load_draft(options.draft).eval()
    store = FeatureStore(options.store).select(draft.config.aux_layers)
    head: EmbedHead = store.embed_head().to("cpu", torch.float32)
    drafter = Drafter(draft, head, DEPTH, TREE_WIDTH)
    earlier, table = torch.zeros(0, dtype=torch.long), dict[int, int]()
    rounds: dict[str, list[tuple[int, int]]] = {name: [] for name in METHODS}
    for i in tqdm(range(len(store)), unit="text"):
        for answer in find_answers(store[i], head):
            if len(answer.tokens) - answer.start < 2:
                continue
            text = torch.cat([earlier, answer.tokens])
            successors = head.logits(answer.features.float()).argmax(-1).tolist()
            accepted, whole = drafted(drafter, answer)
            own = looked_up(answer.tokens, 0, answer)
            matches = {
                "draft": accepted,
                "text": own,
                "leaf": [n + own[i + n] if n and i + n < len(own) else 0 for i, n in enumerate(whole)],
                "earlier": looked_up(text, len(earlier), answer),
                "successors": recycled(table, successors, answer),
            }
            for name, parts in METHODS.items():
                rounds[name].append(rounds_of([max(each) for each in zip(*map(matches.get, parts), strict=True)]))
            earlier = text
    print(f"{len(rounds['text'])} answers, {sum(tokens for _, tokens in rounds['text'])} tokens; τ (micro)")
    for reference in ("text", "draft+text"):
        names = [name for name in METHODS if name.startswith(reference)]
        compared = compare_means({name: mean_over([tau(rounds[name])], [tau(rounds[reference])]) for name in names[1:]})
        for name in names:
            against = compared[name].with_interval("+.3f") if name in compared else ""
            print(f"{name:24} {interval(mean_over([tau(rounds[name])])).with_interval()}   {against}")
    print(f"{'draft':24} {interval(mean_over([tau(rounds['draft'])])).with_interval()}")


if __name__ == "__main__":
    main()
