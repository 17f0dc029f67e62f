"""The models of torchgpipe's speed benchmarks as lists of children, with what each of them computes and moves.

ResNet-101 is 370 children, U-Net (5, 64) 241 and AmoebaNet-D (18, 256) 24, as their balances count them
(https://github.com/kakaobrain/torchgpipe/tree/v0.0.7/benchmarks). Figures are of one sample; a number is 4 bytes. Each
convolution is 2 operations a product; every child reads what it takes in and writes what it gives out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from partitioner.clock import Replica, StageCost, Transfer

PEAK_FLOPS = 11.76e12
"""Tesla P40, fp32; 346 GB/s of memory. https://images.nvidia.com/content/pdf/tesla/184427-Tesla-P40-Datasheet-NV-Final-Letter-Web.pdf"""
MEMORY_BYTES_PER_S = 346e9
PCIE_BYTES_PER_S = 11e9
"""PCIe 3.0 x16 after its protocol: assumed, the benchmarks do not state the links."""


WINOGRAD = 2.25
"""Times fewer products of a 3 x 3 convolution in tiles of 2 x 2 (Lavin & Gray 2016, https://arxiv.org/abs/1509.09308)."""


class Child(NamedTuple):
    flops: float
    moved: float
    """Numbers read and written."""
    out: float
    """Numbers that cross a cut behind it."""


def conv(c_in: int, c_out: int, size: int, kernel: int = 1, stride: int = 1) -> Child:
    """A square convolution; `size` of the image that comes in."""
    after = size // stride
    flops = 2 * c_in * c_out * kernel * after * after / (WINOGRAD if (kernel, stride) == (9, 1) else 1)
    return Child(flops, c_in * size * size + c_out * after * after, c_out * after * after)


def plain(channels: int, size: int, reads: float = 1.0, after: int | None = None) -> Child:
    """A norm, an activation, a pooling, a sum: bound by memory."""
    out = channels * (size if after is None else after) ** 2
    return Child(0.0, reads * channels * size * size + out, out)


def resnet101() -> list[Child]:
    children = [conv(3, 64, 224, 49, 2), plain(64, 112, 2), plain(64, 112), plain(64, 112, after=56)]
    c_in, size = 64, 56
    for planes, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(blocks):
            stride = 2 if block == 0 and planes > 64 else 1
            after = size // stride
            skip = c_in * size * size  # kept from the first child to the last but one
            one, two, three = (
                conv(c_in, planes, size),
                conv(planes, planes, size, 9, stride),
                conv(planes, 4 * planes, after),
            )
            inner = [
                Child(0.0, 0.0, c_in * size * size),
                one,
                plain(planes, size, 2),
                plain(planes, size),
                two,
                plain(planes, after, 2),
                plain(planes, after),
                three,
                plain(4 * planes, after, 2),
            ]
            children += [inner[0], *(child._replace(out=child.out + skip) for child in inner[1:])]
            down = conv(c_in, 4 * planes, size, 1, stride) if block == 0 else Child(0.0, 0.0, 0.0)
            total = plain(4 * planes, after, 2)
            children += [Child(down.flops, down.moved + total.moved, total.out), plain(4 * planes, after)]
            c_in, size = 4 * planes, after
    return [*children, plain(2048, 7, after=1), Child(0.0, 0.0, 2048), Child(2 * 2048 * 1000, 2048 * 1001, 1000)]


