"""Which nodes of an engine get an agent, and that their names stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.engines.placer import Decision, EngineNode, PerNode, decide

CPU = PerNode(devices=("cpu",))


def node(id: str, address: str, host: str = "vm", gpus: int = 0, **labels: str) -> EngineNode:
    return EngineNode(id, address, host, gpus, labels)


def names(decision: Decision) -> dict[str, str]:
    return {place.node_id: place.name for place in decision.start}


NODES = st.lists(
    st.builds(
        EngineNode, st.uuids().map(str), st.sampled_from(["a1", "a2", "a3", "a4"]),
        st.sampled_from(["vm", "VM.local", "gpu-1", "", "§"]), st.integers(0, 3),
    ),
    max_size=6, unique_by=lambda n: n.id,
)  # fmt: skip


@given(st.lists(NODES, min_size=1, max_size=5), st.sampled_from([None, 0, 2]))
def test_each_machine_has_one_agent_and_a_name_of_its_own(
    looks: list[list[EngineNode]], gpus: int | None
) -> None:
    per_node = PerNode(gpus, ("cpu",))
    agents: dict[str, str] = {}
    kept: dict[str, str] = {}
    for nodes in looks:
        by_id = {n.id: n for n in nodes}
        before = dict(kept)
        done = decide(nodes, set(agents), kept, per_node)
        for gone in done.end:
            del agents[gone]
        for place in done.start:
            assert place.node_id not in agents
            agents[place.node_id] = place.name
            fits = by_id[place.node_id].gpus
            assert place.gpus == (fits if gpus is None else gpus) <= fits
        kept = done.names
        assert set(agents) <= set(by_id)
        assert len({by_id[i].address for i in agents}) == len(agents)
        assert len(set(agents.values())) == len(agents)
        for address in {by_id[i].address for i in agents} & set(before):
            assert kept[address] == before[address], "a machine keeps its name"
        again = decide(nodes, set(agents), kept, per_node)
        assert not again.start
        assert not again.end


def test_a_node_that_starts_anew_has_its_name_again() -> None:
    first = decide([node("1", "a"), node("2", "b")], set(), {}, CPU)
    assert names(first) == {"1": "vm", "2": "vm-2"}
    lost = decide([node("1", "a")], {"1", "2"}, first.names, CPU)
    assert lost.end == ["2"]
    back = decide([node("1", "a"), node("3", "b")], {"1"}, lost.names, CPU)
    assert names(back) == {"3": "vm-2"}


def test_a_pod_that_moves_comes_back_as_the_node_that_it_was() -> None:
    first = decide([node("1", "a", "pod-0"), node("2", "b", "pod-1")], set(), {}, CPU)
    moved = decide([node("1", "a", "pod-0"), node("3", "c", "pod-1")], {"1"}, first.names, CPU)
    assert names(moved) == {"3": "pod-1"}
    assert moved.names == {"a": "pod-0", "c": "pod-1"}


def test_it_says_why_a_node_has_none() -> None:
    nodes = [node("1", "a", gpus=1, pool="x"), node("2", "b", pool="y"), node("3", "c", pool="x")]
    done = decide(nodes, set(), {}, PerNode(1, select={"pool": "x"}))
    assert names(done) == {"1": "vm"}
    assert done.without == {
        "vm (b)": "its label pool is y, not x",
        "vm (c)": "it has 0 GPU(s), and --gpus asks for 1",
    }
    assert decide([node("1", "a")], set(), {}, PerNode(None)).without == {
        "vm (a)": "it has no GPU, and --device names no CPU device"
    }
