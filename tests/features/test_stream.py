"""From samples to batches: what counts, noise, padding, the split, the schedule, and how Lightning drives them."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from poss_lightning.features.schedule import Loader, Schedule, pack_rows, split, stable_number
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import add_noise, answer_slots, collate, count_passes
from tests.support.tolerance import tolerance

LENGTHS = np.random.default_rng(0).integers(2, 40, 300)
SPANS = [np.array([[1, length]]) for length in LENGTHS]


def naive_counts(length: int, spans: list[tuple[int, int]]) -> list[int]:
    """Per slot t the largest k for which x_{t-k+2} ... x_{t+2} lie in one span and are real; 0 where there is none."""
    counts = []
    for t in range(length):
        fits = [k for k in range(1, t + 2) if any(start <= t - k + 2 and t + 2 < stop for start, stop in spans)]
        counts.append(max(fits, default=0))
    return counts


@pytest.mark.parametrize(
    "spans", [[], [(3, 9)], [(1, 3), (5, 6), (8, 12)], [(4, 5)], [(2, 4)], [(1, 12)], [(10, 12)], [(0, 5)]]
)
def test_the_passes_that_count_are_those_of_the_definition(spans):
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
    counts = count_passes(12, edges)
    assert counts.tolist() == naive_counts(12, spans)
    for k in range(1, 13):  # and the schedule knows their number ahead
        assert (answer_slots(12, edges) - (k - 1)).clip(0).sum() == (counts >= k).sum()


def sample(name: str, length: int, width: int = 4) -> Sample:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(5, 90, (length,), generator=generator)
    greedy = torch.full((length,), -1)
    greedy[1:-1] = tokens[2:]
    return Sample(name, tokens, greedy, [(2, length)], torch.randn(length, width, generator=generator))


def test_collate_concatenates_conversations_and_pads_on_the_right():
    rows = [[sample("a", 3), sample("b", 9)], [sample("c", 5)]]
    batch = collate(rows)
    assert batch.ids == ["a", "b", "c"] and batch.tokens.shape == (2, 12) and batch.draft_input is batch.features
    for (row, here), one in zip(batch.parts(), [*rows[0], *rows[1]], strict=True):
        assert batch.tokens[row, here].equal(one.tokens) and batch.features[row, here].equal(one.features)
        assert batch.target_argmax[row, here].equal(one.greedy)
        assert pad(batch.mask.passes, (0, 1))[row, here].equal(count_passes(len(one.tokens), np.array(one.spans)))
        assert batch.positions[row, here].tolist() == list(range(len(one.tokens)))
    for padded in (batch.tokens, batch.features, batch.mask.passes, batch.positions, batch.target_argmax + 1):
        assert not padded[1, 5:].any()
    mask = batch.mask
    assert mask.step_tokens == 17 and mask.step_batches == 1 and mask.passes.equal(torch.from_numpy(mask.host_passes))
    assert mask.step_slots[:12].tolist() == [int((mask.passes >= k).sum()) for k in range(1, 13)]
    assert mask.slots.equal(mask.passes.flatten().nonzero()[:, 0])


def test_noise_is_bounded_by_the_length_of_a_conversation_and_does_not_depend_on_its_neighbours():
    samples = [sample("a", 5, 64), sample("b", 7, 64), sample("c", 30, 64)]
    batch, seeds = collate([samples[:2], samples[2:]]), (1, 2, 3)
    noise = add_noise(batch, 0.2, [*seeds]) - batch.features
    for (row, here), one, seed in zip(batch.parts(), samples, seeds, strict=True):
        bound, found = 0.1 * 512 / len(one.tokens), noise[row, here]
        most = bound + tolerance() * batch.features.abs().max()
        assert 0.95 * bound < found.abs().max() <= most and found.std() > 0.5 * bound
        alone, other = (add_noise(collate([[one]]), 0.2, [number])[0] - one.features for number in (seed, seed + 1))
        assert found.equal(alone) and not found.equal(other)
        assert batch.features[row, here].equal(one.features)  # the batch itself is unchanged
    assert not noise[0, 12:].any()


@pytest.mark.parametrize("validation", [1e-9, 0.2, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 1000])
def test_a_side_depends_on_the_conversation_alone_and_none_is_empty(count, validation):
    """A side that would be empty gets the one conversation that is nearest to it."""
    numbers = {i: stable_number(f"4/c{i}") / 2**63 for i in range(count)}
    train, held = split([f"c{i}" for i in range(count)], validation, seed=4)
    below = sum(number < validation for number in numbers.values())
    ordered = sorted(numbers, key=lambda i: numbers[i])
    border = min(max(below, 1), count - 1)
    assert held == sorted(ordered[:border]) and train == sorted(ordered[border:])
    assert abs(len(held) - validation * count) < 50


def naive_best_fit(ordered: list[int], lengths: np.ndarray, capacity: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in ordered:
        fits = [b for b in batches if sum(lengths[b]) + lengths[index] <= capacity]
        if fits:
            max(fits, key=lambda b: sum(lengths[b])).append(index)
        else:
            batches.append([index])
    return batches


def test_rows_are_packed_by_best_fit():
    """A sample beyond the budget is alone."""
    lengths = np.random.default_rng(3).integers(2, 80, 200)
    ordered = np.argsort(-lengths, kind="stable").tolist()
    found, expected = (pack(ordered, lengths, 64) for pack in (pack_rows, naive_best_fit))
    assert sorted(sum(lengths[batch]) for batch in found) == sorted(sum(lengths[batch]) for batch in expected)
    assert sorted(i for batch in found for i in batch) == sorted(ordered)


def schedule(epoch: int = 0, **changes) -> Schedule:
    options = {"indices": list(range(300)), "lengths": LENGTHS, "spans": SPANS, "batch_tokens": 100, "seed": 0}
    made = Schedule(**(options | changes))
    made.set_epoch(epoch)
    return made


def schedules(world: int, accumulate: int, epoch: int = 0) -> list[Schedule]:
    """Of every process."""
    return [schedule(epoch, rank=rank, world=world, accumulate=accumulate) for rank in range(world)]


def shown(planned) -> list[int]:
    """Samples of planned batches, in order, without batches that only complete a step."""
    return [i for batch in planned if batch.counts for i in batch.samples]


@pytest.mark.parametrize("training", [True, False])
def test_every_epoch_has_every_sample_once_in_the_same_number_of_batches_within_the_budget(training):
    """Lightning asks for the length once, and would drop batches or skip validation if it changed."""
    indices = list(range(0, 300, 2))
    for epoch in range(3):
        made = schedule(epoch, indices=indices, training=training)
        planned = list(made)
        assert sorted(shown(planned)) == indices and len(planned) == made.total
        assert all(sum(LENGTHS[b.samples]) <= 100 for b in planned)


def test_the_order_follows_seed_and_epoch():
    first, again, epoch, seed = (schedule(e, seed=s).batches() for s, e in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert first == again and first not in (epoch, seed)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in epoch}  # nor only reordered


def test_validation_keeps_one_order_whose_beginning_is_a_fair_sample():
    first = shown(schedule(0, training=False))
    assert shown(schedule(3, training=False)) == first
    fair = LENGTHS[first[: len(first) // 4]]
    assert abs(fair.mean() - LENGTHS.mean()) < 4 * LENGTHS.std() / len(fair) ** 0.5


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_processes_share_the_steps_and_each_knows_its_whole_step(world, accumulate):
    shares = [list(one) for one in schedules(world, accumulate)]
    assert {len(share) for share in shares} == {len(schedule(world=world, accumulate=accumulate))}
    assert sorted(i for share in shares for i in shown(share)) == list(range(300))
    batches = schedule().batches()
    assert [b.samples for g in range(len(shares[0])) for share in shares for b in [share[g]] if b.counts] == batches
    for start in range(0, len(shares[0]), accumulate):
        step = [planned for share in shares for planned in share[start : start + accumulate]]
        found = [answer_slots(LENGTHS[i], SPANS[i]) for i in shown(step)]
        for planned in step:
            slots = [sum(max(count - k, 0) for count in np.concatenate(found)) for k in range(len(planned.step_slots))]
            assert planned.step_slots.tolist() == slots
            assert planned.step_tokens == LENGTHS[shown(step)].sum() and planned.step_batches == world * accumulate


@pytest.mark.parametrize("before", [(1, 1), (3, 2)])
@pytest.mark.parametrize("after", [(1, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("taken", [0, 4, 10_000])
def test_a_schedule_resumes_at_the_exact_sample_with_any_number_of_processes(before, after, taken):
    first, rest = schedules(*before, epoch=2), schedules(*after)
    taken = min(taken // before[1] * before[1], len(first[0]))
    seen = [i for one in first for i in shown(list(one)[:taken])]
    first[0].taken = taken
    for one in rest:
        one.load_state_dict(first[0].state_dict())
        assert one.epoch == 2 and len(list(one)) == one.remaining() <= len(one)
    assert sorted(seen + [i for one in rest for i in shown(one)]) == list(range(300))
    if before == after:
        assert [shown(list(one)[taken:]) for one in first] == [shown(one) for one in rest]
    for one in rest:
        one.set_epoch(3)
        assert len(list(one)) == len(one) == one.remaining()  # the next epoch is whole again


@pytest.mark.parametrize("other", [{"indices": list(range(100))}, {"seed": 1}, {"batch_tokens": 101}])
def test_a_state_of_other_data_is_refused(other):
    with pytest.raises(ValueError, match="resume with the same store"):
        schedule().load_state_dict(schedule(**other).state_dict())


SAMPLES = [sample(str(i), int(length)) for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_counts_in_a_batch_that_completes_the_last_step(workers):
    made = schedule(indices=[0, 1, 2], world=2, accumulate=2, rank=1, batch_tokens=40)
    batches = list(Loader(SAMPLES, made, workers))
    assert made.taken == len(batches) == len(made) and batches[-1].mask.is_empty
    assert batches[-1].mask.step_slots.sum() > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_loading_process_outlives_a_signal_to_the_whole_job(number):
    """The training needs its batches until the end of the step, and ends the process itself."""
    made = schedule(batch_tokens=40)
    batches = iter(Loader(SAMPLES, made, 1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    assert len(list(batches)) == len(made) - 1
    worker.join(10)
    assert worker.exitcode == 0
