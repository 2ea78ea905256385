"""Every error fastgraph raises on purpose: what was wrong, and what to do about it."""

from __future__ import annotations


class FastgraphError(Exception):
    """Base of all errors that a user can meet."""


class ConfigError(FastgraphError, ValueError):
    """An engine option or a combination of options that cannot work."""


class RequestError(FastgraphError, ValueError):
    """One request that cannot be served; every other request goes on."""


class ModelError(FastgraphError):
    """A checkpoint that cannot be found, read or matched with a model file."""


class TraceError(FastgraphError, ValueError):
    """A file that is no decision log, or one that cannot be replayed here."""


class EngineDied(FastgraphError, RuntimeError):
    """The engine thread failed; every caller that was waiting gets this, with the cause attached."""


class DeadLease(FastgraphError, AssertionError):
    """Pages were used after their lease had been moved or released: a bug in the scheduler, never in a request."""


class FastgraphWarning(UserWarning):
    """Something works, but not as well as it could; said once."""
