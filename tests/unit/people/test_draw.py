"""Draws: uniform, and the same in Python, JavaScript and a shell script. A changed byte is found."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.people import draw
from shoal.people.draw import Entry, Proof, ProofError, StruckOut, Terms
from tests.support.pages import node

ROOT = Path(__file__).parents[3]


def seed_of(number: int) -> str:
    return hashlib.sha256(f"test {number}".encode()).hexdigest()


def made(number: int) -> Proof:
    """A draw that only `number` decides: up to 12 entrants and some who are struck out."""
    chosen = random.Random(number)
    names = chosen.sample(["ana", "ben", "cy", "d-4", "eva", "fritz", "g", "h2", "ida", "jo"], 10)
    count = chosen.randint(0, 7)
    entries = [
        Entry(name, chosen.choice([1, 1, 1, 2, 5]), f"{chosen.getrandbits(128):032x}")
        for name in names[:count]
    ]
    struck = [StruckOut(name, "not-enrolled") for name in names[count : count + 2]]
    terms = Terms("K7Q", f"GPU hour № {number}", chosen.randint(1, 4),
                  "when an admin says so", "2026-11-18T20:00:00Z")  # fmt: skip
    return draw.prove(terms, seed_of(number), entries, struck)


def chi_squared(counts: list[int], expected: list[float]) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def test_draws_are_uniform() -> None:
    """100,000 draws, each with a seed of its own. 20.5 is chi-squared's 0.1 % with 5 degrees."""
    entries = [Entry(name, 1, "00" * 16) for name in ("ana", "ben", "cy", "d", "eva", "f")]
    wins = dict.fromkeys((e.member for e in entries), 0)
    for number in range(100_000):
        wins[draw.rank(seed_of(number), "ab" * 32, entries)[0].member] += 1
    assert chi_squared(list(wins.values()), [100_000 / 6] * 6) < 20.5


def test_tickets_weigh() -> None:
    """Three tickets win three times as often as one. 13.8 is chi-squared's 0.1 % with 2 degrees."""
    entries = [Entry("ana", 1, "00" * 16), Entry("ben", 3, "00" * 16), Entry("cy", 2, "00" * 16)]
    wins = dict.fromkeys((e.member for e in entries), 0)
    for number in range(12_000):
        wins[draw.rank(seed_of(number), "cd" * 32, entries)[0].member] += 1
    assert chi_squared(list(wins.values()), [2_000, 6_000, 4_000]) < 13.8


@given(st.integers(0, 10**9))
def test_what_is_proved_verifies(number: int) -> None:
    proof = made(number)
    found = draw.verify(
        proof.text().encode(),
        proof.commitment,
        [draw.receipt("K7Q", entry.member, entry.own) for entry in proof.entries],
    )
    assert found == proof
    assert len(proof.winners) == min(proof.terms.places, len(proof.entries))
    assert set(proof.winners) <= {e.member for e in proof.entries}


def test_every_changed_byte_is_found() -> None:
    proof = made(3)
    assert len(proof.entries) > 2
    assert proof.struck_out
    data = proof.text().encode()
    for at in range(len(data)):
        for flipped in (1, 32, 128):
            wrong = bytearray(data)
            wrong[at] ^= flipped
            with pytest.raises(ProofError) as error:
                draw.verify(bytes(wrong))
            assert str(error.value)
    for cut in range(len(data)):
        with pytest.raises(ProofError):
            draw.verify(data[:cut])


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_any_file_is_a_proof_or_an_error(data: bytes) -> None:
    with pytest.raises(ProofError):
        draw.verify(data)


def test_an_error_names_what_differs() -> None:
    proof = made(3)
    other = seed_of(99)
    text = proof.text().replace(proof.seed, other)
    with pytest.raises(ProofError, match="the terms and the seed hash to"):
        draw.verify(text.encode())
    first, second = proof.ranks[:2]
    text = proof.text().replace(f"rank 1 {first.member}", f"rank 1 {second.member}")
    with pytest.raises(ProofError, match=f"rank 1 is {first.member} with {first.value}"):
        draw.verify(text.encode())
    with pytest.raises(ProofError, match="the commitment before the draw was 00"):
        draw.verify(proof.text().encode(), commitment="00")
    with pytest.raises(ProofError, match="no entry of this draw belongs to the receipt 11"):
        draw.verify(proof.text().encode(), receipts=["11"])


def test_an_entrant_changes_the_result_and_a_left_out_one_notices() -> None:
    """The entrant's own bytes are in the list's hash, so they move everybody's value."""
    terms = made(3).terms
    entries = [Entry("ana", 1, "00" * 16), Entry("ben", 1, "00" * 16)]
    one = draw.prove(terms, seed_of(1), entries, [])
    two = draw.prove(terms, seed_of(1), [entries[0], Entry("ben", 1, "00" * 15 + "01")], [])
    assert one.commitment == two.commitment
    assert {r.value for r in one.ranks}.isdisjoint(r.value for r in two.ranks)
    kept = draw.receipt("K7Q", "ben", "00" * 16)
    draw.verify(one.text().encode(), receipts=[kept])
    without = draw.prove(terms, seed_of(1), entries[:1], [])
    with pytest.raises(ProofError, match="belongs to the receipt"):
        draw.verify(without.text().encode(), receipts=[kept])


@node.needed
def test_javascript_agrees() -> None:
    proofs = [made(number) for number in range(1000)]
    broken = [proofs[i].text().replace("places", "place5", 1) for i in range(3)]
    broken += [p.text().replace(p.seed, seed_of(5000)) for p in proofs[:3]]
    lines = [json.dumps(p.text()) for p in proofs] + [json.dumps(text) for text in broken]
    done = node.run(Path(__file__).with_name("draw_in_node.ts"), "\n".join(lines))
    answers = [json.loads(line) for line in done.splitlines()]
    assert [a.get("winners") for a in answers[:1000]] == [p.winners for p in proofs]
    kept = [[draw.receipt("K7Q", e.member, e.own) for e in p.entries] for p in proofs]
    assert [a.get("receipts") for a in answers[:1000]] == kept
    assert ["error" in a for a in answers] == [False] * 1000 + [True] * 6


def test_sha256sum_agrees(tmp_path: Path) -> None:
    script = ROOT / "examples" / "verify_draw.sh"
    for number in range(20):
        proof = made(number)
        path = tmp_path / f"{number}.txt"
        path.write_text(proof.text(), encoding="utf-8")
        done = subprocess.run(["sh", script, path], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == proof.winners
    path.write_text(proof.text().replace(proof.seed, seed_of(77)), encoding="utf-8")
    done = subprocess.run(["sh", script, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "commitment differs" in done.stderr
