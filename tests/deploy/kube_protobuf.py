"""The protobuf messages that Helm's typed clients send: Secrets, ConfigMaps and Namespaces.

`k8s\\0`, then a `runtime.Unknown` with the type and the raw object; field numbers as in Kubernetes'
generated.proto files.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
_METADATA_TEXTS = {1: "name", 2: "generateName", 3: "namespace", 6: "resourceVersion"}
_METADATA_MAPS = {11: "labels", 12: "annotations"}


def decode(body: bytes) -> dict[str, Any]:
    """The object as JSON has it."""
    unknown = dict(_fields(body[len(MAGIC) :]))
    kind = dict(_fields(unknown[1]))
    found: dict[str, Any] = {
        "apiVersion": kind[1].decode(),
        "kind": kind[2].decode(),
        "metadata": {},
    }
    for number, value in _fields(unknown[2]):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif found["kind"] == "Secret" and number == 2:
            key, data = _entry(value)
            found.setdefault("data", {})[key] = base64.b64encode(data).decode()
        elif found["kind"] == "Secret" and number == 3:
            found["type"] = value.decode()
        elif found["kind"] == "ConfigMap" and number == 2:
            key, data = _entry(value)
            found.setdefault("data", {})[key] = data.decode()
    return found


def _metadata(message: bytes) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number, value in _fields(message):
        if number in _METADATA_TEXTS and value:
            metadata[_METADATA_TEXTS[number]] = value.decode()
        elif number in _METADATA_MAPS:
            key, text = _entry(value)
            metadata.setdefault(_METADATA_MAPS[number], {})[key] = text.decode()
    return metadata


def _entry(message: bytes) -> tuple[str, bytes]:
    pair = dict(_fields(message))
    return pair.get(1, b"").decode(), pair.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            yield number, varint()
        else:
            size = {1: 8, 5: 4}.get(wire) or varint()
            yield number, message[at : at + size]
            at += size
