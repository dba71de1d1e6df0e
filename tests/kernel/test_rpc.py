"""Calls over what lies between two clusters: load balancers that reset streams."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import pytest

from leeway import rpc
from leeway.config import SecurityConfig
from leeway.v1 import queue_pb2 as pb
from leeway.v1 import queue_pb2_grpc

# HTTP/2 (RFC 9113): types and flags of frames.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_PREFACE_BYTES = 24
# HPACK (RFC 7541): ":status: 200" from the static table, then literals that are not indexed.
_STATUS_200 = b"\x88"
_EMPTY_MESSAGE = bytes(5)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def answer(stream: int) -> bytes:
    """An empty message, and status OK."""
    head = _STATUS_200 + header(b"content-type", b"application/grpc")
    return (
        frame(_HEADERS, _END_HEADERS, stream, head)
        + frame(_DATA, 0, stream, _EMPTY_MESSAGE)
        + frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, header(b"grpc-status", b"0"))
    )


@contextlib.asynccontextmanager
async def resetting(code: int) -> AsyncIterator[str]:
    """The address of what resets the first call with an HTTP/2 error code and answers the next."""
    calls = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        writer.write(frame(_SETTINGS, 0, 0))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(_PREFACE_BYTES)
            while True:
                length, kind, flags, stream = struct.unpack(
                    ">IBBI", b"\x00" + await reader.readexactly(9)
                )
                await reader.readexactly(length)
                if kind == _SETTINGS and not flags & _ACK:
                    writer.write(frame(_SETTINGS, _ACK, 0))
                if kind == _HEADERS:
                    calls += 1
                    reset = frame(_RST_STREAM, 0, stream, struct.pack(">I", code))
                    writer.write(reset if calls == 1 else answer(stream))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield f"{host}:{port}"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(0, id="NO_ERROR"),
        pytest.param(1, id="PROTOCOL_ERROR"),
        pytest.param(2, id="INTERNAL_ERROR"),
        pytest.param(7, id="REFUSED_STREAM"),
        pytest.param(8, id="CANCEL"),
    ],
)
async def test_a_call_whose_stream_was_reset_is_made_again(code: int) -> None:
    async with (
        resetting(code) as address,
        rpc.connect(address, SecurityConfig()) as channel,
    ):
        stub = queue_pb2_grpc.TrajectoryQueueStub(channel)
        status = await rpc.call(
            stub.Status, pb.StatusRequest(), what="read the status", deadline_seconds=20
        )
        assert status == pb.StatusResponse()
