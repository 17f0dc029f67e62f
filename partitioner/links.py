"""How long messages between ranks take: measured, per size, never one constant."""

from __future__ import annotations

import datetime
import statistics
import threading
import time

import torch
import torch.distributed as dist

from partitioner.specs import Link

SIZES_BYTES = (64, 4096, 65536, 2**20, 2**22, 2**24)


def loopback(repeats: int = 7) -> Link:
    """Point-to-point gloo between two ranks of this machine, without starting processes.

    Two process groups of two threads exchange messages of each size there and back; half of the median round trip.
    Takes about 0.3 s. Threads of one process share the interpreter, so small messages look slower than between
    processes.
    """
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroupGloo] = {}
    seconds: dict[int, float] = {}
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, number, 2, datetime.timedelta(seconds=20))
            groups[number] = group
            for size in SIZES_BYTES:
                message = torch.zeros(size, dtype=torch.uint8)
                times = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    for sender in (0, 1):
                        exchange = group.send if number == sender else group.recv
                        exchange([message], 1 - number, 0).wait()
                    times.append((time.perf_counter() - start) / 2)
                if number == 0:
                    seconds[size] = statistics.median(times)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    if failures:
        raise failures[0]
    rising = [max(seconds[size] for size in SIZES_BYTES[: k + 1]) for k in range(len(SIZES_BYTES))]
    return Link(sizes_bytes=SIZES_BYTES, seconds=tuple(rising), source="gloo between two threads of this machine")


def between_cuda_devices(repeats: int = 7) -> Link:
    """Copies from device 0 to device 1 of this machine, or within device 0 where it is the only one."""
    source, target = torch.device("cuda", 0), torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    seconds = []
    for size in SIZES_BYTES:
        message = torch.zeros(size, dtype=torch.uint8, device=source)
        arrived = torch.empty(size, dtype=torch.uint8, device=target)
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize(source)
            start = time.perf_counter()
            arrived.copy_(message)
            torch.cuda.synchronize(target)
            times.append(time.perf_counter() - start)
        seconds.append(max([statistics.median(times), *seconds[-1:]]))
    return Link(sizes_bytes=SIZES_BYTES, seconds=tuple(seconds), source="copies between this machine's CUDA devices")
