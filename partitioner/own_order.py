"""The order of a pipeline's actions, searched for its stages' own times in the memory of its devices."""

from __future__ import annotations

import math

from partitioner.actions import Orders, Table
from partitioner.clock import Replica, run_clock
from partitioner.costs import replica_costs
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.memory import Spread, interval_memory, memory_limit, room_bytes
from partitioner.ordering import Ordered, Room, search_order
from partitioner.plan import Plan
from partitioner.rounds import SPLIT_BACKWARD
from partitioner.schedule import build_schedule, placement
from partitioner.specs import Cluster, ScheduleName, Training
from partitioner.split import Split

MOST_SEARCHED = 2**13
"""Actions of a step, up to which an order is searched; that takes a quarter of a millisecond an action."""
LEAST_GAIN = 1e-9
"""Relative. An order that gains less is no reason to leave the schedule's own."""


def best_order(plan: Plan, *, barrier: bool = True) -> Ordered:
    """The fastest order found of F, I and W for the plan's stages, in the memory of their devices.

    Textbook orders of the same arrangement are among those tried. barrier: whether ranks wait for each other between
    steps. Replicas share one order: it is searched for the slowest, with the room of the smallest device. A profile
    without the two parts of a backward counts half of it for each. ArgumentError where a rank has no room for one
    micro-batch of each of its stages.
    """
    graph = CostGraph.from_profile(plan.profile)
    found, _ = _search(graph, plan.cluster, plan.training, plan.split, barrier=barrier)
    return found


def faster_order(graph: CostGraph, cluster: Cluster, training: Training, split: Split) -> Orders | None:
    """An order of F, I and W for these stages, in the memory of their devices, with a shorter step than the schedule's.

    None: none was found, the schedule's backwards are whole, or its lists have more than `MOST_SEARCHED` actions.
    """
    if split.schedule not in SPLIT_BACKWARD or 3 * split.num_stages * split.num_microbatches > MOST_SEARCHED:
        return None
    own = build_schedule(split.schedule, split.num_stages, split.num_microbatches, num_ranks=split.num_places)
    try:
        found, replicas = _search(graph, cluster, training, split)
    except ArgumentError:  # one micro-batch of each stage does not fit, whatever the order
        return None

    def step_s(orders: Orders) -> float:
        table = Table.of(orders)
        return max(float(run_clock(table, one).rank_end_s.max()) for one in set(replicas))

    return found.orders if step_s(found.orders) < step_s(own) * (1 - LEAST_GAIN) else None


def _search(
    graph: CostGraph, cluster: Cluster, training: Training, split: Split, *, barrier: bool = True
) -> tuple[Ordered, list[Replica]]:
    """`search_order` for the slowest replica, with what the memory of every replica's devices has room for; and what
    the replicas cost.

    Textbook orders of every schedule with its stages at these places are among those tried.
    """
    places, num_places, num_replicas = split.places, split.num_places, split.num_replicas
    limits, held = [math.inf] * num_places, []
    for row, at in zip(split.devices, places, strict=True):
        for device in (cluster.devices[one] for one in row):
            limit = memory_limit(device, training)
            limits[at] = min(limits[at], room_bytes(device, limit, num_places, num_replicas))
    for (first, last), saving, at in zip(graph.bounds(split.cuts), split.saving, places, strict=True):
        always, one = (
            sum(
                float(value)
                for value in interval_memory(
                    graph,
                    training,
                    first,
                    last,
                    samples=split.samples(training),
                    held=count,
                    replicated=num_replicas > 1,
                    spread=Spread.of_stage(saving, num_replicas),
                ).values()
            )
            for count in (0, 1)
        )
        limits[at] -= always
        held.append(one - always)
    replicas = replica_costs(graph, cluster, training, split)
    slowest = max(replicas, key=lambda one: sum(stage.forward_s + stage.backward_s for stage in one.stages))
    room = Room(tuple(limits), tuple(held))
    textbook = [
        build_schedule(name, split.num_stages, split.num_microbatches, num_ranks=num_places)
        for name in SPLIT_BACKWARD
        if _arranged(name, split.num_stages, num_places) == places
    ]
    return search_order(slowest, places, split.num_microbatches, room, textbook=textbook, barrier=barrier), replicas


def _arranged(name: ScheduleName, num_stages: int, num_places: int) -> tuple[int, ...] | None:
    """Where the schedule has as many stages on as many ranks; None: it cannot have them."""
    try:
        return placement(name, num_stages, num_places)
    except ArgumentError:
        return None
