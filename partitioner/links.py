"""How long messages between ranks take: measured, per size, never one constant."""

from __future__ import annotations

import datetime
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from partitioner.errors import SetupError
from partitioner.specs import Frozen, Link
from partitioner.wire import Channel, End, Receiver, Sender, Tag

SIZES_BYTES = (64, 4096, 65536, 2**20, 2**22, 2**24)


def loopback(repeats: int = 7) -> Link:
    """Payloads between two ranks of this machine, as a pipeline sends them, without starting processes.

    Two threads are the ranks. One computes, sends over the executor's own wire, and goes on computing, as a stage does;
    the other waits, its receive posted. Median of the seconds from the end of the computation until the other can use
    what came. Takes about half a second.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    sent_at: dict[tuple[int, int], float] = {}
    came_at: dict[tuple[int, int], float] = {}
    failures: list[BaseException] = []
    patience = datetime.timedelta(seconds=20)

    def sends(group: Any) -> None:
        sender, work = Sender(Channel(1, End(group, 1))), torch.ones(384, 384)
        for size in SIZES_BYTES:
            message = torch.zeros(size // 4)
            for k in range(repeats):
                for _ in range(2):
                    work @ work
                sent_at[size, k] = time.perf_counter()
                sender.send(Tag("F", size, k), b"", [message])
                while (size, k) not in came_at and not failures:
                    work @ work
                sender.flush()

    def receives(group: Any) -> None:
        receiver = Receiver(Channel(0, End(group, 0)), torch.device("cpu"))
        for size in SIZES_BYTES:
            for k in range(repeats):
                receiver.receive(Tag("F", size, k))
                came_at[size, k] = time.perf_counter()
                receiver.expect()

    both_done = threading.Barrier(2, timeout=patience.total_seconds())

    def rank(number: int, does: Callable[[Any], None]) -> None:
        try:
            group = dist.ProcessGroupGloo(store, number, 2, patience)
            does(group)
            both_done.wait()  # a group that ends takes the other's connection along, whatever that still waits for
        except threading.BrokenBarrierError:
            pass  # the other failed, and has said why
        except BaseException as error:
            failures.append(error)
            both_done.abort()

    threads = [
        threading.Thread(target=rank, args=(number, does), daemon=True) for number, does in ((0, sends), (1, receives))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    if failures:
        raise failures[0]
    taken = [  # the first of a size agrees on its layout
        statistics.median(came_at[size, k] - sent_at[size, k] for k in range(1, repeats)) for size in SIZES_BYTES
    ]
    rising = [min(taken[k:]) for k in range(len(taken))]  # a smaller payload takes no longer: what does was disturbed
    return Link(sizes_bytes=SIZES_BYTES, seconds=tuple(rising), source="payloads between two threads of this machine")


def between_cuda_devices(repeats: int = 7) -> Link:
    """Copies from device 0 to device 1 of this machine, or within device 0 where it is the only one."""
    source, target = torch.device("cuda", 0), torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    seconds: list[float] = []
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


class RankLinks(Frozen):
    """What messages between the ranks of a job take, measured by the ranks themselves."""

    num_ranks: int
    device: str
    within: Link | None
    """Point-to-point between two ranks of one machine; None where each machine has only one."""
    between: Link | None
    """Point-to-point between two machines; None where there is only one."""
    all_reduce: Link
    """All-reduce over all ranks, by the size of what each rank gives."""


def between_ranks(repeats: int = 7, sizes_bytes: tuple[int, ...] = SIZES_BYTES) -> RankLinks:
    """Measure the links of the default process group: the same call on every rank, and the same answer.

    Point-to-point as stages talk: a small message that says what comes, then the data; half of the median round trip
    between the first two ranks of a machine, and the first ranks of two machines. All-reduce of float32: the median of
    the slowest rank's time. On CUDA the data goes through the group's CUDA backend. A SetupError where there is no
    process group of two ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise SetupError("links are measured between two or more ranks: start this with torchrun, or launch(..., 2)")
    on_cuda = torch.cuda.is_available() and dist.get_backend() != "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, socket.gethostname())
    ranks = range(len(machines))
    within = next(((a, b) for a in ranks for b in ranks if a < b and machines[a] == machines[b]), None)
    between = next(((a, b) for a in ranks for b in ranks if a < b and machines[a] != machines[b]), None)
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    return RankLinks(
        num_ranks=len(machines),
        device=name,
        within=within and _point_to_point(within, device, repeats, sizes_bytes, "two ranks of one machine"),
        between=between and _point_to_point(between, device, repeats, sizes_bytes, "ranks of two machines"),
        all_reduce=_all_reduce(device, repeats, sizes_bytes),
    )


def _point_to_point(
    pair: tuple[int, int], device: torch.device, repeats: int, sizes_bytes: tuple[int, ...], what: str
) -> Link:
    rank = dist.get_rank()

    def there_and_back(message: torch.Tensor) -> None:
        note = torch.zeros(64, dtype=torch.uint8, device=device)
        for sender, receiver in (pair, pair[::-1]):
            for part in (note, message):
                if rank == sender:
                    dist.send(part, receiver)
                elif rank == receiver:
                    dist.recv(part, sender)

    return _timed(there_and_back, 0.5, pair[0], device, repeats, sizes_bytes, f"measured between {what}")


def _all_reduce(device: torch.device, repeats: int, sizes_bytes: tuple[int, ...]) -> Link:
    what = f"all-reduce measured over {dist.get_world_size()} ranks"
    return _timed(lambda message: dist.all_reduce(message), 1.0, None, device, repeats, sizes_bytes, what)


def _timed(
    exchange: Callable[[torch.Tensor], Any],
    share: float,
    teller: int | None,
    device: torch.device,
    repeats: int,
    sizes_bytes: tuple[int, ...],
    source: str,
) -> Link:
    """A table of `share` of the median time by size; each time is the teller's, or that of the slowest rank."""
    seconds: list[float] = []
    for size in sizes_bytes:
        message = torch.zeros(max(1, size // 4), device=device)
        exchange(message)
        times = torch.zeros(repeats, dtype=torch.float64)
        for k in range(repeats):
            dist.barrier()
            _settle(device)
            start = time.perf_counter()
            exchange(message)
            _settle(device)
            times[k] = time.perf_counter() - start
        times = times.to(device)
        if teller is None:
            dist.all_reduce(times, dist.ReduceOp.MAX)
        else:
            dist.broadcast(times, teller)
        seconds.append(max([share * float(times.cpu().quantile(0.5)), *seconds[-1:]]))
    return Link(sizes_bytes=sizes_bytes, seconds=tuple(seconds), source=source)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
