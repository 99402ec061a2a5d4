"""`shoal draw verify` needs no pool, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

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
