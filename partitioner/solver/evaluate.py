"""Replay many splits of one setting at once: the simulator's clock with a row a split, to rank what it then decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partitioner.clock import Replica, StageCost, Transfer
from partitioner.costs import optimizer_part, replica_sync_s
from partitioner.graph import CostGraph
from partitioner.solver.layout import Layout, Site
from partitioner.solver.played import Messages, Wires, gpipe_ends, one_f_one_b_ends
from partitioner.solver.settings import Setting
from partitioner.solver.wires import all_reduce_times, link_times, sync_share
from partitioner.specs import EXCHANGES, Cluster, Saving, Shard, Training
from partitioner.steady import step_times

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_CELLS = 4_000_000
"""Rows x stages x micro-batches that are replayed in one go: some 100 MB."""


class Replayer:
    """Step + optimizer seconds of splits under one setting, many in one pass; the same figures as `predict`'s.

    Splits are rows of cuts, [rows, p - 1].
    """

    def __init__(
        self,
        graph: CostGraph,
        cluster: Cluster,
        setting: Setting,
        layout: Layout | None = None,
        *,
        savings: Sequence[Saving] = (Saving(),),
    ) -> None:
        """savings: ways for a stage to run. Where all of them recompute, `costs` say so."""
        self.savings = tuple(savings)
        self.graph, self.cluster, self.setting = graph, cluster, setting
        self.layout = layout or Layout(Site(cluster, Training(batch_size=1)), setting.devices)
        self.costs = graph.at(setting.samples)
        self.recompute = all(one.recompute for one in savings)
        if self.recompute:
            self.costs = graph.recomputed_at(setting.samples)
        self.places = np.array(setting.places)
        self.speeds: Floats = self.layout.speeds[:, self.places]
        """[lines, p] by stage."""

    def work(self, rows: int) -> int:
        """About how long so many splits take to replay, in tens of nanoseconds: numpy calls and what they go over."""
        p, m = self.setting.num_stages, self.setting.num_microbatches
        calls = 10 * p if self.setting.schedule == "gpipe" else 16 * (m + p)
        over = 20 * p if self.setting.schedule == "gpipe" else 4 * p * m
        if self.setting.schedule not in ("gpipe", "1f1b"):
            calls *= 10 * rows
        return self.layout.num_lines * (150 * calls + rows * over)

    def least_s(self, cuts: Ints, ways: Ints | None = None) -> Floats:
        """[rows] what `total_s` is at least under 1f1b where every stage waits for the one before it: `Bounds`' path,
        place and rounds of these very stages."""
        p, m, costs, graph = self.setting.num_stages, self.setting.num_microbatches, self.costs, self.graph
        edges = np.column_stack((np.zeros(len(cuts), int), cuts, np.full(len(cuts), graph.num_layers)))
        first, last, least = edges[:, :-1], edges[:, 1:], np.zeros(len(cuts))
        forward = costs.forward_before_s[last] - costs.forward_before_s[first]
        both = costs.before_s[last] - costs.before_s[first] + forward * self._again(ways)
        sync_s, held = self._sync_s(edges, ways), np.minimum(p - np.arange(p), m)
        gather_s, exchange_s = self._exchanged(edges, ways)
        most = (m - 1) // held
        for line, speed in enumerate(self.speeds):
            own = both / speed + graph.slicing_s(p) / speed + gather_s + exchange_s
            ahead = forward / speed + gather_s
            hops, wire = np.zeros(own.shape), np.zeros(len(cuts))
            for one in self._moved(edges, far=False):
                there, back = (np.maximum(wire_s, 0.0) for wire_s in self._wire_s(one, line))
                hops[:, one.target], wire = there + back, np.maximum(wire, np.maximum(there, back))
            before = np.cumsum(own + hops, axis=1) - own  # the way to a stage, and back from it
            way = before[:, -1:] + own[:, -1:]
            longest = np.maximum(ahead, own - ahead).max(axis=1)
            ends = [
                m * own,
                before + m * own,
                np.broadcast_to((way[:, 0] + (m - 1) * np.maximum(longest, wire))[:, None], own.shape),
            ]
            for j in (np.minimum(1, most), most):
                ends.append(way + j * (way - before) + (m - 1 - j * held) * own)
            everything = np.max(ends[1:], axis=0).max(axis=1) + sync_s[:, 0]
            own_end = np.cumsum(ahead, axis=1) - ahead + m * own + sync_s
            least = np.maximum(least, np.maximum(everything, own_end.max(axis=1)))
        return least

    def total_s(self, cuts: Ints, ways: Ints | None = None) -> Floats:
        """[rows] step + optimizer seconds of each split. ways: [rows, p] numbers of the stages' savings; None: 0."""
        setting, costs, graph, m = self.setting, self.costs, self.graph, self.setting.num_microbatches
        rows = max(1, MOST_CELLS // (2 * setting.num_stages * m))
        if setting.schedule == "1f1b" and len(cuts) > rows:
            return np.concatenate(
                [
                    self.total_s(cuts[k : k + rows], None if ways is None else ways[k : k + rows])
                    for k in range(0, len(cuts), rows)
                ]
            )
        edges = np.column_stack((np.zeros(len(cuts), int), cuts, np.full(len(cuts), graph.num_layers)))
        first, last = edges[:, :-1], edges[:, 1:]
        elements = float(graph.trainable_elements(0, graph.num_layers))
        part = graph.trainable_elements(first, last) / elements if elements else np.zeros(first.shape)
        forward = costs.forward_before_s[last] - costs.forward_before_s[first]
        backward = costs.before_s[last] - costs.before_s[first] - forward
        again = forward * self._again(ways)
        if self.recompute:
            again = forward
        else:
            backward = backward + again
        forward = forward + graph.slicing_s(setting.num_stages)
        part = part * self._optimizer_part(edges, ways)
        gather_s, exchange_s = self._exchanged(edges, ways)
        moved = self._moved(edges)
        ends, optimizer_s = [], np.zeros(len(cuts))
        for line, speed in enumerate(self.speeds):
            wires = [(one, self._wire_s(one, line)) for one in moved]
            if setting.schedule == "gpipe" and setting.stages_per_rank == 1:
                ends.append(
                    gpipe_ends(
                        forward / speed + gather_s, backward / speed + exchange_s, wires, setting.num_microbatches
                    )
                )
            elif setting.schedule == "1f1b":
                ends.append(
                    one_f_one_b_ends(
                        forward / speed + gather_s, backward / speed + exchange_s, wires, setting.num_microbatches
                    )
                )
            else:
                ends.append(self._walked(edges, forward, backward, again, gather_s, exchange_s, speed, wires))
            per_place = np.zeros((len(cuts), setting.num_places))
            np.add.at(per_place.T, self.places, (part / speed).T)
            optimizer_s = np.maximum(optimizer_s, per_place.max(axis=1) * graph.profile.optimizer_s)
        step_s: Floats = (np.max(ends, axis=0) + self._sync_s(edges, ways)).max(axis=1)
        return step_s + optimizer_s

    def _wire_s(self, one: Messages, line: int) -> tuple[Floats, Floats]:
        """Seconds of the messages there and back; -inf where nothing is sent, so that nothing waits for it."""
        source, target = int(self.places[one.source]), int(self.places[one.target])
        if source == target:
            return np.zeros(len(one.sent)), np.zeros(len(one.sent))
        link = self.layout.link(line, source, target)
        there, back = link_times(link, one.there), link_times(link, one.back)
        return np.where(one.sent, there, -np.inf), np.where(one.sent, back, -np.inf)

    def _walked(
        self,
        edges: Ints,
        forward: Floats,
        backward: Floats,
        again: Floats,
        gather_s: Any,
        exchange_s: Any,
        speed: Floats,
        wires: Wires,
    ) -> Floats:
        """Any other schedule, by the simulator's own clock: [rows, p] when the rank of each stage ends."""
        setting, costs = self.setting, self.costs
        forward, backward, again = forward / speed, backward / speed, again / speed
        parts = [backward / 2 + again / 2, backward / 2 - again / 2]
        if costs.backward_input_s is not None and costs.backward_weight_s is not None:
            before = [np.append(0.0, np.cumsum(each)) for each in (costs.backward_input_s, costs.backward_weight_s)]
            parts = [each[edges[:, 1:]] - each[edges[:, :-1]] for each in before]
            parts = [parts[0] / speed + again, parts[1] / speed]
        forward, backward = forward + gather_s, backward + exchange_s
        parts = [parts[0] + gather_s, parts[1] + exchange_s - gather_s]
        ends = np.zeros(forward.shape)
        for row in range(len(forward)):
            stages = [
                StageCost(float(f), float(b), backward_input_s=float(i), backward_weight_s=float(w))
                for f, b, i, w in zip(forward[row], backward[row], parts[0][row], parts[1][row], strict=True)
            ]
            transfers = [
                Transfer(one.source, one.target, float(there[row]), float(back[row]))
                for one, (there, back) in wires
                if one.sent[row]
            ]
            replica = Replica(tuple(stages), tuple(transfers))
            step = step_times(setting.schedule, replica, setting.num_microbatches, setting.num_places)
            ends[row] = step.rank_end_s[self.places]
        return ends

    def costs_s(self, cuts: Ints, way: int) -> tuple[Any, ...]:
        """Each [lines, rows, p]: seconds of a stage that runs in this way: forward; backward; sync; the optimizer, as
        if its rank had no other stage."""
        costs, graph = self.costs, self.graph
        edges = np.column_stack((np.zeros(len(cuts), int), cuts, np.full(len(cuts), graph.num_layers)))
        first, last, ways = edges[:, :-1], edges[:, 1:], np.full((len(cuts), edges.shape[1] - 1), way)
        speeds = self.speeds[:, None]
        forward = (costs.forward_before_s[last] - costs.forward_before_s[first]) / speeds
        backward = (costs.before_s[last] - costs.before_s[first]) / speeds - forward
        gather_s, exchange_s = self._exchanged(edges, ways)
        elements = float(graph.trainable_elements(0, graph.num_layers)) or 1.0
        optimizer = graph.trainable_elements(first, last) / elements * self._optimizer_part(edges, ways)
        return (
            forward + gather_s,
            backward + forward * self._again(ways) + exchange_s,
            self._sync_s(edges, ways) + 0 * forward,
            optimizer * graph.profile.optimizer_s / speeds,
        )

    @property
    def optimizer_s(self) -> float:
        """Of a whole replica on one device of speed 1, at least."""
        divided = any(level != "none" for level in self.levels)
        return self.graph.profile.optimizer_s / (self.setting.num_replicas if divided else 1)

    @cached_property
    def levels(self) -> tuple[Shard, ...]:
        """What replicas divide, of all savings."""
        return tuple(dict.fromkeys(one.shard for one in self.savings))

    def _again(self, ways: Ints | None) -> Any:
        """How often a stage runs its forwards again, beyond what `costs` say."""
        again = np.array([float(one.recompute and not self.recompute) for one in self.savings])
        return 0.0 if ways is None or not again.any() else again[ways]

    def _at_levels(self, ways: Ints | None) -> list[tuple[Shard, Any]]:
        """Shard levels, and which stages have them: [rows, p], or True."""
        if ways is None or len(self.levels) == 1:
            return [(self.savings[0].shard, True)]
        numbers = {level: [k for k, one in enumerate(self.savings) if one.shard == level] for level in self.levels}
        return [(level, np.isin(ways, numbers[level])) for level in self.levels]

    def _optimizer_part(self, edges: Ints, ways: Ints | None) -> Any:
        """Of the optimizer's work on a stage, what its busiest replica does."""
        part: Any = 1.0
        for level, where in self._at_levels(ways):
            if level != "none":
                first, last = edges[:, :-1], edges[:, 1:]
                part = np.where(where, optimizer_part(self.graph, level, self.setting.num_replicas, first, last), part)
        return part

    def _exchanged(self, edges: Ints, ways: Ints | None) -> tuple[Any, Any]:
        """[rows, p] seconds that replicas exchange weights in a stage's forward of each micro-batch, and weights and
        gradients in its backward; 0 where they do not."""
        levels = [one for one in self._at_levels(ways) if one[0] not in ("none", "zero1")]
        if not levels:
            return 0.0, 0.0
        first, last = edges[:, :-1], edges[:, 1:]
        gather_s, scatter_s = np.zeros(first.shape), np.zeros(first.shape)
        for link, places in self.layout.sync_links.items():
            at = np.flatnonzero(np.isin(self.places, places))
            times = [
                all_reduce_times(link, total(first, last)[:, at], self.setting.num_replicas) / 2
                for total in (self.graph.weight_bytes, self.graph.trainable_bytes)
            ]
            for level, where in levels:
                exchange, own = EXCHANGES[level], where if where is True else where[:, at]
                gather_s[:, at] += np.where(own, exchange.microbatch_gathers / 2 * times[0], 0.0)
                scatter_s[:, at] += np.where(own, exchange.microbatch_scatters * times[1], 0.0)
        return gather_s, gather_s + scatter_s

    def _moved(self, edges: Ints, *, far: bool = True) -> list[Messages]:
        """What goes from stage to stage, with a column a row of edges, [rows, p + 1]. far: past the next layer, too."""
        graph, costs, p, rows = self.graph, self.costs, self.setting.num_stages, len(edges)
        cut = edges[:, 1:-1].T
        moved = {
            (target - 1, target): Messages(target - 1, target, sent, there, back)
            for target, sent, there, back in zip(
                range(1, p),
                graph.handed_on[cut],
                costs.next_bytes[cut],
                costs.next_gradient_bytes[cut],
                strict=True,
            )
        }
        flows = graph.far_flows
        if p == 1 or not far or not len(flows.producer):
            return [one for one in moved.values() if one.sent.any()]
        num_bytes = flows.bytes(self.setting.samples)
        sums: list[tuple[Any, ...]] = []  # pairs of stages, row, bytes there, bytes back
        for row in range(rows):
            inner = edges[row, 1:-1]
            source = np.searchsorted(inner, flows.producer, side="right")[flows.tensor]
            target = np.searchsorted(inner, flows.consumer, side="right")
            goes = source < target
            sends = np.unique(
                flows.tensor[goes] * p + target[goes]
            )  # once to a stage, however many layers use it there
            tensor, target = sends // p, sends % p
            pair = np.searchsorted(inner, flows.producer[tensor], side="right") * p + target
            pairs, group = np.unique(pair, return_inverse=True)
            there = np.bincount(group, num_bytes[tensor], len(pairs))
            back = np.bincount(group, num_bytes[tensor] * flows.gradient[tensor], len(pairs))
            sums.append((pairs, np.full(len(pairs), row), there, back))
        pairs, row_of, there, back = (np.concatenate(column) for column in zip(*sums, strict=True))
        kinds, kind = np.unique(pairs, return_inverse=True)
        sent, added = np.zeros((len(kinds), rows), np.bool_), np.zeros((2, len(kinds), rows))
        sent[kind, row_of], added[0, kind, row_of], added[1, kind, row_of] = True, there, back
        for k, number in enumerate(kinds.tolist()):
            source, target = divmod(number, p)
            near = moved.get((source, target))
            mine = Messages(source, target, sent[k], added[0, k], added[1, k])
            if near is not None:
                mine = Messages(source, target, sent[k] | near.sent, added[0, k] + near.there, added[1, k] + near.back)
            moved[source, target] = mine
        return [moved[pair] for pair in sorted(moved) if moved[pair].sent.any()]

    @cached_property
    def whole_sync_s(self) -> dict[Shard, list[float]]:
        """By level and line: what is left of the gradient sync after the backward of a whole model."""
        samples, count, graph = self.setting.samples, self.setting.num_replicas, self.graph
        links = self.layout.sync_links
        num_bytes = np.array([float(graph.trainable_bytes(0, graph.num_layers))])
        found: dict[Shard, list[float]] = {}
        for level in self.levels:
            if level == "none":
                found[level] = [
                    min(replica_sync_s(graph, link, samples, count, float(speed)) for link in links)
                    for speed in self.speeds[:, 0]
                ]
            else:
                all_reduce_s = min(float(all_reduce_times(link, num_bytes, count)[0]) for link in links)
                found[level] = [sync_share(level) * all_reduce_s] * self.layout.num_lines
        return found

    def _sync_s(self, edges: Ints, ways: Ints | None) -> Floats:
        """[rows, p] seconds of each stage's gradient sync, over replicas and over the owners of shared parameters.

        Stages of one rank sync one after the other: each counts with those of its rank before it.
        """
        setting, layout = self.setting, self.layout
        levels = self._at_levels(ways)
        if setting.num_stages == 1:
            whole = np.zeros((len(edges), 1))
            for level, where in levels:
                whole = np.where(where, max(self.whole_sync_s[level]), whole)
            return whole
        first, last = edges[:, :-1], edges[:, 1:]
        num_bytes = self.graph.trainable_bytes(first, last)
        seconds = np.zeros(first.shape)
        for link, places in layout.sync_links.items():
            stages = np.flatnonzero(np.isin(self.places, places))
            seconds[:, stages] = all_reduce_times(link, num_bytes[:, stages], setting.num_replicas)
        seconds = seconds * sum((sync_share(level) * np.asarray(where) for level, where in levels), np.zeros(()))
        if self.graph.shared_parameters:
            shared = np.zeros((layout.num_lines, *first.shape))
            for parameter in self.graph.shared_parameters:
                positions = [self.graph.position[name] for name in parameter.layers]
                at = np.stack([_stage_at(edges, place) for place in positions], axis=1).tolist()
                owners_of = [tuple(sorted(set(row))) for row in at]
                for owners in sorted({owners for owners in owners_of if len(owners) > 1}):
                    rows = np.array([one == owners for one in owners_of])
                    for line in range(layout.num_lines):
                        ranks = {int(self.places[owner]) for owner in owners}
                        link = layout.link(line, *sorted(ranks))
                        shared[line][np.ix_(rows, owners)] += link.all_reduce_time(parameter.bytes, len(ranks))
            seconds = seconds + shared.max(axis=0)
        if setting.stages_per_rank > 1:
            on_rank = np.zeros((len(edges), setting.num_places))
            np.add.at(on_rank.T, self.places, seconds.T)
            seconds = on_rank[:, self.places]
        total: Floats = seconds
        return total


def _stage_at(edges: Ints, position: int) -> Ints:
    """[rows] the stage that holds a layer."""
    stage: Ints = (edges[:, 1:-1] <= position).sum(axis=1)
    return stage
