"""`shoal draw verify` needs no pool, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli.main import main
from shoal.people import draw
from shoal.people.draw import Entry, Terms

TERMS = Terms("K7Q", "GPU hour", 1, "when an admin says so", "2026-11-18T20:00:00Z")


def test_verify(tmp_path: Path) -> None:
    entry = Entry("ana", 1, "ab" * 16)
    proof = draw.prove(TERMS, "cd" * 32, [entry, Entry("ben", 2, "00" * 16)], [])
    path = tmp_path / "proof.txt"
    path.write_text(proof.text())
    receipt = draw.receipt("K7Q", "ana", entry.own)
    done = CliRunner().invoke(main, ["draw", "verify", str(path), "--receipt", receipt, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["winners"] == proof.winners
    assert found["commitment"] == proof.commitment
    path.write_text(proof.text().replace("entry ben 2", "entry ben 3"))
    done = CliRunner().invoke(main, ["draw", "verify", str(path)])
    assert done.exit_code == 1
    assert "the proof's list is" in done.output


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["event", "open", "t", "--places", "0"], "--places"),
        (["event", "open", "t", "--devices", "33"], "--devices"),
        (["event", "open", "t", "--minutes", "-1"], "--minutes"),
        (["event", "open", "t", "--capacity", "5001"], "--capacity"),
        (["event", "open", "t", "--when-free", "-3"], "--when-free"),
        (["event", "open", "t", "--when-asked", "0"], "--when-asked"),
        (["event", "request", "t", "--minutes", "0"], "--minutes"),
        (["approve", "ana", "--tickets", "101"], "--tickets"),
        (["token", "make", "t", "--days", "0"], "--days"),
    ],
)
def test_a_value_out_of_bounds_names_its_option(arguments: list[str], option: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert option in done.output
    assert "is not in the range" in done.output


def test_every_changed_byte_is_found() -> None:
    data = (Path(__file__).parents[3] / "examples" / "proof.txt").read_bytes()
    draw.verify(data)
    for at, byte in enumerate(data):
        for other in {byte ^ 1, byte ^ 32, 10, 32} - {byte}:
            with pytest.raises(draw.ProofError):
                draw.verify(data[:at] + bytes([other]) + data[at + 1 :])
