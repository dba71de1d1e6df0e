"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# What nobody foresaw: gRPC answers it as UNKNOWN, asyncio forgets it; both only log it.
_UNFORESEEN = {
    "grpc._cython.cygrpc": "raised by servicer method",
    "asyncio": "exception was never retrieved",
}


@pytest.fixture(autouse=True)
def nothing_unforeseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No handler of a service in this process raised what it does not translate, no task's error
    went unseen."""
    yield
    seen = [
        f"{record.getMessage()}: {record.exc_text or record.exc_info}"
        for when in ("setup", "call", "teardown")
        for record in caplog.get_records(when)
        if _UNFORESEEN.get(record.name, "\0") in record.getMessage()
    ]
    assert not seen
