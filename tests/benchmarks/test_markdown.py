"""Tables in Markdown, as all benchmarks print them."""

from __future__ import annotations

from benchmarks.markdown import table


def test_a_table_has_its_titles_a_line_below_them_and_its_rows() -> None:
    rows = iter([("plain", "1.00", ""), ["two-tier", "1.42", "1.37–1.50"]])
    assert table(["", "× plain", "95 %"], rows) == [
        "|  | × plain | 95 % |",
        "| --- | --- | --- |",
        "| plain | 1.00 |  |",
        "| two-tier | 1.42 | 1.37–1.50 |",
    ]
    assert table(("a",), ()) == ["| a |", "| --- |"]
