"""How many decode steps to submit together. The host plans and lands them once; whoever comes next waits for all."""

from __future__ import annotations

SHORTEST, LONGEST = 0.005, 0.032  # seconds that decode steps may take which are submitted together
SHARE = 0.1  # of the time for which nothing came: between the two bounds, how long they may take


class Pace:
    """Counts in seconds of the device, as the results tell them, so that a replayed log is paced alike."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 0.0  # what a decode step took, the last time; 0 if the device cannot say
        self._quiet = 0.0  # what all steps took since a request came

    def came(self) -> None:
        """A request has come, so others may."""
        self._quiet = 0.0

    def took(self, seconds: float, decode_steps: int) -> None:
        """A plan has landed. decode_steps: how many steps it was, none if prompts were computed in it."""
        self._quiet += seconds
        if decode_steps:
            self._step = seconds / decode_steps

    def steps(self) -> int:
        """How many to submit now, at least one."""
        if self._most == 1 or not self._step:
            return 1
        seconds = min(max(self._quiet * SHARE, SHORTEST), LONGEST)
        return max(min(int(seconds / self._step), self._most), 1)
