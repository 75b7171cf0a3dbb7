from models.correction import sample_rows


def test_rows_are_taken_at_equal_distances() -> None:
    assert sample_rows(3, 5).tolist() == [0, 1, 2]
    assert sample_rows(101, 5).tolist() == [0, 25, 50, 75, 100]
    assert sample_rows(1, 512).tolist() == [0]
    rows = sample_rows(1_000_003, 512)
    assert (len(rows), rows[0], rows[-1]) == (512, 0, 1_000_002)
