"""Views of shards in memory."""

from reshard.binding import View


def test_dense_is_row_major_without_gaps():
    assert View(3, (12, 4, 1)).is_dense((2, 3, 4))
    assert View(0, (99, 77, 1)).is_dense((1, 1, 4))
    assert View(0, (5, 5)).is_dense((0, 7))
    assert View(0, ()).is_dense(())
    assert not View(0, (1, 2)).is_dense((2, 3))
    assert not View(0, (5, 1)).is_dense((2, 4))
