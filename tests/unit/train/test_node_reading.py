"""Pure code of reading at a node: slots, trees, fingerprints, and which paths are served."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PoolError
from shoal.pool.base.folders import FolderError, Folders, named, split_pattern
from shoal.pool.wire import data_messages
from shoal.train.data import data_tree, fingerprints
from shoal.train.data.node_paths import paths_of
from shoal.train.data.slots import ALIGN_BYTES, Slots
from shoal.train.group.errors import DataError

# --- slots ---


@given(
    st.integers(0, 5000),
    st.lists(st.one_of(st.integers(0, 3000), st.none()), max_size=60),
    st.randoms(use_true_random=False),
)
def test_slots_never_overlap_and_no_byte_is_lost(
    memory: int, steps: list[int | None], dice: Any
) -> None:
    slots = Slots(memory)
    held: dict[int, int] = {}
    for wanted in steps:
        if wanted is None and held:
            offset = dice.choice(sorted(held))
            slots.release(offset)
            del held[offset]
        elif wanted is not None:
            offset = slots.reserve(wanted)
            if offset is None:
                continue
            assert offset % ALIGN_BYTES == 0
            assert 0 <= offset <= offset + wanted <= memory
            for other, size in held.items():
                assert offset + wanted <= other or other + size <= offset
            held[offset] = max(1, wanted)
        assert slots.reserved == len(held)
    for offset in list(held):
        slots.release(offset)
    assert slots.free_bytes == slots.memory_bytes
    if slots.memory_bytes:  # what is free is in one piece again
        assert slots.reserve(slots.memory_bytes) == 0


def test_the_lowest_place_that_fits_is_given() -> None:
    slots = Slots(4096)
    first, second, third = (slots.reserve(n) for n in (64, 128, 64))
    slots.release(second or 0)
    slots.release(first or 0)
    assert (slots.reserve(192), third) == (0, 192)


# --- trees ---

TREES = st.recursive(
    st.integers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(TREES)
def test_a_tree_survives_the_wire(tree: Any) -> None:
    skeleton, leaves = data_tree.flatten(tree)
    sent = msgspec.msgpack.encode(data_messages.OpenData(1, skeleton, []))
    got = msgspec.msgpack.decode(sent, type=data_messages.OpenData)
    rebuilt = data_tree.rebuild(got.skeleton, leaves)
    assert rebuilt == tree
    assert repr(rebuilt) == repr(tree)  # tuples stay tuples


@pytest.mark.parametrize(
    "skeleton",
    [
        5,
        data_messages.Branch("dict", ["a"], []),
        data_messages.Branch("dict", ["a", "a"], [0, 0]),
        data_messages.Branch("list", [], [0, 1, 2]),
    ],
)
def test_a_tree_that_does_not_fit_its_leaves_is_refused(skeleton: Any) -> None:
    with pytest.raises(DataError):
        data_tree.rebuild(skeleton, ["one"])


def test_what_is_more_than_paths_is_not_for_nodes() -> None:
    assert paths_of([1, 2], None) is None
    assert paths_of({"x": "a.npy", "y": [0.5]}, None) is None
    assert paths_of({1: "a.npy"}, None) is None
    found = paths_of({"x": "a.npy", "y": Path("b.npy")}, None)
    assert found is not None
    assert [p.path for p in found[1]] == [os.path.abspath(p) for p in ("a.npy", "b.npy")]


# --- fingerprints ---


def test_a_fingerprint_covers_names_sizes_heads_and_blocks(tmp_path: Path) -> None:
    data = bytearray(os.urandom(400_000))
    (tmp_path / "x").write_bytes(data)
    same = fingerprints.fingerprint(tmp_path, [tmp_path / "x"])
    assert same == fingerprints.fingerprint(tmp_path, [tmp_path / "x"])
    (tmp_path / "y").write_bytes(data)
    assert "different bytes" in str(
        fingerprints.difference(same, fingerprints.fingerprint(tmp_path, [tmp_path / "y"]))
    )
    for at in (0, 60_000, len(data) - 1):  # the head, and the last block
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "x").write_bytes(changed)
        assert fingerprints.difference(same, fingerprints.fingerprint(tmp_path, [tmp_path / "x"]))
    (tmp_path / "x").write_bytes(data[:-1])
    other = fingerprints.fingerprint(tmp_path, [tmp_path / "x"])
    assert fingerprints.difference(same, other) == "400000 bytes here, 399999 there"
    two = fingerprints.fingerprint(tmp_path, [tmp_path / "x", tmp_path / "y"])
    assert fingerprints.difference(same, two) == "1 files here, 2 there"


@given(st.integers(0, 200_000), st.integers(2, 40))
def test_numbers_are_spread_from_the_first_to_the_last(count: int, most: int) -> None:
    found = fingerprints.spread(count, most)
    assert len(found) == min(count, most) == len(set(found))
    assert not count or (found[0], found[-1]) == (0, count - 1)


# --- folders ---


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    (tmp_path / "data" / "x.npy").write_bytes(b"x")
    (tmp_path / "data" / "a.tar").write_bytes(b"a")
    (tmp_path / "data2").mkdir()
    (tmp_path / "data2" / "x.npy").write_bytes(b"other")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "data" / "out.tar").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "up").symlink_to(tmp_path)
    (tmp_path / "data" / "in.npy").symlink_to(tmp_path / "data" / "x.npy")
    return tmp_path / "data"


def test_what_lies_below_a_served_folder_is_found(served: Path) -> None:
    folders = Folders(named([str(served)]))
    for name in ("x.npy", "in.npy", "inner", "inner/../x.npy", "up/data/x.npy"):
        assert len(folders.resolve(f"{served}/{name}")) == 1
    assert folders.resolve(f"{served}/a*.tar") == [served / "a.tar"]
    assert folders.resolve(str(served)) == [served]


@pytest.mark.parametrize(
    "name",
    ["../secret", "out.tar", "up/secret", "up/nothing", "../data2/x.npy", "../*", "up/*"],
)
def test_what_leads_out_of_it_is_refused_in_one_way(served: Path, name: str) -> None:
    """Whether it is there or not: a client must not learn that."""
    with pytest.raises(FolderError, match=r"not below a folder that this node serves.*--data"):
        Folders(named([str(served)])).resolve(f"{served}/{name}")


def test_a_pattern_does_not_tell_what_links_lead_to(served: Path) -> None:
    """`*/secret` goes through a link to a folder outside, where a file of that name is."""
    folders = Folders(named([str(served)]))
    assert (served / "up" / "secret").exists()
    answers = set()
    for name in ("*/secret", "*/nothing", "o*.tar", "u*/s*"):
        with pytest.raises(FolderError) as raised:
            folders.resolve(f"{served}/{name}")
        answers.add(str(raised.value).replace(name, "…"))
    assert answers == {f"no file matches {served}/… at the node"}
    assert folders.resolve(f"{served}/*.tar") == [served / "a.tar"], (
        "the link beside it is left out"
    )


@pytest.mark.parametrize("name", ["x.npy", "", "a\0b", "./x.npy"])
def test_only_absolute_paths_mean_something_elsewhere(served: Path, name: str) -> None:
    with pytest.raises(FolderError, match="not an absolute path"):
        Folders(named([str(served)])).resolve(name)


def test_patterns_do_not_go_up(served: Path) -> None:
    with pytest.raises(FolderError, match="must not contain"):
        Folders(named([str(served)])).resolve(f"{served}/inn*/../../secret")


def test_pipes_and_devices_are_not_opened(served: Path) -> None:
    os.mkfifo(served / "pipe.npy")  # whoever opened it would wait for ever
    with pytest.raises(FolderError, match="neither a file nor a folder"):
        Folders(named([str(served)])).resolve(f"{served}/pipe.npy")


def test_a_node_without_folders_serves_nothing(served: Path) -> None:
    with pytest.raises(FolderError, match="--data"):
        Folders(()).resolve(f"{served}/x.npy")


def test_what_an_owner_names_is_a_folder(served: Path) -> None:
    assert named([str(served), f"{served}/inner/.."]) == [os.path.realpath(served)]
    with pytest.raises(PoolError, match="is not a folder"):
        named([str(served / "x.npy")])


def test_where_a_pattern_begins() -> None:
    assert split_pattern("/data/[ab]/x*.tar") == ("/data", "[ab]/x*.tar")
    assert split_pattern("/data/x.npy") == ("/data/x.npy", "")
