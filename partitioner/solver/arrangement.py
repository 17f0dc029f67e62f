"""Which devices make a mesh, and which sits where: every way where these are few, elsewhere those that promise most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from partitioner.errors import ArgumentError
from partitioner.solver.layout import AnyLayout, Ints, Layout, Site
from partitioner.specs import counted

MOST_ORDERS = 240
"""Ways to choose and order devices up to which all are tried; of one node, those with the same figures are the same."""
MOST_COUNTED = 64
"""Devices of a mesh whose orders are counted."""


class Arranged(NamedTuple):
    """Layouts of a mesh, the cluster's own order first."""

    layouts: tuple[Layout, ...]
    others: tuple[AnyLayout, ...]
    """Every layout that is left out is no better than one of these; empty: none is left out."""


def arranged(site: Site, num_places: int, num_replicas: int) -> Arranged:
    """The layouts of a mesh that can differ in time or memory.

    A replica's places side by side, or a place's replicas side by side: side by side is within a node where that is
    possible, so the first keeps transfers and the second keeps gradient sync off the slow links. Where devices are not
    alike, nodes uneven, or not all devices needed, every choice and order of them is looked at, where these are few.
    Of more, the first, the fastest, the largest and those of few nodes are taken, put by node, speed and memory.
    """
    used = num_places * num_replicas
    if used > site.cluster.num_devices:
        raise ArgumentError(
            f"{counted(num_places, 'stage')} x {counted(num_replicas, 'replica')} need {used} devices, the cluster has "
            f"{site.cluster.num_devices}: use a smaller mesh"
        )
    kind = _kinds(site, num_places, num_replicas)
    complete = _num_orders(np.bincount(kind).tolist(), used) <= MOST_ORDERS
    found: dict[bytes, Layout] = {}
    seen: set[bytes] = set()

    def add(at: Ints) -> None:
        if (same := at.tobytes()) not in seen:
            seen.add(same)
            if (looks := _looks(site, at)) not in found:
                found[looks] = Layout(site, tuple(map(tuple, at.tolist())), len(found))

    own = np.argsort(site.node[:used], kind="stable")
    add(own.reshape(num_replicas, num_places).T)
    add(own.reshape(num_places, num_replicas))
    if complete:
        for order in _every_order(kind, used):
            add(np.array(order).reshape(num_places, num_replicas))
    else:
        for at in _likely(site, num_places, num_replicas):
            add(at)
    layouts = tuple(found.values())
    if complete and site.alike and len(layouts) > 1 and site.joining_costs:
        layouts = _undominated(layouts)
    return Arranged(layouts, () if complete else _others(site, num_places, num_replicas, layouts))


def changed(layout: Layout) -> Iterator[Layout]:
    """Layouts in which two devices change places, or one that is left out takes the place of another."""
    site, at = layout.site, np.array(layout.devices)
    kind = _kinds(site, *at.shape)
    left_out = np.setdiff1d(np.arange(len(kind)), at)
    left_out = left_out[np.unique(kind[left_out], return_index=True)[1]]  # one of each kind
    seen = {_looks(site, at)}
    flat = at.ravel()
    pairs = [(k, j) for k, j in combinations(range(len(flat)), 2) if kind[flat[k]] != kind[flat[j]]]
    for k, j in [*pairs, *((k, len(flat) + j) for k in range(len(flat)) for j in range(len(left_out)))]:
        other = np.concatenate((flat, left_out))
        other[[k, j]] = other[[j, k]]
        other = other[: len(flat)].reshape(at.shape)
        if (looks := _looks(site, other)) not in seen:
            seen.add(looks)
            yield Layout(site, tuple(map(tuple, other.tolist())), layout.number + 1)


