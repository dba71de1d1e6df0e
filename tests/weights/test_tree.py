"""The relay tree stays a tree whatever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_service.weight_broadcast.tree import RelayTree

FANOUT = 3
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "avoid"]),
        st.integers(0, 20),
        st.sampled_from(["east", "west"]),
        st.booleans(),
    ),
    max_size=60,
)


def parents(tree: RelayTree, nodes: dict[str, tuple[str, str]]) -> dict[str, str]:
    """The id of each node's parent; empty for the publisher."""
    ids = {address: node_id for node_id, (_, address) in nodes.items() if address}
    return {node_id: ids.get(tree.parent(node_id), "") for node_id in nodes}


@given(MOVES)
def test_it_stays_a_tree(moves: list[tuple[str, int, str, bool]]) -> None:
    tree = RelayTree(FANOUT)
    nodes: dict[str, tuple[str, str]] = {}
    avoided: dict[str, set[str]] = {}
    for move, number, cluster, relays in moves:
        node_id = f"n{number}"
        if move == "leave":
            tree.leave(node_id)
            nodes.pop(node_id, None)
            avoided.pop(node_id, None)
        elif move == "join":
            place = (cluster, f"address-{node_id}" if relays else "")
            if nodes.get(node_id) != place:
                avoided[node_id] = set()
            nodes[node_id] = place
            tree.join(node_id, *place)
        elif node_id in nodes:
            avoided[node_id].add(tree.parent(node_id))
            tree.avoid(node_id, tree.parent(node_id))
    above = parents(tree, nodes)
    for node_id, parent in above.items():
        line = [node_id]
        while above[line[-1]]:
            line.append(above[line[-1]])
            assert len(line) <= len(nodes), "a circle"
        if parent:
            assert nodes[parent][0] == nodes[node_id][0], "another cluster"
            assert nodes[parent][1] not in avoided[node_id]
        assert list(above.values()).count(node_id) <= FANOUT


def test_one_copy_a_cluster_leaves_the_publisher() -> None:
    tree = RelayTree(4)
    nodes = {f"n{i:02}": ("east" if i % 2 else "west", f"a{i}") for i in range(64)}
    for node_id, (cluster, address) in nodes.items():
        tree.join(node_id, cluster, address)
    above = parents(tree, nodes)
    assert list(above.values()).count("") == 2
    for node_id in list(nodes)[::7]:
        tree.leave(node_id)
        del nodes[node_id]
    assert list(parents(tree, nodes).values()).count("") == 2


def test_without_relays_everybody_fetches_from_the_publisher() -> None:
    tree = RelayTree(4)
    for number in range(10):
        tree.join(f"n{number}")
    assert all(tree.parent(f"n{number}") == "" for number in range(10))
