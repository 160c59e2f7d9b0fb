from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.data.order import FileOrder, ShuffledOrder, make_permutation, split_rows
from packhorse.errors import DataError


@given(size=st.integers(1, 700), seed=st.integers(0, 2**64), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    shuffle = make_permutation(size, seed=seed, epoch=epoch, purpose="epoch")
    assert sorted(shuffle.apply(index) for index in range(size)) == list(range(size))


def test_a_billion_rows_cost_no_more_than_one() -> None:
    shuffle = make_permutation(10**9 + 7, seed=1, epoch=0, purpose="epoch")
    found = {shuffle.apply(index) for index in range(2_000)}
    assert len(found) == 2_000
    assert max(found) > 9 * 10**8
    with pytest.raises(IndexError):
        shuffle.apply(10**9 + 7)


def test_epochs_seeds_and_purposes_shuffle_differently() -> None:
    def listed(seed: int, epoch: int, purpose: str) -> list[int]:
        shuffle = make_permutation(100, seed=seed, epoch=epoch, purpose=purpose)
        return [shuffle.apply(index) for index in range(100)]

    orders = [listed(*key) for key in ((1, 0, "epoch"), (1, 1, "epoch"), (2, 0, "epoch"))]
    orders += [listed(1, 0, "split"), list(range(100))]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 12


def test_no_place_is_preferred() -> None:
    # 4,000 shuffles of 10 rows: each row stands at each place 400 times on average; 5.5 standard
    # deviations (19 each) are never reached by a fair shuffle of this seed range.
    counts = [[0] * 10 for _ in range(10)]
    for seed in range(4_000):
        shuffle = make_permutation(10, seed=seed, epoch=0, purpose="epoch")
        for place in range(10):
            counts[place][shuffle.apply(place)] += 1
    assert all(abs(count - 400) < 105 for row in counts for count in row)


@given(size=st.integers(2, 300), share=st.floats(0.001, 0.9), seed=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_held_out_rows_and_the_rest_are_all_rows(size: int, share: float, seed: int) -> None:
    if max(1, round(size * share)) >= size:
        with pytest.raises(DataError, match="leaves none to train on"):
            split_rows(size, share=share, seed=seed)
        return
    order, held_out = split_rows(size, share=share, seed=seed)
    aside = [held_out.row(epoch=0, position=place) for place in range(held_out.num_rows)]
    assert aside == sorted(aside)
    assert len(aside) == max(1, round(size * share))
    for epoch in (0, 3):
        kept = [order.row(epoch=epoch, position=place) for place in range(order.num_rows)]
        assert sorted(kept + aside) == list(range(size))


def test_the_split_does_not_move_between_epochs_or_runs() -> None:
    first, second = (split_rows(50, share=0.2, seed=9)[1] for _ in range(2))
    assert first == second
    assert first != split_rows(50, share=0.2, seed=10)[1]


def test_orders_refuse_places_they_do_not_have() -> None:
    order, held_out = split_rows(10, share=0.2, seed=0)
    for listed in (order, held_out, FileOrder(num_rows=3)):
        for place in (-1, listed.num_rows):
            with pytest.raises(IndexError):
                listed.row(epoch=0, position=place)
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="between 0 and 1"):
            split_rows(10, share=share, seed=0)


def test_file_order_and_full_shuffle() -> None:
    assert [FileOrder(num_rows=4).row(epoch=2, position=place) for place in range(4)] == [
        0,
        1,
        2,
        3,
    ]
    order = ShuffledOrder(num_cache_rows=40, seed=3)
    assert sorted(order.row(epoch=1, position=place) for place in range(40)) == list(range(40))
