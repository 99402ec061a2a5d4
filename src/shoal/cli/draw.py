"""`shoal draw verify`: check the proof of a draw. It needs no pool."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.common import json_option, print_json


@click.group()
def draw() -> None:
    """Check the draw of an event."""


@draw.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--commitment", default="", metavar="HASH",
              help="Commitment that you noted before the draw.")  # fmt: skip
@click.option("--receipt", "receipts", multiple=True, metavar="HASH",
              help="Receipt of your entry; repeat for several.")  # fmt: skip
@json_option
def verify(file: Path, commitment: str, receipts: tuple[str, ...], as_json: bool) -> None:
    """Recompute a draw from its proof.

    Exit with 1 and say what differs, if anything does.

    \b
    shoal event draw "GPU hour" --proof proof.txt
    shoal draw verify proof.txt --receipt 5f1c…
    """
    from shoal.people import draw as draws

    with file.open("rb") as opened:
        data = opened.read(draws.PROOF_BYTES_MAX + 1)
    proof = draws.verify(data, commitment.strip().lower(), [r.strip().lower() for r in receipts])
    if as_json:
        print_json(
            {
                "event": proof.terms.event, "title": proof.terms.title, "places": proof.terms.places,
                "commitment": proof.commitment, "list": proof.list_hash, "seed": proof.seed,
                "entries": len(proof.entries), "struck_out": len(proof.struck_out),
                "winners": proof.winners,
            }
        )  # fmt: skip
        return
    click.echo(f'the draw "{proof.terms.title}" is right: every hash and rank was recomputed')
    click.echo(
        f"{len(proof.entries)} took part, {len(proof.struck_out)} were struck out; "
        f"winners: {', '.join(proof.winners) or 'none'}"
    )
    if not commitment:
        click.echo(f"compare with what you noted before the draw: commitment {proof.commitment}")
