"""QR codes, for a terminal and for a page."""

from __future__ import annotations

import base64
import io

import segno


def terminal(text: str) -> str:
    """Return a QR code for a terminal: two modules in each character, dark on light.

    >>> print(terminal("SHOAL"))  # doctest: +SKIP
    """
    out = io.StringIO()
    segno.make(text, error="m", micro=False).terminal(out, border=2, compact=True)
    return out.getvalue().rstrip("\n")


def data_uri(text: str) -> str:
    """Return a QR code as an SVG image in a data: address, black on white in every colour scheme."""
    out = io.BytesIO()
    segno.make(text, error="m", micro=False).save(
        out, kind="svg", border=3, dark="#000", light="#fff", xmldecl=False, scale=8, omitsize=True
    )
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()
