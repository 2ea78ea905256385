"""Who goes first. A policy gives each request a number, and the smallest is served next."""

from __future__ import annotations

from collections.abc import Callable

from fastgraph.control.states import Request

# It is asked once for each request, when that is submitted. Of equals the older one goes first.
Policy = Callable[[Request], float]


def first_come(request: Request) -> float:
    """In the order in which requests were submitted: nobody is overtaken, so nobody starves."""
    return 0.0
