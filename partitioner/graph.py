"""A Profile as a cost graph: what any run of consecutive layers costs, holds, receives and sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from partitioner.display import Shown
from partitioner.errors import ArgumentError
from partitioner.flows import FarFlows, Flows
from partitioner.intervals import Floats, IntervalMax, IntervalSum, Ints, Use, sums_before
from partitioner.layer_arrays import Holding, LayerArrays, interpolated, table
from partitioner.profiles import LayerCost, LayerMemory, Parameter, Profile, Tensor
from partitioner.shares import largest_shares
from partitioner.specs import Recompute, Shard

DIVIDED: tuple[tuple[Shard, ...], ...] = (("zero1", "zero2", "zero3"), ("zero2", "zero3"), ("zero3",))
"""Shard levels that divide the optimizer's state, gradients, weights."""
FEW_PARAMETERS = 64
"""Of a stage, up to which it is worked out which replica keeps which of them."""
MOST_RUNS = 2**14
"""Of layers with so few parameters; a graph that has more of them bounds instead."""


class StageTransfer(NamedTuple):
    """Bytes that one stage sends another for one micro-batch: straight there, also past stages between them."""

    source: int
    target: int
    forward_bytes: float
    backward_bytes: float
    """Gradients coming back: only of tensors that need one."""