def unet(depth: int = 5, convs: int = 5, base: int = 64) -> list[Child]:
    children: list[Child] = []
    kept: list[float] = []

    def cell(c_in: int, middle: int, c_out: int, size: int) -> None:
        widths = [c_in, *[middle] * (convs - 1), c_out]
        for a, b in pairwise(widths):
            for child in (conv(a, b, size, 9), plain(b, size), plain(b, size, 2), plain(b, size)):
                children.append(child._replace(out=child.out + sum(kept)))

    size = 192
    for i in range(depth):
        width = base * 2**i
        cell(3 if i == 0 else width // 2, width, width, size)
        kept.append(width * size * size)
        children.append(Child(0.0, 0.0, width * size * size + sum(kept)))
        size //= 2
        children.append(Child(0.0, width * 5 * size * size, width * size * size + sum(kept)))
    width = base * 2 ** (depth - 1)
    cell(width, 2 * width, width, size)
    for i in reversed(range(depth)):
        width, after = base * 2**i, size * 2
        children.append(Child(0.0, width * 1.25 * after * after, width * after * after + sum(kept)))
        kept.pop()
        children.append(Child(0.0, 4 * width * after * after, 2 * width * after * after + sum(kept)))
        size = after
        cell(2 * width, width // 2, width // 2, size)
    return [*children, conv(base // 2, 1, 192)]


def amoebanet(layers: int = 18, filters: int = 256) -> list[Child]:
    channels = filters // 4
    children = [conv(3, channels, 224, 9, 2)]
    before, last, size, reduced = (channels, 112), channels, 112, False

    def unit(c_in: int, c_out: int, at: int, kernel: int = 1, stride: int = 1) -> tuple[float, float]:
        """ReLU, convolution, norm: operations and numbers moved."""
        one = conv(c_in, c_out, at, kernel, stride)
        return one.flops, one.moved + 2 * c_in * at * at + 3 * one.out

    def cell(reduction: bool) -> None:
        nonlocal channels, before, last, size, reduced
        channels *= 2 if reduction else 1
        c, after, four = channels, size // 2 if reduction else size, channels // 4
        work = [unit(last, c, size)]
        if reduced:
            work.append(unit(before[0], c, before[1], 1, 2))
        elif before[0] != c:
            work.append(unit(before[0], c, before[1]))
        at = after * after * c

        def seven(at_: int, stride: int = 1) -> list[tuple[float, float]]:
            rest = at_ // stride
            return [
                unit(c, four, at_),
                unit(four, four, at_, 7, stride),
                unit(four, four, rest, 7),
                unit(four, c, rest),
            ]

        if reduction:
            work += [(0.0, 2.5 * size * size * c), unit(c, four, size), unit(four, four, size, 9), unit(four, c, size)]
            work += [*seven(after), (0.0, 8 * at), unit(c, c, after)]
            parts = 3
        else:
            work += [unit(c, c, size), *seven(size), unit(c, c, size), *seven(size), (0.0, 6 * at), unit(c, c, size)]
            parts = 4
        skip = last * size * size
        flops, moved = (sum(figures) for figures in zip(*work, strict=True))
        children.append(Child(flops, moved + 3 * parts * at, parts * at + skip))
        before, last, size, reduced = (last, size), parts * c, after, reduction

    cell(True)
    cell(True)
    for part in range(3):
        for _ in range(layers // 3):
            cell(False)
        if part < 2:
            cell(True)
    return [*children, Child(2 * last * 1000, last * size * size, 1000)]


MODELS = {"ResNet-101": resnet101, "U-Net (5,64)": unet, "AmoebaNet-D (18,256)": amoebanet}


def replica_of(
    model: str, balance: list[int], samples: float, again: float, compute_share: float, memory_share: float
) -> Replica:
    """Stages of so many children each, for a micro-batch of `samples`.

    again: the share of micro-batches whose forward runs a second time. The shares are of the device's peaks.
    """
    children = MODELS[model]()
    assert sum(balance) == len(children), (model, sum(balance), len(children))
    stages, transfers, first = [], [], 0
    for stage, count in enumerate(balance):
        own = children[first : first + count]
        first += count
        forward_s = samples * sum(
            child.flops / (compute_share * PEAK_FLOPS) + 4 * child.moved / (memory_share * MEMORY_BYTES_PER_S)
            for child in own
        )
        stages.append(StageCost(forward_s, (2 + again) * forward_s))
        if stage + 1 < len(balance):
            seconds = 4 * samples * own[-1].out / PCIE_BYTES_PER_S
            transfers.append(Transfer(stage, stage + 1, seconds, seconds))
    return Replica(tuple(stages), tuple(transfers))
