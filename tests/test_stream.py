"""From samples to batches: what counts, noise, padding, the split, buckets, and how Lightning drives them."""

from collections import Counter

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from poss_lightning.features.store import Sample
from poss_lightning.features.stream import Buckets, add_noise, collate, passes_that_count, split

LENGTHS = np.random.default_rng(0).integers(2, 40, 300)


def naive_counts(length: int, spans: list[tuple[int, int]]) -> list[int]:
    """Per slot t the largest k for which x_{t-k+2} ... x_{t+2} lie in one span; 0 where there is none."""
    counts = []
    for t in range(length):
        fits = [
            k
            for k in range(1, length + 1)
            if any(start <= t - k + 2 and t + 2 < stop and stop <= length for start, stop in spans)
        ]
        counts.append(max(fits, default=0))
    return counts


@pytest.mark.parametrize("spans", [[], [(3, 9)], [(1, 3), (5, 6), (8, 12)], [(4, 5)], [(2, 4)], [(1, 12)], [(10, 12)]])
def test_passes_that_count_by_definition(spans):
    assert passes_that_count(12, spans).tolist() == naive_counts(12, spans)


def test_every_smaller_pass_counts_too():
    """`k <= counts[t]` says it for all k at once, so that the set of passes at a slot must have no gaps."""
    for k in range(1, 6):
        window = [t for t in range(12) if t - k + 2 >= 3 and t + 2 < 9]
        assert (passes_that_count(12, [(3, 9)]) >= k).nonzero().flatten().tolist() == window


def sample(name: str, length: int, width: int = 4) -> Sample:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(5, 90, (length,), generator=generator)
    greedy = torch.full((length,), -1)
    greedy[1:-1] = tokens[2:]
    return Sample(name, tokens, greedy, [(2, length)], torch.randn(length, width, generator=generator))


def test_collate_pads_on_the_right():
    samples = [sample("a", 5), sample("b", 9), sample("c", 2)]
    batch = collate(samples)
    assert batch.tokens.shape == (3, 9) and batch.features.shape == (3, 9, 4)
    assert batch.ids == ["a", "b", "c"] and batch.lengths.tolist() == [5, 9, 2]
    for row, one in enumerate(samples):
        length = len(one.tokens)
        assert batch.tokens[row, :length].equal(one.tokens) and batch.features[row, :length].equal(one.features)
        assert batch.greedy[row, :length].equal(one.greedy)
        assert batch.counts[row, :length].equal(passes_that_count(length, one.spans))
        assert not batch.tokens[row, length:].any() and not batch.features[row, length:].any()
        assert not batch.counts[row, length:].any() and (batch.greedy[row, length:] == -1).all()
    assert batch.inputs is batch.features


def test_noise_is_bounded_per_sample_and_zero_in_the_padding():
    batch = collate([sample("a", 5, 64), sample("b", 30, 64)])
    noise = add_noise(batch.features, batch.lengths, 0.2, [1, 2]) - batch.features
    for row, length in enumerate((5, 30)):
        bound = 0.1 * 512 / length
        assert noise[row, :length].abs().max() <= bound * (1 + 1e-5)
        assert noise[row, :length].abs().max() > 0.95 * bound and noise[row, :length].std() > 0.5 * bound
        assert not noise[row, length:].any()


def test_noise_belongs_to_the_sample_not_to_its_neighbours():
    short, long = sample("a", 5), sample("b", 30)
    together, alone = collate([long, short]), collate([short])
    noisy = add_noise(together.features, together.lengths, 0.2, [7, 8])[1, :5]
    assert noisy.equal(add_noise(alone.features, alone.lengths, 0.2, [8])[0])
    assert not noisy.equal(add_noise(alone.features, alone.lengths, 0.2, [9])[0])
    assert together.features.equal(collate([long, short]).features)  # what is given is left as it is


def test_split_has_two_disjoint_sides_that_cover_all():
    names = [f"c{i}" for i in range(1000)]
    train, held = split(names, 0.2, seed=0)
    assert sorted(train + held) == list(range(1000))
    assert 150 < len(held) < 250
    assert split(names, 0.2, seed=0) == (train, held) != split(names, 0.2, seed=1)


