"""The loop: draft, verify, judge, commit. The one object that holds caches while decoding."""

import copy
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from poss_lightning.clock import Clock, Timer
from poss_lightning.decoding import costs
from poss_lightning.decoding.acceptance import HostRow, Round
from poss_lightning.decoding.active import ActiveRows
from poss_lightning.decoding.auto import AutoPlans, Key
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.decoder import Decoder, Progress, Request, new_token_limits
from poss_lightning.decoding.drafter import Drafter, make_drafter
from poss_lightning.decoding.lookup import Lookup, LookupAlone, join
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import Tree, ancestor_mask, rerank
from poss_lightning.decoding.verification import Verdict, judge
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.prepack import prepack
from poss_lightning.sampling import Noise, TokenSampler
from poss_lightning.target_model.generation import OutputTracker, pad_right, prefill
from poss_lightning.target_model.graphs import Graphs
from poss_lightning.target_model.model import Target
from poss_lightning.terminal import announced

logger = logging.getLogger(__name__)
_VERIFY = WeakKeyDictionary[nn.Module, dict[Hashable, dict[int, float]]]()  # seconds, shared by all drafts of a target
CPU_WIDTH = 4  # of trees under `tree: auto` on a CPU, at most: it verifies few nodes, and each child tried takes time
COSTS_LENGTH = 512  # shorter texts have the same costs; those of longer ones are measured per doubling


