"""Pauses between attempts: growing, capped and jittered, so that a thousand clients do not come back at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

jitter = random.Random()  # our own: a client must not draw from the generator that its user has seeded


@dataclass(slots=True)
class Backoff:
    """`next()` gives the seconds to wait before the next attempt: first, first·2, … up to `limit`, each ±25 %."""

    first: float = 0.05  # seconds
    limit: float = 2.0  # seconds
    attempts: int = 0

    def next(self) -> float:
        pause = min(self.first * 2.0 ** min(self.attempts, 30), self.limit)
        self.attempts += 1
        return pause * jitter.uniform(0.75, 1.25)

    def reset(self) -> None:
        self.attempts = 0