def _undominated(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Of layouts of equal devices, those that no other is as good as: with as much in one node, and more."""
    looks = [(one.together(), one.apart_places) for one in layouts]

    def as_good(k: int, other: int) -> bool:
        (lines, apart), (theirs, others) = looks[k], looks[other]
        return not apart & ~others and all(any(not there & ~line for there in theirs) for line in lines)

    kept: list[int] = []
    for k in range(len(layouts)):
        if not any(as_good(other, k) for other in kept):
            kept = [other for other in kept if not as_good(k, other)] + [k]
    return tuple(layouts[k] for k in kept)


def _kinds(site: Site, num_places: int, num_replicas: int) -> Ints:
    """By device, the number of its kind: devices of one kind can change places."""
    kind: Ints
    if site.alike:
        kind = np.zeros(len(site.node), np.int64)
    else:
        figures = np.column_stack((site.speed, site.room(num_places, num_replicas)))
        kind = np.unique(figures, axis=0, return_inverse=True)[1].reshape(-1)
    if not site.one_link:
        kind = np.unique(kind * (1 + site.node.max()) + site.node, return_inverse=True)[1]
    return kind


def _num_orders(counts: list[int], used: int) -> float:
    """Different rows of so many devices, given how many there are of each kind; inf: too many to count.

    >>> _num_orders([2, 1], 2), _num_orders([2, 1], 3), _num_orders([9], 4)
    (3, 3, 1)
    """
    if len(counts) == 1:
        return 1
    if used > MOST_COUNTED or len(counts) > MOST_ORDERS:
        return math.inf
    rows = [1] + [0] * used  # by length, of the kinds so far
    for count in counts:
        rows = [sum(math.comb(t, k) * rows[t - k] for k in range(min(count, t) + 1)) for t in range(used + 1)]
    return rows[used]


def _every_order(kind: Ints, used: int) -> Iterator[list[int]]:
    """Every row of so many devices, those of one kind in their own order."""
    members = [np.flatnonzero(kind == k).tolist() for k in range(int(kind.max()) + 1)]
    taken, order = [0] * len(members), list[int]()

    def extend() -> Iterator[list[int]]:
        if len(order) == used:
            yield list(order)
            return
        for k, some in enumerate(members):
            if taken[k] < len(some):
                order.append(some[taken[k]])
                taken[k] += 1
                yield from extend()
                taken[k] -= 1
                order.pop()

    return extend()


def _likely(site: Site, num_places: int, num_replicas: int) -> Iterator[Ints]:
    """[places, replicas] devices: the first, the fastest, the largest, those of the strongest nodes."""
    used, node, speed, room = num_places * num_replicas, site.node, site.speed, site.room(num_places, num_replicas)
    picks = [np.arange(used)]
    if used < len(node) and not site.alike:
        picks += [np.argsort(key, kind="stable")[:used] for key in (-speed, -room)]
    strongest = _strongest_nodes(site)
    if used < len(node) and not site.one_link:
        picks.append(strongest[:used])
    for pick in picks:
        orders = [pick[np.argsort(node[pick], kind="stable")]]
        if not site.alike:
            orders += [pick[np.argsort(key[pick], kind="stable")] for key in (-speed, speed, -room)]
        for order in orders:
            yield order.reshape(num_replicas, num_places).T
            yield order.reshape(num_places, num_replicas)
    sizes = site.node_sizes
    uneven = sizes[0] != sizes[-1] or any(sizes[0] % size and size % sizes[0] for size in (num_places, num_replicas))
    if not site.one_link and (used < len(node) or uneven):
        yield _packed(site, strongest, num_replicas, num_places).T
        yield _packed(site, strongest, num_places, num_replicas)


def _strongest_nodes(site: Site) -> Ints:
    """Devices node by node, those with the most speed together first, in a node the fastest first."""
    number = np.unique(site.node, return_inverse=True)[1]
    total = np.bincount(number, site.speed)[number]
    return np.lexsort((np.arange(len(total)), -site.speed, site.node, -total))


def _packed(site: Site, devices: Ints, num_groups: int, size: int) -> Ints:
    """[groups, size] as many groups as can be within a node each; the rest of what is left over."""
    whole, left = list[Ints](), list[Ints]()
    ends = np.flatnonzero(np.diff(site.node[devices])) + 1
    for node in np.split(devices, ends):
        count = min(len(node) // size, num_groups - len(whole))
        whole += np.split(node[: count * size], count) if count else []
        left.append(node[count * size :])
    rest = np.concatenate(left)[: (num_groups - len(whole)) * size]
    return np.concatenate((*whole, rest)).reshape(num_groups, size)


def _others(site: Site, num_places: int, num_replicas: int, layouts: tuple[Layout, ...]) -> tuple[AnyLayout, ...]:
    """By what crosses nodes: replicas on one node each, which puts those of every place on several nodes; or some
    replica on several nodes."""
    largest = int(site.node_sizes[0])
    apart = num_replicas > largest
    joined = int(np.searchsorted(np.cumsum(site.node_sizes), num_places))  # nodes of one replica, less one
    ways: list[tuple[int, bool]]
    if site.one_link or num_places * num_replicas <= largest:
        ways = [(0, False)]
    elif num_places == 1 or num_replicas == 1:
        ways = [(joined, apart)]
    else:
        ways = [(0, True)] if not joined else []
        ways.append((max(1, joined), apart))
    if site.alike:  # a layout that is left out is then no better than one that is there
        there = {one.all_apart for one in layouts if not one.joins_nodes}
        ways = [(crossings, apart) for crossings, apart in ways if crossings or apart not in there]
    return tuple(AnyLayout(site, num_places, num_replicas, *way) for way in ways)


def _looks(site: Site, at: Ints) -> bytes:
    """The same for devices [places, replicas] whose replicas look the same, in whatever order."""
    if site.alike and site.one_link:
        return b""
    columns = [site.speed[at], site.room(*at.shape)[at]]
    if not site.one_link:
        columns.append(np.array([np.argmax(site.node[at] == site.node[at[place]], axis=0) for place in range(len(at))]))
        columns.append(
            (site.node[at] != site.node[at[:, :1]]).any(axis=1, keepdims=True) | np.zeros(at.shape, np.bool_)
        )
    table = np.concatenate([column.astype(float) for column in columns])
    return table[:, np.lexsort(table)].tobytes()