class Speculative(Decoder):
    """Lossless speculative decoding: in exact arithmetic its tokens are those of plain decoding, greedy or drawn.

    An object decodes one batch at a time. The seconds in which `tree: auto` measures are reported beside the total.

    Args:
        target: the frozen model.
        drafter: what proposes; `from_draft` makes that of a draft.
        plan: the trees of rounds; by default `auto`, as deep as the drafter's longest path.
        graphs: run rounds as CUDA graphs; None does so where the target can.

    Raises:
        ValueError: the plan is deeper than the drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        plan: TreePlan | None = None,
        graphs: bool | None = None,
    ):
        plan = plan or TreePlan()
        depth = drafter.depth if plan.depth is None else plan.depth
        plan = replace(plan, depth=depth)
        if depth > drafter.depth:
            raise ValueError(f"depth is {depth}, and the drafter's {drafter.depth}; it must not be deeper")
        if plan.tree == "auto" and target.device.type == "cpu":
            plan = replace(plan, tree_width=min(plan.tree_width, CPU_WIDTH))
        self.target, self.drafter, self.plan = target, drafter, plan
        limit = target.by_position and target.by_position.limit(plan.nodes + plan.lookup, plan.reach + 1)
        self.exact = target.exact and not limit
        if limit:
            logger.warning("text may differ from plain decoding where rounding breaks a tie: exact are %s", limit)
        self.lookup = Lookup(plan.lookup)
        self.matches: dict[int, int] = {}  # tokens that matched in the next lookup, by prompt
        self.auto = AutoPlans(plan, target.device) if plan.tree == "auto" else None
        self.cache, self.active = target.new_cache(0, 0), ActiveRows(0, target.device)  # none, until `_prefill`
        self.root = torch.zeros(0, 1, dtype=torch.long, device=target.device)  # (B, 1) the newest tokens
        self.sampler = TokenSampler(0, target.spec.vocab_size, target.device)
        self.request_id = 0  # of the texts in hand
        self.graphs = Graphs(target.device, graphs, target.has_graphs)

    @classmethod
    def from_draft(
        cls, target: Target, draft: DraftModel | None, plan: TreePlan | None = None, graphs: bool | None = None
    ) -> "Speculative":
        """Make an engine that drafts with a copy of specialists, in the target's dtype and on its device.

        Without a draft it proposes looked-up tokens alone.

        Raises:
            ValueError: the draft was trained for a different target, or the tree is impossible.
        """
        plan = plan or TreePlan()
        if draft is None:
            return cls(target, LookupAlone(), replace(plan, depth=0, nodes=1, tree_width=1), graphs)
        if difference := draft.config.target.difference(target.spec):
            raise ValueError(f"the draft was trained for a different target: {difference}")
        draft = copy.deepcopy(draft).to(target.device, target.dtype).eval()
        prepack(draft)
        drafter = make_drafter(draft, target.embed_head, plan)
        return cls(target, drafter, drafter.plan, graphs)

    @torch.inference_mode()
    def rounds(self, request: Request, clock: Clock) -> Iterator[Progress]:
        """See `Decoder`."""
        limits = new_token_limits(self.target, request.prompts, request.limit)
        outputs = OutputTracker(limits, request.stops)
        with clock.part("prefill"):
            first = self._prefill(request, max(limits))
        self.request_id = request_id = self.request_id + 1
        began = Progress({prompt: outputs.append(prompt, [token])[0] for prompt, token in enumerate(first)})
        if outputs.active and self.auto:  # may measure, before text is shown
            self._drop_finished(outputs)
            self.auto.begin(request.sampling, self._key(), self._measure, clock)
        yield began
        while outputs.active:
            if self.request_id != request_id:
                raise RuntimeError("this engine has started on other prompts: it decodes one batch at a time")
            self._drop_finished(outputs)
            plan = self._choose_plan()
            done, host_copy = self._round(plan, clock)
            rows = self._learn(done, [HostRow.of(row) for row in host_copy.tolist()])  # the one synchronisation
            emitted = {prompt: outputs.append(prompt, row.tokens) for prompt, row in rows.items()}
            tokens = {prompt: taken for prompt, (taken, _) in emitted.items()}
            accepted = {prompt: count for prompt, (_, count) in emitted.items()}
            yield Progress(tokens, accepted, done.tree, done.verdict)

    # --- one round ---

    def _choose_plan(self) -> TreePlan:
        matches = [self.matches[self.active.prompts[row]] for row in self.active.rows]
        return self.auto.choose(self._key(), matches) if self.auto else self.plan

    def _learn(self, done: Round, rows: list[HostRow]) -> dict[int, HostRow]:
        """Let the host follow a round, and `tree: auto` learn from it; the active rows, by prompt."""
        active = self.active.rows
        self.cache.slots.advance_host([row.accepted + 1 if i in active else 0 for i, row in enumerate(rows)])
        if self.auto:
            self.auto.learn(done, self.active.mask)
        of_prompt = {self.active.prompts[row]: rows[row] for row in active}
        self.matches = {prompt: row.matched for prompt, row in of_prompt.items()}
        return of_prompt

    def _round(self, plan: TreePlan, clock: Clock) -> tuple[Round, Tensor]:
        """Run one round of all rows, of which inactive ones do not advance; and a `HostRow` each: (B, 2 + K+1)."""
        slots, lookup = self.cache.slots, self.lookup
        lookup_state = [lookup.text, lookup.continuation, lookup.matched]
        state = [slots.lengths, self.root, self.sampler.in_text, *lookup_state, *self.drafter.state()]
        key = (slots.extent_for(0), plan, self.sampler.kind)
        return self.graphs.run(key, partial(self._draft_verify_commit, plan), state, clock)

    def _draft_verify_commit(self, plan: TreePlan, part: Timer) -> tuple[Round, Tensor]:
        lookup, depth = self.lookup, plan.reach
        # The five steps of docs/METHOD.md, 6.
        with part("draft"):
            noise = self._noise(depth)
            noise.first(depth + 1)  # at once: fewer kernels
            candidates = self.drafter.draft(self.root, plan, noise)  # 1. draft
            tree = join(rerank(candidates, plan.nodes), lookup.continuation[:, : plan.lookup])  # 2. re-rank
            looked_up = (lookup.matched.clone(), lookup.continuation.clone()) if self.plan.lookup else ()
        with part("verify"):
            ancestors = ancestor_mask(tree.parents, depth)
            draft_input, logits = self._verify(tree, ancestors)  # 3. verify: (B, N, R), (B, N, V)
        with part("commit"):
            choice = self._choose(tree, ancestors, logits, noise.first(depth + 1))
            verdict = judge(tree, ancestors, choice, depth)  # 4. judge
            self._commit(verdict, draft_input)  # 5. commit
            host_copy = torch.cat([verdict.accepted[:, None], lookup.matched[:, None], verdict.tokens], dim=1)
        return Round(tree, ancestors, verdict, candidates, plan.lookup, *looked_up), host_copy

    def _verify(self, tree: Tree, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the draft's input and the target's logits after each node."""
        return self.target.verify(tree.tokens, ancestors, self.cache, self.drafter.layers, self.exact)

    def _noise(self, depth: int) -> Noise:
        """Return the noise of the next `depth` + 1 places."""
        root = self.cache.slots.lengths
        return Noise(self.sampler, root[:, None] + torch.arange(1, depth + 2, device=root.device))

    def _choose(self, tree: Tree, ancestors: Tensor, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Choose the target's token after each node: (B, N)."""
        in_text = self.sampler.in_text_after(tree.tokens, ancestors)
        return self.sampler.choose(logits, noise, ancestors.sum(-1) - 1, in_text)

    def _commit(self, verdict: Verdict, draft_input: Tensor) -> None:
        """Keep the accepted path in both caches and its tokens in the texts."""
        counts = (verdict.accepted + 1) * self.active.mask
        if self.plan.lookup:
            self.lookup.append(verdict.tokens, self.cache.slots.lengths)
            self.lookup.look(self.cache.slots.lengths + counts)
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
                cache.slots.min_extent = max(room, cache.slots.min_extent)
        self.active.reset()
        self.sampler.begin(sampling, prompts, generator)
        first = self.sampler.next(target.logits(last), cache.slots.lengths)
        self.root.copy_(first[:, None])
        host_copy = first.tolist()
        texts = pad_right([[*prompt, token] for prompt, token in zip(prompts, host_copy, strict=True)], target.device)
        drafter.append_context(texts[:, 1:], draft_input, cache.slots.lengths)
        self.lookup.start(texts, cache.slots.capacity)
        if self.plan.lookup:
            self.lookup.look(cache.slots.lengths)
        self.matches = dict(enumerate(self.lookup.matched.tolist()))
        return host_copy

    def _drop_finished(self, outputs: OutputTracker) -> None:
        """Count only unfinished prompts; without graphs, finished rows are dropped once they are half of the batch."""
        if (rows := self.active.update(outputs.active, may_drop=not self.graphs.enabled)) is not None:
            for part in (self.cache, self.drafter, self.sampler, self.active, self.lookup):
                part.select(rows)
            self.root = self.root[rows]

    def _key(self) -> Key:
        doublings = (self.cache.slots.longest // COSTS_LENGTH).bit_length()
        return len(self.active.prompts), doublings, self.sampler.sampling.steps

    def _measure(self, again: bool) -> Costs:
        """Time draft steps, and verification with its choice of tokens; what a different draft timed only `again`."""
        plan, reach = self.plan, self.plan.reach
        candidates, noise = self.drafter.draft(self.root, plan), self._noise(reach).first(reach + 1)

        def verify(nodes: int) -> Callable[[], object]:
            tree = rerank(candidates, min(nodes, plan.nodes))
            tree = join(tree, tree.tokens.new_full((len(self.root), nodes - tree.tokens.shape[1]), -1))

            def work() -> Tensor:
                ancestors = ancestor_mask(tree.parents, reach)
                return self._choose(tree, ancestors, self._verify(tree, ancestors)[1], noise)

            return partial(self.graphs.run_alone, ("timed", nodes), work)

        draft = partial(self.graphs.run_alone, ("timed", 0), partial(self.drafter.draft, self.root, plan))
        shared = _VERIFY.setdefault(self.target.model, {}).setdefault((self._key(), self.graphs.enabled), {})
        with announced("timing draft steps and verification"):
            steps, max_nodes = getattr(self.drafter, "steps", self.drafter.depth), plan.nodes + plan.lookup
            measured = costs.measure(draft, steps, verify, max_nodes, self.target.device, {} if again else shared)
        self.graphs.clear()
        shared |= {n: min(seconds, shared.get(n, seconds)) for n, seconds in measured.verify.items()}  # noise adds time
        return measured._replace(verify=shared)
