"""The patches that clients send: JSON merge patch (RFC 7386), and Kubernetes' strategic one.

A strategic patch merges lists of objects by a key, says their order (`$setElementOrder`), and what
goes (`$patch: delete`, `$retainKeys`).
"""

from __future__ import annotations

import copy
from typing import Any

_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "topologySpreadConstraints": ("topologyKey",),
    "ports": ("containerPort", "port"),
}


def merged(old: Any, patch: Any) -> Any:
    """A value with a patch of either kind applied."""
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return copy.deepcopy(_without_directives(patch))
    result = dict(old)
    for name in patch.get("$retainKeys", ()) and set(result) - set(patch["$retainKeys"]):
        del result[name]
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, list) and (key := _key(name, value, old.get(name))):
            order = patch.get(f"$setElementOrder/{name}", [])
            result[name] = _merged_list(key, old.get(name) or [], value, order)
        else:
            result[name] = merged(old.get(name), value)
    return result


def _merged_list(key: str, old: list[Any], patch: list[Any], order: list[Any]) -> list[Any]:
    items = {each[key]: each for each in old}
    for each in patch:
        if each.get("$patch") == "delete":
            items.pop(each[key], None)
        else:
            items[each[key]] = merged(items.get(each[key], {}), each)
    wanted = [each[key] for each in order if each[key] in items]
    return [items[name] for name in [*wanted, *(n for n in items if n not in wanted)]]


def _key(name: str, *lists: Any) -> str | None:
    for key in _KEYS.get(name, ()):
        if all(key in each for items in lists for each in items or ()):
            return key
    return None


def _without_directives(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not k.startswith("$") and v is not None}
        return {key: _without_directives(inner) for key, inner in kept.items()}
    return [_without_directives(each) for each in value] if isinstance(value, list) else value
