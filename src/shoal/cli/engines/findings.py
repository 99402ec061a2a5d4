"""What `shoal doctor` says of the engine that keeps a pool on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.errors import ShoalError
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.engines import engine as engines

Finding = tuple[str, str, str]  # state, text, what to type


def findings(url: str) -> Iterator[Finding]:
    """Yield what is to be said of the engine, and of each part that it keeps."""
    if not url.startswith(LOCAL_PREFIX):
        return
    pool = url.removeprefix(LOCAL_PREFIX).partition("-")[2]
    try:
        known = engines.chosen(pool)
        if known.engine == "local":
            return
        engine = engines.of(pool)
        parts = engine.list(pool)
    except ShoalError as error:
        yield "bad", str(error), "see docs/engines.md"
        return
    yield from _engine(known)
    for part in parts:
        text = f"{part.part} on {part.node}: " + (
            f"process {part.pid}, started again {part.restarts} time(s)"
            if part.pid
            else "not running"
        )
        if not part.problem:
            yield "good", text, ""
        else:
            yield ("note" if part.pid else "bad"), f"{text}: {part.problem}", ""


def _engine(known: engines.Chosen) -> Iterator[Finding]:
    from shoal.pool.engines.ray_driver import wants_token

    asks = wants_token(known.address)
    text = f"{known.engine} at {known.address} asks for a token"
    if asks:
        yield "good", text, ""
        return
    text = f"{known.engine} at {known.address} does not ask for a token: strangers can use this account"
    yield "bad", text, "start Ray on every node with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
