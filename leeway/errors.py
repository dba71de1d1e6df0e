"""Errors, typed by the boundary they come from.

Only `InfrastructureError` is ever retried. Every message names what was wrong (field and value) and
what the reader can do about it.
"""


class LeewayError(Exception):
    """Base of every error that Leeway raises on purpose."""


class ConfigError(LeewayError):
    """The configuration contradicts itself, or asks for what cannot work."""


class DataError(LeewayError):
    """A task, prompt or data row that no attempt can make right."""


class RewardError(LeewayError):
    """The user's reward function raised, hung, or returned something that is not a number."""


class EngineError(LeewayError):
    """The inference engine refused or broke a request."""


class WireError(LeewayError):
    """A message from the other side is malformed, too large, or fails its checksum."""


class FencedError(LeewayError):
    """This process's incarnation has been superseded; it must stop."""


class InfrastructureError(LeewayError):
    """A peer, a server or the network is away; trying again may succeed."""


class DeadlineError(InfrastructureError):
    """A wait reached its deadline. The message names what it waited for."""
