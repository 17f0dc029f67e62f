"""Replay many splits of one setting at once: the simulator's clock with a row a split, to rank what it then decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.clock import Replica, StageCost, Transfer
from partitioner.costs import optimizer_part, replica_sync_s
from partitioner.graph import CostGraph
from partitioner.solver.layout import Layout, Site
from partitioner.solver.settings import Setting
from partitioner.specs import EXCHANGES, Cluster, Link, Saving, Shard, Training
from partitioner.steady import step_times

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_CELLS = 4_000_000
"""Rows x stages x micro-batches that are replayed in one go: some 100 MB."""
SAME = 1e-12
"""Relative; rounds of a schedule whose lengths differ by less are alike."""


class Messages(NamedTuple):
    """What goes from one stage to a later one and comes back, by row."""

    source: int
    target: int
    sent: Flags
    there: Floats
    """Bytes of a micro-batch."""
    back: Floats


class Replayer:
    """Step + optimizer seconds of splits under one setting, many in one pass; the same figures as `predict`'s.

    Splits are rows of cuts, [rows, p - 1].

    gpipe needs no clock. Stages and wires are machines that all micro-batches pass in the same order, each takes the
    same time for every one of them, and nothing waits for room: the last micro-batch is done at

        max over ways to the stage of   sum of seconds on the way + (m - 1) largest seconds on the way

    (a permutation flow shop of equal jobs: Pinedo, "Scheduling", 6.1), forward and then backward. 1f1b is walked in
    time slots: in its grid with unit actions every stage does at most one thing a slot and needs only earlier slots, so
    a slot is one numpy step over all rows and stages. Once a round (a forward and a backward of every stage) is the
    round before it, later by the same time for all stages, so are all rounds to come until the first stage runs out of
    forwards, and a step with more micro-batches is longer by so many rounds.
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
        setting, costs, graph = self.setting, self.costs, self.graph
        rows = max(1, MOST_CELLS // (2 * setting.num_stages * setting.num_microbatches))
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
                ends.append(self._flow(forward / speed + gather_s, backward / speed + exchange_s, wires))
            elif setting.schedule == "1f1b":
                ends.append(self._clock(forward / speed + gather_s, backward / speed + exchange_s, wires))
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

    def _flow(self, forward: Floats, backward: Floats, wires: list[tuple[Messages, tuple[Floats, Floats]]]) -> Floats:
        """gpipe: [rows, p]. first: when the first micro-batch is done; ends: when the last one is."""
        rows, p = forward.shape
        more = self.setting.num_microbatches - 1

        def passed(
            seconds: Floats, free: Floats, order: Sequence[int], into: dict[int, list[tuple[int, Floats]]]
        ) -> Floats:
            first, ends = np.zeros((p, rows)), np.zeros((p, rows))
            for s in order:
                own, begins, queued = seconds[:, s], free[s], np.full(rows, -np.inf)
                for source, wire in into.get(s, ()):
                    arrives = first[source] + wire
                    begins = np.maximum(begins, arrives)
                    queued = np.maximum(queued, ends[source] + wire)
                    if more:
                        queued = np.maximum(queued, arrives + more * wire)
                first[s] = begins + own
                ends[s] = np.maximum(first[s] + more * own, queued + own)
            return ends

        there: dict[int, list[tuple[int, Floats]]] = {}
        back: dict[int, list[tuple[int, Floats]]] = {}
        for one, (there_s, back_s) in wires:
            there.setdefault(one.target, []).append((one.source, there_s))
            back.setdefault(one.source, []).append((one.target, back_s))
        forwards = passed(forward, np.zeros((p, rows)), range(p), there)
        return passed(backward, forwards, range(p - 1, -1, -1), back).T

    def _clock(self, forward: Floats, backward: Floats, wires: list[tuple[Messages, tuple[Floats, Floats]]]) -> Floats:
        """1f1b: [rows, p], from as few micro-batches as it takes to reach rounds that are alike."""
        p, m = self.setting.num_stages, self.setting.num_microbatches
        seconds = np.stack((forward.T, backward.T))
        outgoing = self._outgoing(p, len(forward), wires)
        span = max((one.target - one.source for one, _ in wires), default=1)
        count = p + span + 12
        while 2 * count < m:
            ends, round_s = _played(p, count, seconds, outgoing, span)
            if round_s is not None:
                extrapolated: Floats = ends + (m - count) * round_s[:, None]
                return extrapolated
            count *= 2
        return _played(p, m, seconds, outgoing, None)[0]

    def _outgoing(
        self, p: int, rows: int, wires: list[tuple[Messages, tuple[Floats, Floats]]]
    ) -> list[tuple[Ints, Floats]]:
        """Messages that a stage sends after a forward or a backward, first ones, second ones...: (target [2, p], -1 for
        none; seconds on the wire [2, p, rows]). A message that a row lacks never holds it up."""
        outgoing: list[tuple[Ints, Floats]] = []
        for one, both in wires:
            for kind, first, second, wire_s in (
                (0, one.source, one.target, both[0]),
                (1, one.target, one.source, both[1]),
            ):
                free = next((some for some in outgoing if some[0][kind, first] < 0), None)
                if free is None:
                    free = np.full((2, p), -1), np.zeros((2, p, rows))
                    outgoing.append(free)
                free[0][kind, first] = second
                free[1][kind, first] = wire_s
        return outgoing

    def _walked(
        self,
        edges: Ints,
        forward: Floats,
        backward: Floats,
        again: Floats,
        gather_s: Any,
        exchange_s: Any,
        speed: Floats,
        wires: list[tuple[Messages, tuple[Floats, Floats]]],
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


@lru_cache(maxsize=64)
def _slots(p: int, m: int) -> tuple[tuple[Ints, Ints, Ints], ...]:
    """(stages, kinds, micro-batches) of each slot of 1f1b; kind 0 is forward, 1 backward."""
    stage, k = np.meshgrid(np.arange(p), np.arange(m), indexing="ij")
    forward = np.where(k < p - stage, stage + k, stage + 2 * k)
    backward = 2 * p - 1 - stage + 2 * k
    slot = np.concatenate((forward.ravel(), backward.ravel()))
    order = np.argsort(slot, kind="stable")
    stages, ks = np.tile(stage.ravel(), 2)[order], np.tile(k.ravel(), 2)[order]
    kinds = np.repeat([0, 1], p * m)[order]
    ends = np.flatnonzero(np.diff(slot[order])) + 1
    return tuple(zip(np.split(stages, ends), np.split(kinds, ends), np.split(ks, ends), strict=True))


def _played(
    p: int, m: int, seconds: Floats, outgoing: list[tuple[Ints, Floats]], span: int | None
) -> tuple[Floats, Floats | None]:
    """[rows, p] when each stage of one replica ends, and [rows] the seconds of a round where rounds have become alike.

        end = max(stage free, arrived) + seconds;   arrives = max(end, wire free) + wire seconds

    seconds: [2, p, rows] of a forward and a backward. span: what a message passes over at most; a message is then used
    within so many slots, and rounds are alike when that many slots of them are. None: not asked.
    """
    rows = seconds.shape[2]
    arrived = np.full((2, p, m, rows), -np.inf)
    free = np.zeros((p, rows))
    wires = [np.full((2, p, rows), -np.inf) for _ in outgoing]
    full = 2 * m - 1  # in slots 2 p to 2 m - 2 every stage does a forward and a backward in turn
    kept: list[Floats] = []
    round_s: Floats | None = None
    for slot, (stages, kinds, ks) in enumerate(_slots(p, m)):
        end = np.maximum(free[stages], arrived[kinds, stages, ks]) + seconds[kinds, stages]
        free[stages] = end
        for (target, wire_s), wire_free in zip(outgoing, wires, strict=True):
            to = target[kinds, stages]
            if (sends := to >= 0).all():
                kind, source, k, ended = kinds, stages, ks, end
            else:
                kind, source, to, k, ended = kinds[sends], stages[sends], to[sends], ks[sends], end[sends]
            arrives = np.maximum(ended, wire_free[kind, source]) + wire_s[kind, source]
            wire_free[kind, source] = arrives
            arrived[kind, to, k] = np.maximum(arrived[kind, to, k], arrives)
        if span is not None and full - span - 4 <= slot < full:
            kept.append(np.concatenate((free, *(wire.reshape(2 * p, rows) for wire in wires))))
            if slot == full - 1:
                with np.errstate(invalid="ignore"):
                    grown = np.stack(kept[2:]) - np.stack(kept[:-2])
                grown[~np.isfinite(grown)] = np.nan  # wires that nothing goes over
                least, most = np.nanmin(grown, axis=(0, 1)), np.nanmax(grown, axis=(0, 1))
                if (most - least <= SAME * free.max(axis=0)).all():
                    round_s = most
                else:
                    return free.T, None
    return free.T, round_s


def sync_share(level: Shard) -> float:
    """Of an all-reduce of a stage's gradients, what its replicas exchange after its last backward."""
    return 1.0 if level == "none" else (EXCHANGES[level].step_scatters + EXCHANGES[level].step_gathers) / 2


def _stage_at(edges: Ints, position: int) -> Ints:
    """[rows] the stage that holds a layer."""
    stage: Ints = (edges[:, 1:-1] <= position).sum(axis=1)
    return stage


def link_times(link: Link, num_bytes: Floats) -> Floats:
    """`Link.time`, elementwise."""
    sizes, seconds = np.array(link.sizes_bytes, float), np.array(link.seconds)
    if len(sizes) == 2:
        k: Ints | int = 1
    else:
        k = np.clip(np.searchsorted(sizes, num_bytes), 1, len(sizes) - 1)
    slope = (seconds[k] - seconds[k - 1]) / (sizes[k] - sizes[k - 1])
    times: Floats = np.maximum(0.0, seconds[k - 1] + slope * (num_bytes - sizes[k - 1]))
    return times


def all_reduce_times(link: Link, num_bytes: Floats, num_ranks: int) -> Floats:
    """`Link.all_reduce_time`, elementwise."""
    if num_ranks < 2:
        return np.zeros(num_bytes.shape)
    return np.where(num_bytes > 0, 2 * (num_ranks - 1) * link_times(link, num_bytes / num_ranks), 0.0)
