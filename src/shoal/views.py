"""Small pieces of HTML for notebooks: what a lease, a pool or a task shows of itself."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells are text; nothing in them becomes markup.

    >>> "&lt;b&gt;cpu" in table("lease 1", ["device"], [["<b>cpu</b>"]])
    True
    """
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div><b>{html.escape(title)}</b><table><tr>{head}</tr>{body}</table></div>"
