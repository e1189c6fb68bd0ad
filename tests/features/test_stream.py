"""From samples to batches: what counts, noise, padding, the split, the schedule, and how Lightning drives them."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from poss_lightning.features.schedule import Schedule, answer_slots, pack_rows, split, stable_number
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Loader, add_noise, collate, counted_passes

LENGTHS = np.random.default_rng(0).integers(2, 40, 300)
SPANS = [np.array([[1, length]]) for length in LENGTHS]


def naive_counts(length: int, spans: list[tuple[int, int]]) -> list[int]:
    """Per slot t the largest k for which x_{t-k+2} ... x_{t+2} lie in one span and are real; 0 where there is none."""
    counts = []
    for t in range(length):
        fits = [
            k
            for k in range(1, length + 1)
            if t >= k - 1 and any(start <= t - k + 2 and t + 2 < stop and stop <= length for start, stop in spans)
        ]
        counts.append(max(fits, default=0))
    return counts


@pytest.mark.parametrize(
    "spans", [[], [(3, 9)], [(1, 3), (5, 6), (8, 12)], [(4, 5)], [(2, 4)], [(1, 12)], [(10, 12)], [(0, 5)]]
)
def test_the_passes_that_count_are_those_of_the_definition(spans):
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
    counts = counted_passes(12, edges)
    assert counts.tolist() == naive_counts(12, spans)
    for k in range(1, 13):  # and the schedule knows their number ahead
        assert (answer_slots(12, edges) - (k - 1)).clip(0).sum() == (counts >= k).sum()


def sample(name: str, length: int, width: int = 4) -> Sample:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(5, 90, (length,), generator=generator)
    greedy = torch.full((length,), -1)
    greedy[1:-1] = tokens[2:]
    return Sample(name, tokens, greedy, [(2, length)], torch.randn(length, width, generator=generator))


@pytest.mark.parametrize("rows", [[["a"], ["b"], ["c"]], [["a", "b"], ["c"]], [["c", "a", "b"]]], ids=str)
def test_collate_concatenates_conversations_and_pads_on_the_right(rows):
    samples = {name: sample(name, length) for name, length in (("a", 5), ("b", 9), ("c", 3))}
    batch = collate([[samples[name] for name in row] for row in rows])
    assert batch.ids == [name for row in rows for name in row]
    assert batch.tokens.shape[1] == max(map(sum, batch.lengths)) and batch.draft_input is batch.features
    for (row, here), name in zip(batch.parts(), batch.ids, strict=True):
        one = samples[name]
        assert batch.tokens[row, here].equal(one.tokens) and batch.features[row, here].equal(one.features)
        assert batch.greedy[row, here].equal(one.greedy)
        assert batch.counts[row, here].equal(counted_passes(len(one.tokens), np.array(one.spans)))
        assert batch.positions[row, here].tolist() == list(range(len(one.tokens)))
    for row, lengths in enumerate(batch.lengths):
        rest = slice(sum(lengths), None)
        assert not batch.tokens[row, rest].any() and not batch.features[row, rest].any()
        assert not batch.counts[row, rest].any() and not batch.positions[row, rest].any()
        assert (batch.greedy[row, rest] == -1).all()
    assert batch.step.tokens == 17 and batch.step.batches == 1
    assert batch.step.slots(12).tolist() == [int((batch.counts >= k).sum()) for k in range(1, 13)]


def test_noise_is_bounded_per_conversation_and_zero_in_the_padding():
    batch = collate([[sample("a", 5, 64), sample("b", 7, 64)], [sample("c", 30, 64)]])
    noise = add_noise(batch, 0.2, [1, 2, 3]) - batch.features
    for row, here, length in ((0, slice(0, 5), 5), (0, slice(5, 12), 7), (1, slice(0, 30), 30)):
        bound = 0.1 * 512 / length
        assert noise[row, here].abs().max() <= bound * (1 + 1e-5)
        assert noise[row, here].abs().max() > 0.95 * bound and noise[row, here].std() > 0.5 * bound
    assert not noise[0, 12:].any()


def test_noise_does_not_depend_on_the_neighbours():
    short, long = sample("a", 5), sample("b", 30)
    together, alone = collate([[long, short]]), collate([[short]])
    noisy = add_noise(together, 0.2, [7, 8])[0, 30:]
    assert noisy.equal(add_noise(alone, 0.2, [8])[0]) and not noisy.equal(add_noise(alone, 0.2, [9])[0])
    assert together.features.equal(collate([[long, short]]).features)  # the batch itself is unchanged


def test_the_split_has_two_disjoint_sides_that_cover_all():
    names = [f"c{i}" for i in range(1000)]
    train, held = split(names, 0.2, seed=0)
    assert sorted(train + held) == list(range(1000))
    assert 150 < len(held) < 250
    assert split(names, 0.2, seed=0) == (train, held) != split(names, 0.2, seed=1)


def test_a_side_depends_on_the_conversation_alone():
    names = [f"c{i}" for i in range(300)]
    fewer = [name for i, name in enumerate(names) if i % 3][::-1]
    held, held_of_fewer = ({group[i] for i in split(group, 0.2, seed=4)[1]} for group in (names, fewer))
    assert held_of_fewer == held & set(fewer)
    assert held <= {names[i] for i in split(names, 0.3, seed=4)[1]}


@pytest.mark.parametrize("validation", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 12])
def test_few_conversations_have_two_sides_too(count, validation):
    """A side that would be empty gets the one conversation that is nearest to it."""
    names = [f"c{i}" for i in range(count)]
    train, held = split(names, validation, 0)
    assert train and held and sorted(train + held) == list(range(count))
    expected = sum(stable_number(f"0/{name}") / 2**63 < validation for name in names)
    assert len(held) == min(max(expected, 1), count - 1)


def test_one_text_many_times_is_split_and_one_conversation_is_not(caplog):
    train, held = split(["a"] * 8, 0.3, 0)
    assert train and held and sorted(train + held) == list(range(8))
    assert "what is held out is trained on too" in caplog.text
    with pytest.raises(ValueError, match="there is one conversation: none"):
        split(["a"], 0.5, 0)


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
    lengths = np.random.default_rng(3).integers(2, 60, 200)
    ordered = np.argsort(-lengths, kind="stable").tolist()
    found = pack_rows(ordered, lengths, 64)
    assert all(sum(lengths[batch]) <= 64 for batch in found)
    sums = sorted(sum(lengths[batch]) for batch in found)
    assert sums == sorted(sum(lengths[batch]) for batch in naive_best_fit(ordered, lengths, 64))
    long = pack_rows([3, 1, 0, 2], np.array([5, 50, 4, 60]), 20)
    assert sorted(map(sorted, long)) == [[0, 2], [1], [3]]  # a sample beyond the budget is alone


def schedule(epoch: int = 0, **changes) -> Schedule:
    options = {"indices": list(range(300)), "lengths": LENGTHS, "spans": SPANS, "batch_tokens": 100, "seed": 0}
    made = Schedule(**(options | changes))
    made.set_epoch(epoch)
    return made


def shown(planned) -> list[int]:
    """Samples of planned batches, in order, without batches that only complete a step."""
    return [i for batch in planned if batch.counts for i in batch.samples]


@pytest.mark.parametrize("training", [True, False])
def test_every_epoch_has_every_sample_once_within_the_budget(training):
    indices = list(range(0, 300, 2))
    for epoch in range(3):
        planned = list(schedule(epoch, indices=indices, training=training))
        assert sorted(shown(planned)) == indices
        assert all(sum(LENGTHS[b.samples]) <= 100 for b in planned)


def test_the_order_follows_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[list[int]]:
        return schedule(epoch, seed=seed).batches()

    first = order(0, 0)
    assert first == order(0, 0)
    assert first != order(0, 1) != order(1, 1) and first != order(1, 0)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in order(0, 1)}  # nor only reordered


def test_every_epoch_has_the_same_number_of_batches():
    """Lightning asks for the length once, and would drop batches or skip validation if it changed."""
    lengths = np.random.default_rng(1).integers(2, 300, 3000)
    spans = [np.array([[1, 2]])] * 3000
    made = schedule(indices=list(range(3000)), lengths=lengths, spans=spans, batch_tokens=2000)
    counts = set()
    for epoch in range(4):
        made.set_epoch(epoch)
        counts.add(len(made.batches()))
    assert counts == {made.total}


def test_validation_keeps_one_order_whose_beginning_is_a_fair_sample():
    first = shown(schedule(0, training=False))
    assert shown(schedule(3, training=False)) == first
    begin = [LENGTHS[i] for i in first[: len(first) // 4]]
    assert abs(np.mean(begin) - LENGTHS.mean()) < 0.25 * LENGTHS.mean()


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (3, 1), (1, 4), (2, 3), (5, 2)])
def test_processes_share_the_steps_and_each_knows_its_whole_step(world, accumulate):
    shares = [list(schedule(rank=rank, world=world, accumulate=accumulate)) for rank in range(world)]
    assert {len(share) for share in shares} == {len(schedule(world=world, accumulate=accumulate))}
    assert sorted(i for share in shares for i in shown(share)) == list(range(300))
    batches = schedule().batches()
    assert [b.samples for g in range(len(shares[0])) for share in shares for b in [share[g]] if b.counts] == batches
    for start in range(0, len(shares[0]), accumulate):
        step = [planned for share in shares for planned in share[start : start + accumulate]]
        found = [answer_slots(LENGTHS[i], SPANS[i]) for i in shown(step)]
        for planned in step:
            assert sorted(planned.step.answers.tolist()) == sorted(np.concatenate(found).tolist())
            assert planned.step.tokens == LENGTHS[shown(step)].sum() and planned.step.batches == world * accumulate


@pytest.mark.parametrize("before", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("after", [(1, 1), (2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("taken", [0, 1, 4, 7, 10_000])
def test_a_schedule_resumes_at_the_exact_sample_with_any_number_of_processes(before, after, taken):
    def made(world_accumulate, rank=0, epoch=2):
        world, accumulate = world_accumulate
        return schedule(epoch, rank=rank, world=world, accumulate=accumulate)

    first = [made(before, rank) for rank in range(before[0])]
    taken = min(taken // before[1] * before[1], len(first[0]))
    seen = [i for one in first for i in shown(list(one)[:taken])]
    first[0].taken = taken
    rest = [made(after, rank, epoch=0) for rank in range(after[0])]
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


class Numbers:
    """A source of tiny samples."""

    def __getitem__(self, index: int) -> Sample:
        return sample(str(index), int(LENGTHS[index]))


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_counts_in_a_batch_that_completes_the_last_step(workers):
    made = schedule(indices=[0, 1, 2], world=2, accumulate=2, rank=1, batch_tokens=40)
    batches = list(Loader(Numbers(), made, workers))
    assert made.taken == len(batches) == len(made) and not batches[-1].counts.any()
    assert batches[-1].step.slots(3).sum() > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_loading_process_outlives_a_signal_to_the_whole_job(number):
    """The training needs its batches until the end of the step, and ends the process itself."""
    made = schedule(batch_tokens=40)
    batches = iter(Loader(Numbers(), made, 1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    assert len(list(batches)) == len(made) - 1
    worker.join(10)
    assert worker.exitcode == 0
