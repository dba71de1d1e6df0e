"""The relay tree: from whom each node fetches.

Nodes that relay and can reach each other form a cluster. In each, one node fetches from the
publisher, so that weights cross between clusters once; the others fetch from nodes above them, each
of which serves a few. A node joins as high as there is room. When one leaves, those below it join
anew, with all that hangs on them.

Invariants: no node is its own ancestor; a node has at most `fanout` children; a parent can relay,
is of the same cluster, and is not one that its child avoids.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Place:
    cluster: str
    address: str
    avoid: set[str] = field(default_factory=set)
    parent: str | None = None
    children: set[str] = field(default_factory=set)


class RelayTree:
    """See the module. Nodes are known by their ids."""

    def __init__(self, fanout: int) -> None:
        self._fanout = fanout
        self._places: dict[str, _Place] = {}

    def join(self, node_id: str, cluster: str = "", address: str = "") -> None:
        """A node comes, or comes back; what hangs on it keeps hanging on it if it still can.

        Args:
            address: Where it relays; a node that does not fetches from the publisher.
        """
        before = self._places.get(node_id)
        if before is not None:
            if (before.cluster, before.address) == (cluster, address):
                return
            self.leave(node_id)
        self._places[node_id] = _Place(cluster, address)
        self._attach(node_id)

    def avoid(self, node_id: str, address: str) -> None:
        """A node cannot fetch from an address; it gets another parent if that is its parent's."""
        place = self._places.get(node_id)
        if place is None:
            return
        place.avoid.add(address)
        if self.parent(node_id) == address:
            self._detach(node_id)
            self._attach(node_id)

    def leave(self, node_id: str) -> None:
        """A node goes; those below it find new parents. Unknown nodes are ignored."""
        if node_id not in self._places:
            return
        self._detach(node_id)
        orphans = sorted(self._places.pop(node_id).children)
        for orphan in orphans:
            self._places[orphan].parent = None
        for orphan in orphans:
            self._attach(orphan)

    def parent(self, node_id: str) -> str:
        """The address of the node's parent; empty: the publisher itself."""
        place = self._places.get(node_id)
        if place is None or place.parent is None:
            return ""
        return self._places[place.parent].address

    def _attach(self, node_id: str) -> None:
        place = self._places[node_id]
        if not place.address:
            return
        rooms = [
            (self._depth(other_id), other_id)
            for other_id, other in self._places.items()
            if other.address
            and other.cluster == place.cluster
            and other.address not in place.avoid
            and len(other.children) < self._fanout
            and node_id not in self._ancestry(other_id)
        ]
        if rooms:
            place.parent = min(rooms)[1]
            self._places[place.parent].children.add(node_id)

    def _detach(self, node_id: str) -> None:
        place = self._places[node_id]
        if place.parent is not None:
            self._places[place.parent].children.discard(node_id)
            place.parent = None

    def _depth(self, node_id: str) -> int:
        return len(self._ancestry(node_id))

    def _ancestry(self, node_id: str) -> list[str]:
        """The node, its parent, and so on up."""
        line = [node_id]
        while (parent := self._places[line[-1]].parent) is not None:
            line.append(parent)
        return line