class CostGraph(Shown):
    """What any split of a profile's layers costs. Positions count layers from 0; cut k is just before layer k.

    Stages are given by their cuts, ascending: cuts (2, 5) of 9 layers are the stages [0, 2), [2, 5) and [5, 9).
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.ids = tuple(layer.id for layer in profile.layers)
        self.position = {name: k for k, name in enumerate(self.ids)}
        self.num_layers = len(self.ids)
        self._at: dict[float, LayerArrays] = {}
        self._recomputed_at: dict[float, LayerArrays] = {}
        self._most_kept: dict[int, Floats | None] = {}
        self._standing: dict[tuple[float, Shard, int], IntervalSum] = {}
        self._edges: dict[tuple[float, Recompute], tuple[Floats, Floats]] = {}
        self._edge_lists: dict[tuple[float, Recompute], tuple[list[float], list[float]]] = {}
        self._holding: dict[tuple[float, int, int, Recompute, float], Holding] = {}
        self._tensors = [
            (tensor, self.position[tensor.producer], sorted({self.position[name] for name in tensor.consumers}))
            for tensor in profile.tensors
        ]

    @classmethod
    def from_profile(cls, profile: Profile) -> CostGraph:
        return cls(profile)

    @cached_property
    def digraph(self) -> nx.DiGraph[tuple[str, str]]:
        """Layers and tensors as nodes ("layer", id) and ("tensor", id), with an edge for each making and using.

        Node data: `data`, the profile's Layer or Tensor, and for layers `position`.
        """
        graph: nx.DiGraph[tuple[str, str]] = nx.DiGraph()
        for k, layer in enumerate(self.profile.layers):
            graph.add_node(("layer", layer.id), data=layer, position=k)
        for tensor in self.profile.tensors:
            graph.add_node(("tensor", tensor.id), data=tensor)
            graph.add_edge(("layer", tensor.producer), ("tensor", tensor.id))
            graph.add_edges_from((("tensor", tensor.id), ("layer", name)) for name in tensor.consumers)
        return graph

    @cached_property
    def allowed_cuts(self) -> tuple[int, ...]:
        """Positions that may be cut, ascending."""
        return tuple(k for k in range(1, self.num_layers) if self.ids[k] not in self.profile.no_cut)

    @cached_property
    def linked(self) -> NDArray[np.bool_]:
        """By cut: whether the layer after it uses something that the layer before it makes.

        Where it does, the two stages run one after the other wherever else is cut.
        """
        flags = np.zeros(self.num_layers + 1, dtype=np.bool_)
        for _, producer, consumers in self._crossing_tensors:
            flags[producer + 1] |= producer + 1 in consumers
        return flags

    @cached_property
    def unlinked(self) -> tuple[Ints, Ints]:
        """By cut, (first, last): two stages that meet there run one after the other unless both are within the layers
        [first, last), which is empty where `linked`.

        The second has the layer after the cut: it waits for a first one that reaches back to what that layer uses. The
        first has the layer before the cut: a second one that reaches on to what uses that layer waits for it.
        """
        n = self.num_layers
        first, last = np.zeros(n + 1, dtype=np.int64), np.full(n + 1, n)
        for _, producer, consumers in self._crossing_tensors:
            after = [place for place in consumers if place > producer]
            first[after] = np.maximum(first[after], producer + 1)
            last[producer + 1] = min(last[producer + 1], after[0])
        cuts = np.arange(n + 1)
        return np.where(self.linked, cuts, first), np.where(self.linked, cuts, last)

    def paths(self, seconds: Floats) -> Floats:
        """By layer: the longest sum of `seconds` over layers that wait for each other, of those through this one."""
        own = seconds.tolist()
        ahead, behind = list(own), list(own)
        for v, some in enumerate(self._waits_for):
            ahead[v] += max((ahead[u] for u in some), default=0.0)
        for v in range(self.num_layers - 1, -1, -1):
            for u in self._waits_for[v]:
                behind[u] = max(behind[u], own[u] + behind[v])
        through: Floats = np.array(ahead) + np.array(behind) - seconds
        return through

    @cached_property
    def _waits_for(self) -> list[list[int]]:
        """By layer, those before it that make something which it uses."""
        found: list[list[int]] = [[] for _ in range(self.num_layers)]
        for _, producer, consumers in self._crossing_tensors:
            for place in consumers:
                if place > producer:
                    found[place].append(producer)
        return found

    @cached_property
    def handed_on(self) -> NDArray[np.bool_]:
        """By cut: whether `next_bytes` counts a tensor there, be it of 0 bytes."""
        flags = np.zeros(self.num_layers + 1, dtype=np.bool_)
        for _, producer, consumers in self._crossing_tensors:
            flags[producer + 1] |= consumers[-1] == producer + 1
        return flags

    @cached_property
    def far_tensors(self) -> tuple[tuple[Tensor, int, tuple[int, ...]], ...]:
        """(tensor, producer, consumers) of those that more than the layer after their producer uses."""
        return tuple((t, at, tuple(to)) for t, at, to in self._crossing_tensors if to[-1] > at + 1)

    @cached_property
    def far_flows(self) -> FarFlows:
        """The same as arrays."""
        far = self.far_tensors
        uses = [(k, place) for k, (_, producer, to) in enumerate(far) for place in to if place > producer]
        tensor, consumer = np.array(uses, np.int64).reshape(-1, 2).T
        return FarFlows(
            sizes=self.profile.microbatch_sizes,
            bytes_at=table([item[0].bytes_at for item in far], len(self.profile.microbatch_sizes)),
            producer=np.array([producer for _, producer, _ in far], np.int64),
            gradient=np.array([tensor.needs_gradient for tensor, _, _ in far], np.bool_),
            tensor=tensor,
            consumer=consumer,
        )

    @cached_property
    def shared_parameters(self) -> tuple[Parameter, ...]:
        """Trainable parameters that several layers use: cut apart, their copies are kept equal."""
        return tuple(p for p in self.profile.parameters if p.trainable and len(set(p.layers)) > 1)

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """ArgumentError where the cuts do not ascend within the layers, or one is not possible."""
        edges = (0, *cuts, self.num_layers)
        for first, last in pairwise(edges):
            if first >= last:
                raise ArgumentError(
                    f"the cuts {tuple(cuts)} leave a stage without layers: they must ascend from 1 to "
                    f"{self.num_layers - 1}, the model has {self.num_layers} layers"
                )
        for cut in cuts:
            if (reason := self.profile.no_cut.get(self.ids[cut])) is not None:
                raise ArgumentError(f"no cut is possible before layer {self.ids[cut]} (position {cut}): {reason}")

    def bounds(self, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(first, last) of each stage; last is one past its last layer.

        An empty `cuts` is one stage of the whole model.
        """
        edges = (0, *cuts, self.num_layers)
        return tuple(pairwise(edges))

    def stage_ids(self, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Layer ids of each stage."""
        return tuple(self.ids[first:last] for first, last in self.bounds(cuts))

    # Costs at a micro-batch size

    def at(self, samples: float) -> LayerArrays:
        """Costs by layer position for a micro-batch of `samples`, interpolated as `Layer.cost` does. Kept for reuse."""
        if samples not in self._at:
            self._at[samples] = self._arrays(samples)
        return self._at[samples]

    def recomputed_at(self, samples: float) -> LayerArrays:
        """The same where every backward runs its layer's forward again."""
        if samples not in self._recomputed_at:
            costs = self.at(samples)
            backward_s = costs.backward_s + costs.forward_s
            before_s = sums_before(costs.forward_s + backward_s)
            self._recomputed_at[samples] = replace(costs, backward_s=backward_s, before_s=before_s)
        return self._recomputed_at[samples]

    def slicing_s(self, num_stages: int) -> float:
        """Seconds of each forward of a stage beyond its layers; a model that is not cut has none."""
        return self.profile.slicing_s if num_stages > 1 else 0.0

    def crossing(self, cut: int, samples: float) -> float:
        """Bytes alive across a cut for one micro-batch, each tensor once."""
        return float(self.at(samples).crossing_bytes[cut])

    def transfers(self, cuts: Sequence[int], samples: float) -> tuple[StageTransfer, ...]:
        """What goes from stage to stage, a tensor straight from the stage that makes it to each that uses it."""
        if not len(cuts):
            return ()
        flows, edges = self._flows, np.array(cuts, dtype=np.int64)
        tensor, at, _ = flows.received.T
        source, target = (np.searchsorted(edges, places, side="right") for places in (flows.producer[tensor], at))
        num_stages = len(cuts) + 1
        sent = (tensor * num_stages + source) * num_stages + target
        tensor, pair = np.divmod(np.unique(sent[source < target]), num_stages**2)  # once to each stage
        pairs, pair = np.unique(pair, return_inverse=True)
        num_bytes = interpolated(self.profile.microbatch_sizes, flows.bytes_at, samples)
        forward = np.bincount(pair, num_bytes[tensor], len(pairs))
        backward = np.bincount(pair, (num_bytes * flows.gradient)[tensor], len(pairs))
        return tuple(
            StageTransfer(number // num_stages, number % num_stages, there, back)
            for number, there, back in zip(pairs.tolist(), forward.tolist(), backward.tolist(), strict=True)
        )

    def holding(
        self, samples: float, *, tp: int = 1, whole: int = 1, recompute: Recompute = "never", products: float = 1.0
    ) -> Holding:
        """What a micro-batch of `samples` holds of the layers on one of `tp` tensor-parallel ranks. Kept for reuse.

        `whole`: over how many ranks what tensor parallelism leaves whole is divided after all (by the sequence).
        `recompute`: "always" keeps what each layer received, "selective" also the results of products and of attention,
        or a share of them (`products`).
        """
        key = (samples, tp, whole, recompute, products)
        if key not in self._holding:
            self._holding[key] = self._hold(samples, tp, whole, recompute, products)
        return self._holding[key]

    def held_edges(self, samples: float, recompute: Recompute = "never") -> tuple[Floats, Floats]:
        """(begin, end) by position: what a stage that starts or ends there holds of a micro-batch is at least
        end[last] - begin[first], whatever its other edge and wherever in between it could be cut. Both ascend.

            end[k]    min over cuts j >= k of  kept_before[j] + sent by the layer before j
            begin[k]  max over cuts i <= k of  kept_before[i] - received by the layer at i
        """
        key = (samples, recompute)
        if key not in self._edges:
            costs, kept = self.at(samples), self.holding(samples, recompute=recompute).kept_before
            at, cut = np.arange(self.num_layers), np.zeros(self.num_layers + 1, dtype=np.bool_)
            cut[[0, *self.allowed_cuts, self.num_layers]] = True
            begin = np.where(cut[:-1], kept[:-1] - costs.received(at, at + 1), -np.inf)
            end = np.where(cut[1:], kept[1:] + costs.sent(at, at + 1), np.inf)
            begin = np.maximum.accumulate(np.append(begin, kept[-1]))
            end = np.minimum.accumulate(np.append(0.0, end)[::-1])[::-1]
            self._edges[key] = begin, end
        return self._edges[key]

    def held_edge_lists(self, samples: float, recompute: Recompute = "never") -> tuple[list[float], list[float]]:
        """The same for one look at a time."""
        key = (samples, recompute)
        if key not in self._edge_lists:
            begin, end = self.held_edges(samples, recompute)
            self._edge_lists[key] = begin.tolist(), end.tolist()
        return self._edge_lists[key]

    def _hold(self, samples: float, tp: int, whole: int, recompute: Recompute, products: float) -> Holding:
        tables = {name: interpolated(self.profile.microbatch_sizes, t, samples) for name, t in self._memory.items()}

        def of(name: str) -> Floats:
            divided = np.minimum(tables[f"{name}_divided_bytes"], tables[f"{name}_bytes"])
            held: Floats = np.rint((tables[f"{name}_bytes"] - divided) / whole + divided / tp)
            return held

        saved = of("saved")
        most = np.maximum(of("forward_peak"), of("backward_peak"))
        if whole > 1:  # an input that is divided by the sequence is gathered for its product, and so is its gradient
            most = most + 2 * tables["whole_input_bytes"] * (1 - 1 / whole)
        kept = saved
        if recompute != "never":
            at = np.arange(self.num_layers)
            received: Floats = np.asarray(self.at(samples).received(at, at + 1)) / whole
            kept = received if recompute == "always" else np.minimum(saved, received + products * of("product"))
            most = most + received
        before = sums_before(kept)
        return Holding(before, IntervalMax(before[:-1] + np.maximum(most, kept)))

    # Parameters

    @cached_property
    def divided_bytes(self) -> IntervalSum:
        """The part of `weight_bytes` that a tensor-parallel group divides."""
        return self._placed(lambda p: p.bytes * (p.divided is not None), np.zeros(self.num_layers))

    @cached_property
    def divided_gradient_bytes(self) -> IntervalSum:
        """The part of `trainable_bytes` that a tensor-parallel group divides."""
        return self._placed(lambda p: p.bytes * p.trainable * (p.divided is not None), np.zeros(self.num_layers))

    @cached_property
    def divided_elements(self) -> IntervalSum:
        """The part of `trainable_elements` that a tensor-parallel group divides."""
        return self._placed(
            lambda p: math.prod(p.shape) * p.trainable * (p.divided is not None), np.zeros(self.num_layers)
        )

    @cached_property
    def weight_bytes(self) -> IntervalSum:
        """Parameter bytes of the layers [first, last); a parameter that several of them use counts once."""
        return self._placed(lambda parameter: parameter.bytes, self._unlisted[0])

    @cached_property
    def trainable_bytes(self) -> IntervalSum:
        """The part of `weight_bytes` that gets gradients."""
        return self._placed(lambda parameter: parameter.bytes * parameter.trainable, self._unlisted[1])

    @cached_property
    def trainable_elements(self) -> IntervalSum:
        """Number of trainable parameter elements; bytes that no Parameter explains count 4 an element."""
        return self._placed(lambda parameter: math.prod(parameter.shape) * parameter.trainable, self._unlisted[1] / 4)

    @cached_property
    def buffer_bytes(self) -> IntervalSum:
        """Bytes of buffers that the layers [first, last) use; `Profile.buffer_bytes` are on every rank besides."""
        return IntervalSum(self.num_layers, self._buffer_uses())

    def standing_bytes(self, optimizer_bytes: float, shard: Shard = "none", dp: int = 1) -> IntervalSum:
        """Weights, buffers, gradients and optimizer state, of so many bytes a trainable element, in one sum, as `dp`
        replicas divide them among them. Kept."""
        key = (optimizer_bytes, shard, dp if shard != "none" else 1)
        if key not in self._standing:
            state, summed, held = (1 / dp if shard in levels else 1.0 for levels in DIVIDED)
            weights, trained = self._unlisted
            self._standing[key] = self._placed(
                lambda p: (
                    held * p.bytes + p.trainable * (summed * p.bytes + state * optimizer_bytes * math.prod(p.shape))
                ),
                held * weights + trained * (summed + state * optimizer_bytes / 4),
                self._buffer_uses(),
            )
        return self._standing[key]

    def largest_parts(self, first: ArrayLike, last: ArrayLike, dp: int) -> tuple[Any, Any]:
        """Where each parameter of the layers [first, last) is with one of `dp` replicas, the most that one of them has:
        the part of all trainable elements, and of all their bytes.

        Of few listed parameters it is what `keepers` comes to. Of many it is bounded: the largest parameter first, each
        to the replica that has the least, no replica has more than

            total / dp + (1 - 1 / dp) largest          (Graham 1969, "Bounds on multiprocessing timing anomalies")
        """
        i, j = np.broadcast_arrays(first, last)
        known = self._kept_most(min(dp, FEW_PARAMETERS))
        parts = []
        for k, (total, largest) in enumerate(
            zip((self.trainable_elements, self.trainable_bytes), self._largest_trainable, strict=True)
        ):
            whole = np.asarray(total(i, j))
            most = np.minimum(whole, whole / dp + (1 - 1 / dp) * largest(i, j))
            if known is not None:
                exact = known[k, i, np.minimum(j - i, known.shape[2] - 1)]
                most = np.where(np.isnan(exact), most, exact)
            parts.append(np.where(whole > 0, most / np.where(whole > 0, whole, 1.0), 1 / dp))
        return parts[0], parts[1]

    def _kept_most(self, num_replicas: int) -> Floats | None:
        """[2, n, lengths] elements and bytes that one replica keeps at the most, by first layer and number of layers;
        nan where these have more than a few parameters. None: not all are listed, or there would be too many. Kept."""
        if num_replicas not in self._most_kept:
            runs = self._runs_of_few
            table: Floats | None = None
            if runs is not None:
                table = np.full((2, self.num_layers, 2 + max((length for _, length, _ in runs), default=0)), np.nan)
                trained = [p for p in self.profile.parameters if p.trainable]
                own = np.array([[math.prod(p.shape), p.bytes] for p in trained] + [[0, 0]], float).T
                listed = np.full((len(runs), FEW_PARAMETERS), len(trained))
                for row, (_, _, some) in enumerate(runs):
                    listed[row, : len(some)] = some
                starts, lengths = np.array([[start, length] for start, length, _ in runs], np.int64).reshape(-1, 2).T
                table[:, starts, lengths] = largest_shares(own[0][listed], own[1][listed], num_replicas)
            self._most_kept[num_replicas] = table
        return self._most_kept[num_replicas]

    @cached_property
    def _runs_of_few(self) -> list[tuple[int, int, list[int]]] | None:
        """(first layer, number of layers, which trainable parameters, in their order) of few parameters."""
        if self._unlisted[1].any():
            return None
        trained = [p for p in self.profile.parameters if p.trainable]
        used: list[list[int]] = [[] for _ in range(self.num_layers)]
        for k, parameter in enumerate(trained):
            for place in {self.position[name] for name in parameter.layers} or {0}:
                used[place].append(k)
        found: list[tuple[int, int, list[int]]] = []
        for start in range(self.num_layers):
            some: set[int] = set()
            for end in range(start, self.num_layers):
                some.update(used[end])
                if len(some) > FEW_PARAMETERS:
                    break
                found.append((start, end + 1 - start, sorted(some)))
                if len(found) > MOST_RUNS:
                    return None
        return found

    @cached_property
    def largest_trainable(self) -> tuple[float, float]:
        """Elements and bytes of the largest trainable parameter."""
        elements, num_bytes = (float(one(0, self.num_layers)) for one in self._largest_trainable)
        return elements, num_bytes

    @cached_property
    def _largest_trainable(self) -> tuple[IntervalMax, IntervalMax]:
        """The same of layers; bytes that no Parameter explains count as one of their layer."""
        unlisted = self._unlisted[1]
        elements, num_bytes = unlisted / 4, unlisted.copy()
        for parameter in self.profile.parameters:
            if parameter.trainable:
                at = sorted({self.position[name] for name in parameter.layers}) or [0]
                elements[at] = np.maximum(elements[at], math.prod(parameter.shape))
                num_bytes[at] = np.maximum(num_bytes[at], parameter.bytes)
        return IntervalMax(elements), IntervalMax(num_bytes)

    def synced_parameters(self, cuts: Sequence[int]) -> tuple[tuple[Parameter, tuple[int, ...]], ...]:
        """Parameters that live on several stages, with those stages: copies to be kept equal."""
        edges = np.array(cuts, dtype=np.int64)
        found = []
        for parameter in self.profile.parameters:
            if len(parameter.layers) > 1:
                places = [self.position[name] for name in parameter.layers]
                stages = sorted({int(s) for s in np.searchsorted(edges, places, side="right")})
                if len(stages) > 1:
                    found.append((parameter, tuple(stages)))
        return tuple(found)

    # Helpers

    @cached_property
    def _crossing_tensors(self) -> list[Any]:
        return [item for item in self._tensors if item[2] and item[2][-1] > item[1]]

    @cached_property
    def _measured(self) -> dict[str, Floats]:
        """[sizes, layers] a figure."""
        return {
            name: np.array([[getattr(cost, name) for cost in layer.costs] for layer in self.profile.layers], float).T
            for name in ("forward_s", "backward_s", "saved_bytes")
        }

    @cached_property
    def _measured_parts(self) -> dict[str, Floats]:
        """Likewise the two parts of a backward; nothing where some layer has not both."""
        names = ("backward_input_s", "backward_weight_s")
        tables = {
            name: [[getattr(cost, name) for cost in layer.costs] for layer in self.profile.layers] for name in names
        }
        if any(value is None for table in tables.values() for row in table for value in row):
            return {}
        return {name: np.array(table, float).T for name, table in tables.items()}

    @cached_property
    def _flows(self) -> Flows:
        """The same for every micro-batch size: which tensors go where, as arrays."""
        n, crossing = self.num_layers, self._crossing_tensors
        received = [
            (k, at, previous)
            for k, (_, producer, consumers) in enumerate(crossing)
            for previous, at in pairwise([producer, *(place for place in consumers if place > producer)])
        ]
        return Flows(
            bytes_at=table([tensor.bytes_at for tensor, _, _ in crossing], len(self.profile.microbatch_sizes)),
            producer=np.array([producer for _, producer, _ in crossing], np.int64),
            last=np.array([consumers[-1] for _, _, consumers in crossing], np.int64),
            near=np.array([consumers[-1] == producer + 1 for _, producer, consumers in crossing], np.bool_),
            gradient=np.array([tensor.needs_gradient for tensor, _, _ in crossing], np.bool_),
            received=np.array(received, np.int64).reshape(-1, 3),
            num_layers=n,
        )

    @cached_property
    def _memory(self) -> dict[str, Floats]:
        """[sizes, layers] a field of LayerMemory; a layer of which no more is known needs what it saves."""

        def told(cost: LayerCost) -> LayerMemory:
            saved = cost.saved_bytes
            return cost.memory or LayerMemory(
                saved_bytes=saved, product_bytes=saved, forward_peak_bytes=saved, backward_peak_bytes=saved
            )

        rows = [[told(cost) for cost in layer.costs] for layer in self.profile.layers]
        return {
            name: np.array([[getattr(memory, name) for memory in row] for row in rows], float).T
            for name in LayerMemory.model_fields
        }

    def _arrays(self, samples: float) -> LayerArrays:
        sizes, n = self.profile.microbatch_sizes, self.num_layers
        values = {name: interpolated(sizes, table, samples) for name, table in self._measured.items()}
        parts = {name: interpolated(sizes, table, samples) for name, table in self._measured_parts.items()}
        flows = self._flows
        num_bytes = interpolated(sizes, flows.bytes_at, samples)
        gradient_bytes = num_bytes * flows.gradient
        crossing, following = (
            [each(amount) for amount in (num_bytes, gradient_bytes)] for each in (flows.crossing, flows.following)
        )
        forward_s, backward_s, saved_bytes = values["forward_s"], values["backward_s"], np.rint(values["saved_bytes"])
        return LayerArrays(
            samples=samples,
            forward_s=forward_s,
            backward_s=backward_s,
            saved_bytes=saved_bytes,
            backward_input_s=parts.get("backward_input_s"),
            backward_weight_s=parts.get("backward_weight_s"),
            before_s=sums_before(forward_s + backward_s),
            forward_before_s=sums_before(forward_s),
            saved_before=sums_before(saved_bytes),
            crossing_bytes=crossing[0],
            crossing_gradient_bytes=crossing[1],
            next_bytes=following[0],
            next_gradient_bytes=following[1],
            received=IntervalSum(n, flows.received_uses(num_bytes)),
            received_gradient=IntervalSum(n, flows.received_uses(gradient_bytes)),
            _sent=IntervalSum(n, flows.sent_uses(num_bytes)),
            _sent_gradient=IntervalSum(n, flows.sent_uses(gradient_bytes)),
        )

    @cached_property
    def _unlisted(self) -> tuple[Floats, Floats]:
        """Bytes, and bytes with gradients, that a layer states beyond the Parameters that name it: they are its own."""
        own = np.array([[layer.parameter_bytes, layer.gradient_bytes] for layer in self.profile.layers], float).T
        for parameter in self.profile.parameters:
            places = sorted({self.position[name] for name in parameter.layers})
            own[0, places] -= parameter.bytes
            own[1, places] -= parameter.bytes * parameter.trainable
        return np.maximum(own[0], 0.0), np.maximum(own[1], 0.0)

    def _placed(
        self, amount: Callable[[Parameter], float], unlisted: Floats, others: Iterable[Use] = ()
    ) -> IntervalSum:
        """Parameters by the layers that use them; one that none uses is held where layer 0 is."""
        uses = [Use(k, -1, own) for k, own in enumerate(unlisted.tolist()) if own > 0]
        for parameter in self.profile.parameters:
            uses += self._uses(parameter.layers, amount(parameter))
        return IntervalSum(self.num_layers, [*uses, *others])

    def _buffer_uses(self) -> list[Use]:
        own = np.array([layer.buffer_bytes for layer in self.profile.layers], float)
        uses = []
        for buffer in self.profile.buffers:
            own[sorted({self.position[name] for name in buffer.layers})] -= buffer.bytes
            uses += self._uses(buffer.layers, buffer.bytes)
        return uses + [Use(k, -1, rest) for k, rest in enumerate(own.tolist()) if rest > 0]

    def _uses(self, layers: Iterable[str], amount: float) -> list[Use]:
        places = sorted({self.position[name] for name in layers}) or [0]
        return [Use(at, before, amount) for before, at in zip([-1, *places], places, strict=False)]
