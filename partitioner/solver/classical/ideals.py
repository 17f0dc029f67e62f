"""Down-sets of a directed acyclic graph: what can have run when a stage ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Edges = Sequence[tuple[int, int]]


def down_sets(num_nodes: int, edges: Edges, most: int) -> Flags | None:
    """[m, num_nodes] all sets of nodes that hold every predecessor of their nodes, smallest first; None: over `most`.

    Two neighbours in a chain of down-sets differ by one stage; so a path from the empty set to the full one is a split
    into stages in an order that the graph allows (Tarnawski et al. 2020, "Efficient algorithms for device placement of
    DNN graph operators", section 5). Each set is made once, by adding a node whose predecessors are in: O(m n).

    >>> down_sets(3, [(0, 1), (0, 2)], 99).astype(int).tolist()
    [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]]
    """
    needs, feeds = [0] * num_nodes, [0] * num_nodes
    for tail, head in edges:
        needs[head] |= 1 << tail
        feeds[tail] |= 1 << head
    ready = sum(1 << v for v in range(num_nodes) if not needs[v])
    level = {0: ready}
    """Down-set -> the nodes that can be added to it, as bits."""
    found = [0]
    for _ in range(num_nodes):
        following: dict[int, int] = {}
        for ideal, addable in level.items():
            rest = addable
            while rest:
                bit = rest & -rest
                rest ^= bit
                grown = ideal | bit
                if grown in following:
                    continue
                fresh, heads = addable ^ bit, feeds[bit.bit_length() - 1]
                while heads:
                    head = heads & -heads
                    heads ^= head
                    if not needs[head.bit_length() - 1] & ~grown:
                        fresh |= head
                following[grown] = fresh
        found += sorted(following)
        if len(found) > most:
            return None
        level = following
    return as_flags(found, num_nodes)


def as_flags(ideals: Sequence[int], num_nodes: int) -> Flags:
    """[m, num_nodes] the bits of each number, lowest first."""
    width = (num_nodes + 7) // 8
    raw = np.frombuffer(b"".join(ideal.to_bytes(width, "little") for ideal in ideals), dtype=np.uint8)
    bits = np.unpackbits(raw.reshape(len(ideals), width), axis=1, bitorder="little")
    flags: Flags = bits[:, :num_nodes].astype(np.bool_)
    return flags


def condense(num_nodes: int, edges: Edges, groups: Sequence[Sequence[int]] = ()) -> Ints:
    """[num_nodes] the number of each node's class: nodes of a group, and of a circle of such classes, share one.

    Classes are numbered in an order that the graph allows. Nodes that must be together and have others between them
    must have those with them as well, which is what the circles are.

    >>> condense(4, [(0, 1), (1, 2), (2, 3)], [[0, 2]]).tolist()
    [0, 0, 0, 1]
    """
    parent = list(range(num_nodes))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for group in groups:
        for v in group[1:]:
            parent[root(v)] = root(group[0])
    after: dict[int, set[int]] = {root(v): set() for v in range(num_nodes)}
    for tail, head in edges:
        if root(tail) != root(head):
            after[root(tail)].add(root(head))
    number: dict[int, int] = {}
    circles = strongly_connected(after)
    for k, circle in enumerate(circles):
        for v in circle:
            number[v] = len(circles) - 1 - k
    return np.array([number[root(v)] for v in range(num_nodes)], dtype=np.int64)


def strongly_connected(after: dict[int, set[int]]) -> list[list[int]]:
    """Components in reverse topological order (Tarjan 1972), without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    components: list[list[int]] = []
    for start in sorted(after, reverse=True):
        if start in index:
            continue
        work = [(start, iter(sorted(after[start], reverse=True)))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            v, following = work[-1]
            for w in following:
                if w not in index:
                    index[w] = low[w] = len(index)
                    stack.append(w)
                    on_stack.add(w)
                    work.append((w, iter(sorted(after[w], reverse=True))))
                    break
                if w in on_stack:
                    low[v] = min(low[v], index[w])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[v])
                if low[v] == index[v]:
                    components.append([])
                    while components[-1][-1:] != [v]:
                        w = stack.pop()
                        on_stack.discard(w)
                        components[-1].append(w)
    return components
