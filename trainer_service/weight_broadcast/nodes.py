"""Who has what, since when, and from whom: the broadcaster's view of the fleet, from subscriptions
and reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from leeway.v1 import weights_pb2 as pb
from trainer_service.weight_broadcast.tree import RelayTree

log = structlog.get_logger(__name__)

# A node that has been away for so long is forgotten.
_FORGOTTEN_AFTER_SECONDS = 3600.0


@dataclass(slots=True)
class Node:
    node_id: str
    digest: str
    report: pb.ReportRequest
    since: float
    subscriptions: int = 0
    alarmed: bool = False


class Nodes:
    """The registry; a node is live while it is subscribed.

    Args:
        most_behind: A live node that lags by more versions is an alarm.
    """

    def __init__(
        self, tree: RelayTree, most_behind: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tree = tree
        self._most_behind = most_behind
        self._clock = clock
        self._nodes: dict[str, Node] = {}

    def subscribed(self, request: pb.SubscribeRequest) -> Node:
        """A node has opened a subscription and says what it holds."""
        node = self._of(request.node_id)
        node.subscriptions += 1
        node.digest = request.have_digest
        node.since = self._clock()
        node.report.version = request.have_version
        self._tree.join(node.node_id, request.cluster, request.relay_address)
        return node

    def unsubscribed(self, node: Node) -> None:
        node.subscriptions -= 1
        if not node.subscriptions:
            node.since = self._clock()
            self._tree.leave(node.node_id)

    def parent(self, node_id: str) -> str:
        """The address from which a node fetches; empty: the publisher itself."""
        return self._tree.parent(node_id)

    def reparented(self, request: pb.ReparentRequest) -> None:
        """A node cannot fetch from its parent."""
        self._tree.avoid(request.node_id, request.failed)

    def reported(self, request: pb.ReportRequest) -> None:
        node = self._of(request.node_id)
        if request.state == pb.NODE_STATE_APPLIED:
            node.digest = request.digest
        node.report = request
        node.since = self._clock()

    def in_use(self) -> set[str]:
        """The digests that live nodes hold."""
        return {node.digest for node in self._nodes.values() if node.subscriptions}

    def lags(self, newest: int) -> list[int]:
        """By how many versions each live node is behind."""
        return [newest - n.report.version for n in self._nodes.values() if n.subscriptions]

    def lagging(self, newest: int) -> int:
        """How many live nodes are too far behind; says so, once each time that one falls there."""
        count = 0
        for node in self._nodes.values():
            lag = newest - node.report.version
            alarmed = node.subscriptions > 0 and lag > self._most_behind
            if alarmed and not node.alarmed:
                log.warning(
                    "a node lags",
                    node=node.node_id,
                    versions=lag,
                    state=pb.NodeState.Name(node.report.state),
                    seconds_ago=round(self._clock() - node.since),
                )
            node.alarmed = alarmed
            count += alarmed
        return count

    def rows(self) -> list[pb.NodeWeights]:
        now = self._clock()
        return [
            pb.NodeWeights(
                node_id=node.node_id,
                version=node.report.version,
                state=node.report.state,
                message=node.report.message,
                seconds_ago=now - node.since,
                parent=self._tree.parent(node.node_id),
                connected=node.subscriptions > 0,
                stage_seconds=node.report.stage_seconds,
                pause_seconds=node.report.pause_seconds,
                bytes_received=node.report.bytes_received,
            )
            for node in self._nodes.values()
        ]

    def _of(self, node_id: str) -> Node:
        now = self._clock()
        for known in [n for n in self._nodes.values() if not n.subscriptions]:
            if now - known.since > _FORGOTTEN_AFTER_SECONDS:
                del self._nodes[known.node_id]
        if node_id not in self._nodes:
            self._nodes[node_id] = Node(node_id, "", pb.ReportRequest(node_id=node_id), now)
        return self._nodes[node_id]
