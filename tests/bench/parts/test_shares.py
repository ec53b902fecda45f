from recsys.bench.parts.shares import parse_shares


def test_every_row_is_resident_however_one_is_written():
    assert parse_shares(["floor", "0.50", "1.0", "1", "1e0"]) == ("floor", "0.50", "1", "1", "1")
