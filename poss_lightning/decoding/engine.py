"""The loop: draft, verify, judge, commit. The one object that holds caches while sequences are decoded."""

import copy
import logging
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from poss_lightning.decoding.budget import MEASURED, Auto, Budget, Calibration, Costs, Fixed
from poss_lightning.decoding.decoder import Clock, Decoder, Progress, Request, Texts, check_room
from poss_lightning.decoding.drafting import Drafter
from poss_lightning.decoding.graphs import Graphs
from poss_lightning.decoding.trees import Tree, ancestors, rerank, share
from poss_lightning.decoding.verification import Verdict, judge
from poss_lightning.draft.specialists import Specialists
from poss_lightning.machine import best_seconds
from poss_lightning.sampling import GREEDY, Chooser
from poss_lightning.target.cache import Packed, TreeCache
from poss_lightning.target.generation import pad, prefill
from poss_lightning.target.model import Target

logger = logging.getLogger(__name__)
MEASURING = 3.0  # seconds after which `tree: auto` times nothing once more
SHARE = 4  # a row may have so many times its share of a batch's nodes


class Round(NamedTuple):
    """One round of a batch, on the device."""

    tree: Tree
    above: Tensor  # (B, N, N) its ancestors
    verdict: Verdict
    told: Tensor  # (B, 1 + K+1) what the host must know: accepted, then the tokens emitted


