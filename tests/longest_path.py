"""The clock's rules written as a graph: when everything ends is the longest path to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx

from partitioner.actions import Action, Orders
from partitioner.clock import StageCost, Transfer

AS_SENT = {"F": "F", "B": "I", "I": "I"}
"""What an action sends goes under the name of what the next stage needs: B is I and W at once."""


def longest_path(
    orders: Orders, stages: Sequence[StageCost], transfers: Sequence[Transfer], overhead_s: float, overlap: bool
) -> dict[Any, float]:
    """End of each action and of each message (source, target, "F" or "I", micro-batch).

    A node is an action or a message and takes its seconds; an edge says "not before the end of".
    """
    graph: nx.DiGraph[Any] = nx.DiGraph()
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    on_wire: dict[tuple[int, int], Any] = {}
    for rank, order in enumerate(orders):
        before = None
        for action in order:
            stage, kind, k = action
            graph.add_node(action, seconds=overhead_s + stages[stage].seconds(kind))
            kind = AS_SENT.get(kind, "W")
            ways = [
                (t.source, t.target, t.forward_s) if kind == "F" else (t.target, t.source, t.backward_s)
                for t in transfers
                if kind != "W"
            ]
            for source, target, seconds in sorted(ways):
                if target == stage:
                    message = (source, target, kind, k)
                    graph.add_node(message, seconds=seconds)
                    graph.add_edge(message, action)
                    if not overlap:
                        if before is not None:
                            graph.add_edge(before, message)
                        before = message
            if before is not None:
                graph.add_edge(before, action)
            for source, target, seconds in sorted(ways):
                if source == stage:
                    message = (source, target, kind, k)
                    graph.add_node(message, seconds=seconds)
                    graph.add_edge(action, message)
                    wire = (rank, rank_of[target])
                    if overlap and wire in on_wire:
                        graph.add_edge(on_wire[wire], message)
                    on_wire[wire] = message
            before = action
    end: dict[Any, float] = {}
    for node in nx.topological_sort(graph):
        end[node] = graph.nodes[node]["seconds"] + max((end[one] for one in graph.predecessors(node)), default=0.0)
    assert {node for node in graph if isinstance(node, Action)} == {action for order in orders for action in order}
    return end
