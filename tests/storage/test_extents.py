import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.storage.extents import ALIGNMENT_BYTES, lay_out_extents


@given(
    st.dictionaries(st.text(max_size=5), st.integers(0, 10**7), max_size=20),
    st.sampled_from([4096, 2 * 1024 * 1024]),
)
def test_extents_are_aligned_disjoint_and_hold_their_sizes(
    sizes: dict[str, int], alignment: int
) -> None:
    layout = lay_out_extents(sizes, alignment_bytes=alignment)
    assert list(layout.extents) == list(sizes)
    end = 0
    for name, size in sizes.items():
        extent = layout[name]
        assert name in layout
        assert extent.size_bytes == size
        assert extent.offset_bytes % alignment == 0
        assert extent.offset_bytes >= end
        assert 0 <= extent.padded_bytes - size < ALIGNMENT_BYTES
        end = extent.end_bytes
    assert layout.total_bytes == end


def test_sizes_and_alignments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="negative size"):
        lay_out_extents({"a": -1})
    with pytest.raises(ValueError, match="no multiple of 4096"):
        lay_out_extents({"a": 1}, alignment_bytes=100)