class Speculative(Decoder):
    """Lossless speculative decoding: in exact arithmetic its tokens are those of plain decoding, greedy or drawn.

    An object decodes one batch at a time. The seconds in which `tree: auto` measures, once for every size of batch, are
    told as `measure` and not in the total: they are paid once, whatever is decoded then.

    Args:
        target: the frozen model.
        draft: the specialists that propose; a copy of them is turned to the target's dtype and device.
        depth: draft positions K, at most; None for the depth of the draft's allocation.
        nodes: nodes of a tree, root included, at most.
        top_k: children tried a node; 1 drafts a chain.
        tree: "fixed" has all its depth and nodes in every round; "auto" measures this machine when it first decodes,
            and then drafts and verifies what brings the most tokens a second: round by round on a CPU, and on CUDA,
            where the host must not wait, with one depth and size that it settles on.
        share: spend the nodes of a batch where they are likeliest to be accepted, whichever row they are in, instead of
            as many on every row.
        graphs: run rounds as CUDA graphs; None where there is CUDA, unless processors must be asked.
        compile: compile the draft step and the target's forward; takes minutes at first, and does not pay everywhere. A
            head is then not read in 8 bits: Inductor has no such product of weights that it does not own.
        int8_head: read the draft's head in 8 bits, which changes no output; None does so on a CPU where it is faster.

    Raises:
        ValueError: the draft was trained for another target, or the tree cannot be.
    """

    def __init__(
        self,
        target: Target,
        draft: Specialists,
        depth: int | None = None,
        nodes: int = 60,
        top_k: int = 10,
        tree: Literal["fixed", "auto"] = "fixed",
        share: bool = False,
        graphs: bool | None = None,
        compile: bool = False,
        int8_head: bool | None = None,
    ):
        if difference := draft.config.target.difference(target.spec):
            raise ValueError(f"the draft was trained for another target: {difference}")
        if tree not in ("fixed", "auto"):
            raise ValueError(f"tree is {tree!r}; it must be fixed or auto")
        draft = copy.deepcopy(draft).to(target.device, target.dtype).eval()
        self.target, self.tree = target, tree
        depth = sum(draft.config.allocation) if depth is None else depth
        int8_head = False if compile else int8_head
        self.drafter = Drafter(draft, target.ends, depth, top_k, int8_head)
        self.fixed = Fixed(self.drafter.depth, nodes)
        self.nodes = min(nodes, self.drafter.scored)
        self.share, self.most = share, min(SHARE * nodes if share else nodes, self.drafter.scored)  # nodes of a row
        self.calibration = Calibration(target.device)
        self.budgets: dict[int, Auto] = {}  # by the size of the batch
        self.cache: TreeCache | None = None
        self.law, self.turn = GREEDY, 0  # of the text in hand; which text that is
        self.graphs = Graphs(target.device.type == "cuda" if graphs is None else graphs)
        self.seen = partial(target.seen, layers=draft.config.layers)
        if compile:
            self.seen = torch.compile(self.seen, fullgraph=True)
            self.drafter.step = torch.compile(self.drafter.step, fullgraph=True)

    @torch.inference_mode()
    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """See `Decoder`."""
        limits = check_room(self.target, request.prompts, request.limit)
        texts = Texts(limits, request.stops)
        rows = list(range(len(limits)))  # the prompt of each row of the batch
        with clock.part("prefill"):
            first = self._prefill(request, max(limits))
        self.turn = turn = self.turn + 1
        yield Progress({prompt: texts.take(prompt, [token])[0] for prompt, token in enumerate(first)})
        while going := [row for row, prompt in enumerate(rows) if texts.left[prompt]]:
            if self.turn != turn:
                raise RuntimeError("this engine has begun with other prompts: it decodes one batch at a time")
            if 2 * len(going) <= len(rows):  # finished rows cost time: forget them now and then
                self._select(going)
                rows, going = [rows[row] for row in going], list(range(len(going)))
            budget = self._budget(len(rows), clock)
            budget.begin(going)
            done = self._round(budget, going, clock)
            told = done.told.tolist()  # the one synchronisation
            self._note([row[0] + 1 if i in going else 0 for i, row in enumerate(told)])
            budget.learn(done.tree, done.above, done.verdict)
            taken = {rows[i]: texts.take(rows[i], told[i][1 : told[i][0] + 2]) for i in going}
            tokens, accepted = ({p: each[part] for p, each in taken.items()} for part in (0, 1))
            yield Progress(tokens, accepted, done.tree, done.verdict)

    def _prefill(self, request: Request, limit: int) -> list[int]:
        """Read the prompts into both caches; the first token of each."""
        drafter, target = self.drafter, self.target
        prompts, _, _, sampling, generator = request
        reach = limit + 2 * (drafter.depth + 1)  # the last round may verify, and write, a path beyond the limit
        layers = drafter.draft.config.layers
        cache, read, last = prefill(target, prompts, reach + self.most, self.cache, layers)
        if cache is not self.cache:
            cache.slots.cover = self.most if self.graphs.enabled else 0
            self.cache, self.going = cache, torch.ones_like(cache.slots.length)
            self.graphs.forget()
        if sampling != self.law or sampling.temperature:  # what was captured speaks of another law, or other draws
            self.graphs.forget()
        self.law = sampling
        self.choose = Chooser(sampling, prompts, reach + drafter.depth, target.device, generator)
        first = self.choose(target.ends.logits(last), self.cache.slots.length).tolist()
        joined = pad([[*prompt[1:], token] for prompt, token in zip(prompts, first, strict=True)], target.device)
        drafter.start(len(prompts), self.cache.slots.capacity)
        drafter.read(joined, read, self.cache.slots.length)
        drafter.slots.note(self.cache.slots.lengths)
        self.going.fill_(1)
        self.counted = list(range(len(prompts)))
        return first

    def _round(self, budget: Budget, going: list[int], clock: Clock) -> Round:
        """One round of all rows; those not `going` stay where they are, and what they emit means nothing."""
        if self.counted != going:
            counted = [int(row in going) for row in range(len(self.going))]
            self.going.copy_(torch.tensor(counted))
            self.counted = going
        if not self.graphs.enabled or self.choose.asks or budget.asks:
            return self._act(budget, clock)
        state = [self.cache.slots.length, self.drafter.slots.length, self.drafter.root, self.drafter.root_z]
        key = (self.cache.slots.reach(self.most), self.drafter.slots.reach(self.drafter.room), budget.plan)
        with clock.part("round"):
            return self.graphs.run(key, lambda: self._act(budget, clock), state)

    def _act(self, budget: Budget, clock: Clock) -> Round:
        drafter = self.drafter
        with clock.part("draft"):
            grown = drafter.grow(budget)
            tree, packed = self._prune(grown, budget.size(grown.scores))
        with clock.part("verify"):
            above = ancestors(tree.parents, drafter.depth)
            read, logits = self._verify(tree, above, packed)
        with clock.part("commit"):
            where = _where(tree, packed)
            verdict = judge(tree, logits, where, self.choose, self.cache.slots.length + 1, drafter.depth)
            counts = (verdict.accepted + 1) * self.going
            taken = read[where.gather(1, verdict.path)]  # (B, K+1, R)
            self.cache.keep(verdict.path, counts)
            drafter.read(verdict.tokens, taken, counts)
        return Round(tree, above, verdict, torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1))

    def _prune(self, grown: Tree, nodes: int) -> tuple[Tree, Packed | None]:
        """The trees to verify, of so many nodes, or of so many on average; then also which these are."""
        if not self.share or len(grown.tokens) == 1:
            return rerank(grown, nodes), None
        return share(rerank(grown, min(SHARE * nodes, self.most)), nodes * len(grown.tokens), self.going)

    def _verify(self, tree: Tree, above: Tensor, packed: Packed | None) -> tuple[Tensor, Tensor]:
        """What the draft reads (M, R) and logits (M, V) after all nodes, row by row, or after those that are packed."""
        features, read = self.seen(tree.tokens, above, self.cache, packed)
        return read.flatten(0, 1), self.target.ends.logits(features.flatten(0, 1))

    def _note(self, counts: list[int]) -> None:
        """Tell the host's copies of the lengths."""
        self.cache.slots.note(counts)
        self.drafter.slots.note(counts)

    def _select(self, rows: list[int]) -> None:
        """Forget every row of the batch but `rows`."""
        for part in (self.cache, self.drafter, self.choose):
            part.select(rows)
        self.going, self.counted = self.going[rows], list(range(len(rows)))  # all of them go on
        self.graphs.forget()

    def _budget(self, batch: int, clock: Clock) -> Budget:
        if self.tree == "fixed":
            return self.fixed
        if batch not in self.budgets:
            with clock.outside("measure"):
                self.budgets[batch] = self._measure()
        return self.budgets[batch]

    @property
    def costs(self) -> Costs | None:
        """What `tree: auto` measured for texts that are decoded alone; None where it did not."""
        return self.budgets[1].costs if 1 in self.budgets else None

    def _measure(self) -> Auto:
        """Time draft steps and verification here and now; what they write, the next round overwrites."""
        drafter = self.drafter
        whole = drafter.grow(self.fixed)

        def verify(tree: Tree, packed: Packed | None) -> None:
            self._verify(tree, ancestors(tree.parents, drafter.depth), packed)

        logger.info("tree: auto times draft steps and verification on this machine, some seconds")
        sizes = [*(n for n in MEASURED if n < self.nodes), self.nodes]
        verifying = {n: partial(verify, *self._prune(whole, n)) for n in sizes}
        works = {0: partial(drafter.grow, self.fixed), **verifying}
        if self.graphs.enabled:
            works = {n: partial(self.graphs.run, ("timed", n), work, []) for n, work in works.items()}
        seconds = best_seconds(works, device=self.target.device, enough=MEASURING)
        self.graphs.forget()
        costs = Costs.measured(seconds.pop(0) / drafter.depth, seconds)
        asks = self.target.device.type != "cuda"
        return Auto(drafter.depth, self.nodes, costs, self.calibration, asks)


def _where(tree: Tree, packed: Packed | None) -> Tensor:
    """(B, N) the place of every node among those verified; 0 for one that is not."""
    if packed is None:
        return torch.arange(tree.tokens.numel(), device=tree.tokens.device).view_as(tree.tokens)
    places = torch.arange(len(packed.rows), device=tree.tokens.device)
    return torch.zeros_like(tree.tokens).index_put(tuple(packed), places)
