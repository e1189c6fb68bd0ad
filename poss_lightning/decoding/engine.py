"""The loop: draft, verify, judge, commit. The one object that holds caches while decoding."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from poss_lightning.clock import Clock, Timer
from poss_lightning.decoding import costs
from poss_lightning.decoding.active import ActiveRows
from poss_lightning.decoding.blocks import make_drafter
from poss_lightning.decoding.budget import Budget, Fixed, PerRound, Settled
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.decoder import Decoder, Progress, Request, new_token_limits
from poss_lightning.decoding.drafter import Drafter
from poss_lightning.decoding.lookup import Lookup, LookupAlone, join
from poss_lightning.decoding.plans import Plan
from poss_lightning.decoding.rounds import Calibration, Round
from poss_lightning.decoding.trees import Tree, ancestor_mask, rerank
from poss_lightning.decoding.verification import Verdict, judge
from poss_lightning.draft.specialists import Specialists
from poss_lightning.prepack import prepack
from poss_lightning.sampling import Noise, Sampling, TokenSampler
from poss_lightning.target.generation import OutputTracker, pad_right, prefill
from poss_lightning.target.graphs import Graphs
from poss_lightning.target.model import Target
from poss_lightning.terminal import announced

logger = logging.getLogger(__name__)
COSTS_LENGTH = 512  # shorter texts have the same costs; those of longer ones are measured per doubling


class Speculative(Decoder):
    """Lossless speculative decoding: in exact arithmetic its tokens are those of plain decoding, greedy or drawn.

    An object decodes one batch at a time. `tree: auto` measures once per size of batch and doubling of the texts'
    length, and once more where drafting then did not pay; those seconds are reported as `measure` and not in the total.

    Args:
        target: the frozen model.
        drafter: what proposes; `from_draft` makes that of a draft.
        plan: the tree of every round; by default the drafter's longest path.
        tree: "fixed" follows the plan in every round; "auto" measures this machine before the first text, and then
            drafts and verifies, within the plan, what brings the most tokens per second: round by round on a CPU, and
            on CUDA, where the host must not wait, with sizes that it settles on, and reconsiders now and then.
        graphs: run rounds as CUDA graphs; None does so where the target can.

    Raises:
        ValueError: the plan is deeper than the drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        plan: Plan | None = None,
        tree: Literal["fixed", "auto"] = "fixed",
        graphs: bool | None = None,
    ):
        plan = plan or Plan()
        plan = replace(plan, depth=drafter.depth) if plan.depth is None else plan
        if tree not in ("fixed", "auto"):
            raise ValueError(f"tree is {tree!r}; it must be fixed or auto")
        if plan.depth > drafter.depth:
            raise ValueError(f"depth is {plan.depth}, and the drafter's {drafter.depth}; it must not be deeper")
        self.target, self.drafter, self.plan, self.tree = target, drafter, plan, tree
        self.fixed, self.lookup = Fixed(plan), Lookup(plan.lookup)
        # By rows of the batch, doublings of the texts' length, and what choosing a token takes.
        self.measured: dict[tuple[int, int, tuple[bool, ...]], Costs] = {}
        self.confirmed: set[tuple[int, int, tuple[bool, ...]]] = set()  # measured again, as drafting did not pay
        self.budgets: dict[tuple[int, Sampling], PerRound | Settled] = {}  # by rows and by what a draft is good at
        self.budget: Budget = self.fixed  # of the text in hand
        self.cache, self.active = target.new_cache(0, 0), ActiveRows(0, target.device)  # none, until `_prefill`
        self.root = torch.zeros(0, 1, dtype=torch.long, device=target.device)  # (B, 1) the newest tokens
        self.sampler = TokenSampler(0, target.spec.vocab_size, target.device)
        self.request_id = 0  # of the texts in hand
        self.graphs = Graphs(target.device, graphs, target.has_graphs)

    @classmethod
    def from_draft(
        cls,
        target: Target,
        draft: Specialists | None,
        plan: Plan | None = None,
        tree: Literal["fixed", "auto"] = "fixed",
        graphs: bool | None = None,
    ) -> "Speculative":
        """An engine that drafts with a copy of specialists, in the target's dtype and on its device.

        Args:
            draft: None for lookups alone.
            plan: its depth is the sum of the draft's allocation by default.

        Raises:
            ValueError: the draft was trained for a different target, or the tree is impossible.
        """
        plan = plan or Plan()
        if draft is None:
            return cls(target, LookupAlone(), Plan(0, 1, 1, plan.lookup), tree, graphs)
        if difference := draft.config.target.difference(target.spec):
            raise ValueError(f"the draft was trained for a different target: {difference}")
        draft = copy.deepcopy(draft).to(target.device, target.dtype).eval()
        prepack(draft)
        drafter = make_drafter(draft, target.embed_head, plan)
        return cls(target, drafter, drafter.plan, tree, graphs)

    @property
    def costs(self) -> Costs | None:
        """What `tree: auto` first measured for a text that is decoded alone; None where it did not."""
        return next((costs for (rows, *_), costs in self.measured.items() if rows == 1), None)

    @property
    def why_plain(self) -> str | None:
        """Why `tree: auto` stopped drafting the last texts, in a line; None where it did not."""
        return self.budget.why_plain()

    @torch.inference_mode()
    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """See `Decoder`."""
        limits = new_token_limits(self.target, request.prompts, request.limit)
        outputs = OutputTracker(limits, request.stops)
        with clock.part("prefill"):
            first = self._prefill(request, max(limits))
        self.request_id = request_id = self.request_id + 1
        began = Progress({prompt: outputs.append(prompt, [token])[0] for prompt, token in enumerate(first)})
        if outputs.active:
            self._drop_finished(outputs)
            self._choose_budget(request.sampling, clock, begins=True)  # may measure, before text is shown
        yield began
        while outputs.active:
            if self.request_id != request_id:
                raise RuntimeError("this engine has started on other prompts: it decodes one batch at a time")
            self._drop_finished(outputs)
            budget = self._choose_budget(request.sampling, clock)
            budget.begin(self.active.rows)
            done, host_copy = self._round(budget, clock)
            emitted = host_copy.tolist()  # the one synchronisation
            counts = [row[0] + 1 if i in self.active.rows else 0 for i, row in enumerate(emitted)]
            self.cache.slots.advance_host(counts)
            budget.learn(done)
            of_row = {self.active.prompts[row]: emitted[row][1 : emitted[row][0] + 2] for row in self.active.rows}
            counted = {prompt: outputs.append(prompt, new) for prompt, new in of_row.items()}
            tokens = {prompt: kept for prompt, (kept, _) in counted.items()}
            accepted = {prompt: count for prompt, (_, count) in counted.items()}
            yield Progress(tokens, accepted, done.tree, done.verdict)

    # --- one round ---

    def _round(self, budget: Budget, clock: Clock) -> tuple[Round, Tensor]:
        """One round of all rows; inactive ones do not advance, and their output means nothing.

        Returns:
            What it did; and (B, 1 + K+1), what the host must know: accepted, then the tokens emitted.
        """
        if budget.needs_sync:
            return self._draft_verify_commit(budget, clock.part)
        slots = self.cache.slots
        state = [slots.lengths, self.root, self.sampler.in_text, self.lookup.text, *self.drafter.state()]
        key = (slots.extent_for(0), budget.plan, self.sampler.kind)
        return self.graphs.run(key, partial(self._draft_verify_commit, budget), state, clock)

    def _draft_verify_commit(self, budget: Budget, part: Timer) -> tuple[Round, Tensor]:
        depth, _, most = budget.plan or (self.plan.depth, 0, self.plan.lookup)
        depth, found, path, looked_up = max(depth, most), None, None, 0
        with part("draft"):
            noise = self._noise(depth)
            if not budget.needs_sync:  # at once: fewer kernels
                noise.first(depth + 1)
            tree = self.drafter.draft(self.root, budget, noise)
            if most:
                path, found = self.lookup.find(self.cache.slots.lengths)
                looked_up = budget.lookup_count(found, most)
                tree = join(tree, path[:, :looked_up])
        with part("verify"):
            ancestors = ancestor_mask(tree.parents, depth)
            draft_input, logits = self._verify(tree, ancestors)
        with part("commit"):
            deepest = int(ancestors.sum(-1).max()) - 1 if budget.needs_sync else depth
            choice = self._choose(tree, ancestors, logits, noise.first(deepest + 1))
            verdict = judge(tree, ancestors, choice, depth)
            self._commit(verdict, draft_input)
            host_copy = torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1)
        return Round(tree, ancestors, verdict, found, path, looked_up), host_copy

    def _verify(self, tree: Tree, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """The draft's input (B, N, R) and the target's logits (B, N, V) after each node."""
        layers = self.drafter.layers
        features, draft_input = self.target.forward_tree(tree.tokens, ancestors, self.cache, layers)
        return draft_input, self.target.logits(features)

    def _noise(self, depth: int) -> Noise:
        """The noise of the next `depth` + 1 places."""
        root = self.cache.slots.lengths
        return Noise(self.sampler, root[:, None] + torch.arange(1, depth + 2, device=root.device))

    def _choose(self, tree: Tree, ancestors: Tensor, logits: Tensor, noise: Tensor | None) -> Tensor:
        """The target's token after each node: (B, N)."""
        in_text = self.sampler.in_text_after(tree.tokens, ancestors)
        return self.sampler.choose(logits, noise, ancestors.sum(-1) - 1, in_text)

    def _commit(self, verdict: Verdict, draft_input: Tensor) -> None:
        """Keep the accepted path in both caches and its tokens in the texts."""
        counts = (verdict.accepted + 1) * self.active.mask
        if self.plan.lookup:
            self.lookup.append(verdict.tokens, self.cache.slots.lengths)
        on_path = draft_input.gather(1, verdict.path[..., None].expand(-1, -1, draft_input.shape[-1]))  # (B, K+1, R)
        self.cache.keep_path(verdict.path, counts)
        self.drafter.append_context(verdict.tokens, on_path, counts)
        self.root.copy_(verdict.tokens.gather(1, verdict.accepted[:, None]))
        self.sampler.append(verdict.tokens)

    # --- between rounds ---

    def _prefill(self, request: Request, limit: int) -> list[int]:
        """Read the prompts into both caches; the first token of each."""
        drafter, target = self.drafter, self.target
        prompts, _, _, sampling, generator = request
        reach = limit + 2 * (self.plan.reach + 1)  # the last round may verify, and write, a path beyond the limit
        room = max(self.plan.nodes + self.plan.lookup, drafter.room)
        cache, draft_input, last = prefill(target, prompts, reach + room, self.cache, drafter.layers)
        drafter.start(cache.slots)
        if cache is not self.cache:  # the captured graphs read other tensors
            self.graphs.clear()
            self.cache, self.active = cache, ActiveRows(len(prompts), target.device)
            self.sampler = TokenSampler(len(prompts), target.spec.vocab_size, target.device)
            self.root = self.root.new_zeros(len(prompts), 1)
            if self.graphs.enabled:  # one extent for all work of a round
                cache.slots.min_extent = room
        self.active.reset()
        self.sampler.begin(sampling, prompts, generator)
        first = self.sampler.next(target.logits(last), cache.slots.lengths)
        self.root.copy_(first[:, None])
        host_copy = first.tolist()
        texts = pad_right([[*prompt, token] for prompt, token in zip(prompts, host_copy, strict=True)], target.device)
        drafter.append_context(texts[:, 1:], draft_input, cache.slots.lengths)
        if self.plan.lookup:
            self.lookup.start(texts, cache.slots.capacity)
        return host_copy

    def _drop_finished(self, outputs: OutputTracker) -> None:
        """Only unfinished prompts count; without graphs, finished rows are dropped once they are half of the batch."""
        if (kept := self.active.update(outputs.active, may_drop=not self.graphs.enabled)) is not None:
            for part in (self.cache, self.drafter, self.sampler, self.active, self.lookup):
                part.select(kept)
            self.root = self.root[kept]

    def _choose_budget(self, sampling: Sampling, clock: Clock, begins: bool = False) -> Budget:
        """The budget of the next round. Costs of a new length are measured where texts begin, not within them."""
        if self.tree == "auto":
            batch, device, kind = len(self.active.prompts), self.target.device, sampling.steps
            doublings = (self.cache.slots.longest // COSTS_LENGTH).bit_length()
            known = [each for rows, each, how in self.measured if (rows, how) == (batch, kind) and each <= doublings]
            key, used = (batch, doublings, kind), self.budgets.get((batch, sampling))
            doubted = begins and used and key in self.measured and key not in self.confirmed and used.why_plain()
            if begins and (doublings not in known or doubted):
                with clock.excluded("measure"):
                    costs = self._measure()
                if doubted:  # what else was running may have taken the time, so the draft gets another chance
                    costs = costs.least(self.measured[key])
                    self.confirmed.add(key)
                    del self.budgets[batch, sampling]
                self.measured[key] = costs
                known.append(doublings)
            if not known:  # some rows were dropped, and so few were never measured
                return self.budget
            costs = self.measured[batch, max(known), kind]
            if (batch, sampling) not in self.budgets:
                auto = Settled if device.type == "cuda" else PerRound
                made = auto(self.plan.depth, self.plan.nodes, costs, Calibration(device), self.plan.lookup)
                self.budgets[batch, sampling] = made
            self.budget = budget = self.budgets[batch, sampling]
            budget.costs = costs
        return self.budget

    def _measure(self) -> Costs:
        """Time draft steps, and verification with its choice of tokens; the next round overwrites what they write."""
        logger.info("tree: auto times draft steps and verification on this machine, some seconds")
        candidates, reach = self.drafter.draft(self.root, self.fixed), self.plan.reach
        noise = self._noise(reach).first(reach + 1)

        def verify(nodes: int) -> Callable[[], object]:
            tree = rerank(candidates, min(nodes, self.plan.nodes))
            looked_up = torch.full_like(tree.tokens[:, :1], -1).expand(-1, nodes - tree.tokens.shape[1])
            tree = join(tree, looked_up)

            def work() -> Tensor:
                ancestors = ancestor_mask(tree.parents, reach)
                return self._choose(tree, ancestors, self._verify(tree, ancestors)[1], noise)

            return repeatable(nodes, work)

        def repeatable(name: int, work: Callable[[], object]) -> Callable[[], object]:
            return partial(self.graphs.run_alone, ("timed", name), work)

        draft = repeatable(0, partial(self.drafter.draft, self.root, self.fixed))
        with announced("timing draft steps and verification"):
            sizes = self.plan.nodes, self.target.device, self.plan.lookup
            measured = costs.measure(draft, getattr(self.drafter, "steps", self.drafter.depth), verify, *sizes)
        self.graphs.clear()
        return measured