def test_a_side_is_a_matter_of_the_conversation_alone():
    names = [f"c{i}" for i in range(300)]
    fewer = [name for i, name in enumerate(names) if i % 3][::-1]
    held, held_of_fewer = ({group[i] for i in split(group, 0.2, seed=4)[1]} for group in (names, fewer))
    assert held_of_fewer == held & set(fewer)
    assert held <= {names[i] for i in split(names, 0.3, seed=4)[1]}


@pytest.mark.parametrize(
    ("names", "validation", "words"), [(["a"], 0.5, "empty"), (["a", "b"], 0.0, "validation is 0")]
)
def test_splits_that_cannot_be(names, validation, words):
    with pytest.raises(ValueError, match=words):
        split(names, validation, 0)


@pytest.mark.parametrize("training", [True, False])
def test_every_sample_once_an_epoch_within_the_budget(training):
    indices = list(range(0, 300, 2))
    for epoch in range(3):
        buckets = Buckets(indices, LENGTHS, 100, 0, training)
        buckets.set_epoch(epoch)
        assert sorted(i for batch in buckets for i in batch) == indices
        assert all(len(batch) * max(LENGTHS[i] for i in batch) <= 100 for batch in buckets)


def test_a_sample_beyond_the_budget_stands_alone():
    batches = list(Buckets([0, 1, 2, 3], np.array([5, 50, 4, 60]), 20, seed=0))
    assert sorted(map(sorted, batches)) == [[0, 2], [1], [3]]


def test_the_order_follows_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[list[int]]:
        buckets = Buckets(list(range(300)), LENGTHS, 100, seed)
        buckets.set_epoch(epoch)
        return list(buckets)

    first = order(0, 0)
    assert first == order(0, 0)
    assert first != order(0, 1) != order(1, 1) and first != order(1, 0)
    assert sorted(map(sorted, first)) != sorted(map(sorted, order(0, 1)))  # samples change company too


def test_every_epoch_has_as_many_batches():
    """Lightning asks for the length once, and would drop batches or skip validation if it changed."""
    lengths = np.random.default_rng(1).integers(2, 300, 6000)
    buckets, counts = Buckets(list(range(6000)), lengths, 2000, seed=0), set()
    for epoch in range(4):
        buckets.set_epoch(epoch)
        counts.add(len(buckets))
    assert len(counts) == 1


def test_validation_keeps_one_order_whose_beginning_is_a_fair_sample():
    held = Buckets(list(range(300)), LENGTHS, 100, seed=0, training=False)
    first = held.batches()
    held.set_epoch(3)
    assert held.batches() == first and sorted(i for batch in first for i in batch) == list(range(300))
    begin = [LENGTHS[i] for batch in first[: len(first) // 4] for i in batch]
    assert abs(np.mean(begin) - LENGTHS.mean()) < 0.25 * LENGTHS.mean()


class Watcher(lightning.LightningModule):
    """Notes which samples it is shown."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: list[int]) -> torch.Tensor:
        self.seen[-1].append(batch)
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_lightning_shows_every_sample_once_an_epoch_in_new_order(tmp_path):
    loader = DataLoader(range(300), batch_sampler=Buckets(list(range(300)), LENGTHS, 500, seed=0), collate_fn=list)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    watcher = Watcher()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    trainer.fit(watcher, loader)
    for epoch in watcher.seen:
        assert Counter(i for batch in epoch for i in batch) == Counter(range(300))
    assert watcher.seen[0] != watcher.seen[1] != watcher.seen[2]
    for epoch, seen in enumerate(watcher.seen):
        loader.batch_sampler.set_epoch(epoch)
        assert seen == list(loader.batch_sampler)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_batches_and_take_as_many_steps(world):
    lengths = np.random.default_rng(0).integers(3, 50, 101)
    whole = Buckets(list(range(101)), lengths, 128, seed=1).batches()
    shares = [Buckets(list(range(101)), lengths, 128, 1, True, rank, world).batches() for rank in range(world)]
    assert {len(share) for share in shares} == {len(whole) // world}
    assert sorted(batch for share in shares for batch in share) == sorted(whole[: len(whole) // world * world])
    held = [Buckets(list(range(101)), lengths, 128, 1, False, rank, world).batches() for rank in range(world)]
    assert sorted(i for share in held for batch in share for i in batch) == list(range(101))
