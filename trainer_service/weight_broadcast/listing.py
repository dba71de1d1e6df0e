"""Who has what, since when: what `leeway weights` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leeway import rpc
from leeway.config import SecurityConfig
from leeway.v1 import weights_pb2 as pb
from leeway.v1 import weights_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node.

    Attributes:
        state: staged, applied or failed; empty before its first report.
        lag: Versions behind the newest.
        seconds_ago: Since it reported `state`, or came or went.
        parent: Address of the node that it fetches from; empty: the publisher.
    """

    node_id: str
    version: int
    state: str
    lag: int
    connected: bool
    seconds_ago: float
    parent: str
    bytes_received: int
    stage_seconds: float
    pause_seconds: float
    message: str


async def list_nodes(
    address: str, security: SecurityConfig, deadline_seconds: float = 10.0
) -> tuple[int, list[NodeRow]]:
    """The newest version and every node that was there of late, those furthest behind first.

    Raises:
        DeadlineError: the broadcast at `address` does not answer.
    """
    async with rpc.connect(address, security) as channel:
        stub: Any = pb_grpc.WeightBroadcastStub(channel)
        listing: pb.ListNodesResponse = await rpc.call(
            stub.ListNodes,
            pb.ListNodesRequest(),
            what="nodes of the weight broadcast",
            deadline_seconds=deadline_seconds,
        )
    rows = [_row(node, listing.version) for node in listing.nodes]
    return listing.version, sorted(rows, key=lambda row: (-row.lag, row.node_id))


def _row(node: pb.NodeWeights, newest: int) -> NodeRow:
    state = pb.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()
    return NodeRow(
        node_id=node.node_id,
        version=node.version,
        state="" if state == "unspecified" else state,
        lag=newest - node.version,
        connected=node.connected,
        seconds_ago=node.seconds_ago,
        parent=node.parent,
        bytes_received=node.bytes_received,
        stage_seconds=node.stage_seconds,
        pause_seconds=node.pause_seconds,
        message=node.message,
    )
