"""What commands print."""

from __future__ import annotations

import io

from hispec.utils.console import make_console, make_table


def test_text_is_printed_as_it_is() -> None:
    file = io.StringIO()
    console, table = make_console(file), make_table(":x:", "n")
    table.add_row("s3://a:b:c", ":warning: [red]")
    console.print("path:a:b [bold]:x:", table)
    assert file.getvalue().splitlines()[0].split() == ["path:a:b", "[bold]:x:"]
    assert (
        ":x:" in file.getvalue() and "s3://a:b:c" in file.getvalue() and ":warning: [red]" in file.getvalue()
    )
