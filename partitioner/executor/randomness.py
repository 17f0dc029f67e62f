"""Random numbers of a forward: repeatable for the seed, different between stages and replicas where they should be.

    torch            differs between steps, micro-batches, stages and replicas: dropout masks are independent
    random, numpy    alike on all ranks of a replica, which run the same Python: a layer dropped here is dropped there

The caller's own generators are as they were before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Randomness:
    """Seeds for each forward of one rank."""

    def __init__(self, seed: int, stage: int, replica: int, device: torch.device) -> None:
        self._seed, self._stage, self._replica, self._device = seed, stage, replica, device

    @contextmanager
    def of(self, kind: str, step: int, microbatch: int) -> Iterator[None]:
        """Inside: the random numbers of this forward ("F" training, "E" evaluation)."""
        states = random.getstate(), np.random.get_state()
        devices = [self._device] if self._device.type == "cuda" else []
        shared = self._number(kind, step, microbatch, self._replica)
        with torch.random.fork_rng(devices=devices):
            number = self._number(kind, step, microbatch, self._replica, self._stage)
            torch.default_generator.manual_seed(number)  # torch.manual_seed asks after every kind of device: 0.1 ms
            if devices:
                torch.cuda.manual_seed(number)
            random.seed(shared)
            np.random.seed(shared % 2**32)
            try:
                yield
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])

    def _number(self, *parts: int | str) -> int:
        text = " ".join(map(str, (self._seed, *parts)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
