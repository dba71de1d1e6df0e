"""Commands to the arguments of the Lua scripts, and their replies back to results, in MessagePack.

A dataclass becomes a map without its `None`s; bytes are passed beside it, and their number stands
in the map. A push's entries, of which there are hundreds, become a map of columns: half the cost on
both sides. Lua writes an empty map as an empty list, and a float without a fraction as an integer.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from trajectory_queue.commands import Command, Entry

R = TypeVar("R")


def encode(command: Command[Any]) -> tuple[bytes, list[bytes]]:
    """The command's arguments and its blobs."""
    blobs: list[bytes] = []
    return msgpack.packb(_encode(command, blobs)), blobs


def unpack(reply: bytes) -> dict[str, Any]:
    """A script's reply without its blobs."""
    tree: dict[str, Any] = msgpack.unpackb(reply)
    return tree


def decode(command: Command[R], tree: Any, blobs: Sequence[bytes]) -> R:
    """The command's result, from what stands in its reply and blobs."""
    result: R = _result_decoder(cast("Hashable", type(command)))(tree, blobs)
    return result


@functools.cache
def _result_decoder(command: Hashable) -> Any:
    """Of the R in Command[R]."""
    (base,) = cast("Any", command).__orig_bases__
    return _decoder(get_args(base)[0])


_PLAIN = frozenset({str, int, float, bool})


def _encode(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes:
        blobs.append(value)
        return len(blobs) - 1
    if kind is tuple:
        if value and type(value[0]) is Entry:
            return _columns(value, blobs)
        return [_encode(item, blobs) for item in value]
    if isinstance(value, Enum):
        return value.value
    return {
        name: item if type(item) in _PLAIN else _encode(item, blobs)
        for name in _names(cast("Hashable", kind))
        if (item := getattr(value, name)) is not None
    }


def _columns(entries: tuple[Entry, ...], blobs: list[bytes]) -> dict[str, list[Any]]:
    columns = {name: [getattr(entry, name) for entry in entries] for name in _names(Entry)}
    first = len(blobs)
    blobs += columns["payload"]
    return columns | {"payload": list(range(first, len(blobs)))}


@functools.cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast("Any", kind)))


@functools.cache
def _decoder(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is bytes:
        return lambda tree, blobs: blobs[tree]
    if origin in (Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        return _decoder(inner)
    if origin is tuple:
        item = _decoder(arguments[0])
        return lambda tree, blobs: tuple(item(element, blobs) for element in tree)
    if origin is dict:
        value = _decoder(arguments[1])
        return lambda tree, blobs: {k: value(element, blobs) for k, element in dict(tree).items()}
    if kind in (str, int, float, bool) or issubclass(kind, Enum):
        return lambda tree, _blobs: kind(tree)
    decoders = {name: _decoder(hint) for name, hint in get_type_hints(kind).items()}
    return lambda tree, blobs: kind(
        **{name: decoders[name](element, blobs) for name, element in dict(tree).items()}
    )
