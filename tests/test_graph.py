"""Costs of runs of layers against sums written out: layer by layer, tensor by tensor, parameter by parameter."""

import itertools
import random

import numpy as np
import pytest
from chains import chain, random_branches, random_chain

from partitioner import graph as one_graph
from partitioner import intervals
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.intervals import IntervalSum, Use
from partitioner.profiles import Parameter
from partitioner.shares import keepers


def runs(n):
    return [(first, last) for first in range(n) for last in range(first + 1, n + 1)]


def splits(n):
    return [cuts for k in range(n) for cuts in itertools.combinations(range(1, n), k)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("few", [64, 5, 1])
def test_the_fullest_replica_keeps_what_the_executors_rule_gives_it(seed, few, monkeypatch):
    """Of few parameters exactly, of many no less; in elements, by which they are dealt, and in bytes."""
    monkeypatch.setattr(one_graph, "FEW_PARAMETERS", few)
    rng = random.Random(seed)
    n = 6
    parameters = []
    for k in range(12):
        size, width = rng.randrange(1, 9), rng.choice([2, 4])
        users = tuple(str(at) for at in sorted({rng.randrange(n) for _ in range(rng.randrange(3))}))
        parameters.append(
            Parameter(
                names=(f"p{k}",),
                shape=(size,),
                dtype="float32",
                bytes=width * size,
                trainable=rng.random() < 0.8,
                layers=users,
            )
        )
    graph = CostGraph(chain([1.0] * n).model_copy(update={"parameters": tuple(parameters)}))
    for dp in (2, 3, 80):
        found = graph.largest_parts(*np.array(runs(n)).T, dp)
        for k, (first, last) in enumerate(runs(n)):
            here = {str(at) for at in range(first, last)}
            own = [p for p in parameters if p.trainable and here & set(p.layers or ("0",))]
            kept = np.zeros((2, dp))
            for one, at in zip(own, keepers([p.shape[0] for p in own], dp), strict=True):
                kept[:, at] += one.shape[0], one.bytes
            total = kept.sum(axis=1)
            parts = [found[0][k], found[1][k]]
            if not own:
                assert parts == [1 / dp, 1 / dp]
            elif len(own) <= few:
                assert parts == pytest.approx((kept.max(axis=1) / total).tolist())
            else:
                assert all(
                    part >= most - 1e-12 for part, most in zip(parts[:1], kept.max(axis=1) / total, strict=False)
                )


def stage_of(cuts, position):
    return sum(cut <= position for cut in cuts)


@pytest.mark.parametrize("seed", range(8))
def test_a_run_holds_each_parameter_once_however_many_layers_use_it(seed):
    rng = random.Random(seed)
    n = 7
    parameters = []
    for k in range(12):
        users = tuple(str(at) for at in sorted({rng.randrange(n) for _ in range(rng.randrange(4))}))
        size = rng.randrange(1, 9)
        parameters.append(
            Parameter(
                names=(f"p{k}",),
                shape=(size,),
                dtype="float16",
                bytes=2 * size,
                trainable=rng.random() < 0.7,
                layers=users,
            )
        )
    graph = CostGraph(chain([1.0] * n).model_copy(update={"parameters": tuple(parameters)}))
    for first, last in runs(n):
        here = [p for p in parameters if any(first <= int(name) < last for name in p.layers or ("0",))]
        trained = [p for p in here if p.trainable]
        assert graph.weight_bytes(first, last) == sum(p.bytes for p in here)
        assert graph.trainable_bytes(first, last) == sum(p.bytes for p in trained)
        assert graph.trainable_elements(first, last) == sum(p.shape[0] for p in trained)


def test_bytes_that_a_layer_states_beyond_its_listed_parameters_are_its_own():
    profile = chain([1.0, 1.0], parameter_bytes=[40, 0])
    stated = [layer.model_copy(update={"parameter_bytes": 100, "gradient_bytes": 60}) for layer in profile.layers]
    graph = CostGraph(profile.model_copy(update={"layers": tuple(stated)}))
    assert [float(graph.weight_bytes(k, k + 1)) for k in (0, 1)] == [100, 100]
    assert [float(graph.trainable_bytes(k, k + 1)) for k in (0, 1)] == [60, 60]
    assert float(graph.trainable_elements(0, 2)) == 10 + 5 + 15


@pytest.mark.parametrize("seed", range(8))
def test_what_crosses_is_received_and_sent_is_what_the_tensors_say(seed):
    rng = random.Random(seed)
    n = 6
    graph = CostGraph(random_chain(rng, n))
    arrays = graph.at(2)
    tensors = [
        (int(t.producer), [int(name) for name in t.consumers], graph.profile.tensor_bytes(t, 2), t.needs_gradient)
        for t in graph.profile.tensors
    ]

    def total(condition, gradient=False):
        return pytest.approx(
            sum(size for at, to, size, needs in tensors if condition(at, to) and (needs or not gradient))
        )

    for gradient in (False, True):
        received = arrays.received_gradient if gradient else arrays.received
        sent = arrays.sent_gradient if gradient else arrays.sent
        crossing = arrays.crossing_gradient_bytes if gradient else arrays.crossing_bytes
        for cut in range(n + 1):
            assert crossing[cut] == total(lambda at, to, k=cut: at < k <= max(to), gradient)
        for i, j in runs(n):
            assert received(i, j) == total(lambda at, to, i=i, j=j: at < i and any(i <= k < j for k in to), gradient)
            assert sent(i, j) == total(lambda at, to, i=i, j=j: i <= at < j and max(to) >= j, gradient)
    for cut in range(1, n):
        assert graph.crossing(cut, 2) == arrays.crossing_bytes[cut]
        assert graph.linked[cut] == any(at == cut - 1 and cut in to for at, to, _, _ in tensors)


@pytest.mark.parametrize("seed", range(6))
def test_a_tensor_goes_straight_from_its_producer_to_each_stage_that_uses_it(seed):
    graph = CostGraph(random_chain(random.Random(seed), 6))
    for cuts in splits(6):
        expected: dict[tuple[int, int], list[float]] = {}
        for tensor in graph.profile.tensors:
            source = stage_of(cuts, int(tensor.producer))
            for target in {stage_of(cuts, int(name)) for name in tensor.consumers} - {source}:
                moved = expected.setdefault((source, target), [0.0, 0.0])
                moved[0] += graph.profile.tensor_bytes(tensor, 1)
                moved[1] += graph.profile.tensor_bytes(tensor, 1) * tensor.needs_gradient
        found = {(t.source, t.target): [t.forward_bytes, t.backward_bytes] for t in graph.transfers(cuts, 1)}
        assert found == expected


def test_a_skip_over_two_stages_is_not_sent_through_them():
    graph = CostGraph(chain([1.0] * 3, tensor_bytes=10, skips=[(0, [2], 7, False)]))
    assert graph.transfers((1, 2), 1) == ((0, 1, 10, 10), (0, 2, 7, 0), (1, 2, 10, 10))
    assert graph.crossing(1, 1) == graph.crossing(2, 1) == 17


@pytest.mark.parametrize("sizes", [(2,), (2, 8), (1, 4, 16)])
def test_costs_at_a_size_are_those_of_each_layer(sizes):
    graph = CostGraph(chain([0.3, 0.1, 0.2], [0.5, 0.1, 0.7], saved_bytes=[3, 0, 5], sizes=sizes, fixed_s=0.01))
    for samples in (1, 2, 3, 5, 8, 20, 0.5):
        costs = [layer.cost(samples) for layer in graph.profile.layers]
        arrays = graph.at(samples)
        for name in ("forward_s", "backward_s", "saved_bytes"):
            assert getattr(arrays, name) == pytest.approx([getattr(cost, name) for cost in costs])
        assert arrays.before_s[-1] == pytest.approx(sum(cost.forward_s + cost.backward_s for cost in costs))


def test_a_parameter_on_two_stages_is_a_copy_to_be_kept_equal():
    graph = CostGraph(chain([1.0] * 4, ties=[((0, 3), 8), ((1, 1), 8)]))
    assert [(p.names[0], stages) for p, stages in graph.synced_parameters((2,))] == [("tied0", (0, 1))]
    assert graph.synced_parameters(()) == ()
    assert [p.names[0] for p in graph.shared_parameters] == ["tied0"]


def test_cuts_that_are_not_possible_are_refused_with_the_reason():
    graph = CostGraph(chain([1.0] * 4, no_cut={"2": "a checkpoint spans it"}))
    assert graph.allowed_cuts == (1, 3)
    graph.check_cuts((1, 3))
    with pytest.raises(ArgumentError, match=r"before layer 2 \(position 2\): a checkpoint spans it"):
        graph.check_cuts((1, 2))
    for cuts in ((0,), (4,), (3, 1), (1, 1)):
        with pytest.raises(ArgumentError, match=r"without layers.* 4 layers"):
            graph.check_cuts(cuts)


def test_the_digraph_has_every_layer_and_tensor_with_what_makes_and_uses_it():
    graph = CostGraph.from_profile(chain([1.0] * 3, skips=[(0, [2], 7, False)]))
    found = graph.digraph
    assert {name for kind, name in found if kind == "layer"} == {"0", "1", "2"}
    assert set(found.successors(("tensor", "skip0"))) == {("layer", "2")}
    assert set(found.predecessors(("layer", "2"))) == {("tensor", "t1"), ("tensor", "skip0")}
    assert found.nodes["layer", "1"]["position"] == 1


@pytest.mark.parametrize("seed", range(5))
def test_interval_sums_answer_arrays_as_they_answer_numbers(seed):
    rng = random.Random(seed)
    n = 9
    uses = [Use(at, rng.randrange(-1, at), rng.randrange(1, 5)) for at in (rng.randrange(n) for _ in range(30))]
    total = IntervalSum(n, uses)
    pairs = runs(n)
    first, last = (np.array(ends) for ends in zip(*pairs, strict=True))
    expected = [sum(use.amount for use in uses if use.previous < i <= use.at < j) for i, j in pairs]
    assert total(first, last).tolist() == [total(i, j) for i, j in pairs] == expected


@pytest.mark.parametrize("seed", range(20))
def test_two_stages_wait_for_one_another_unless_both_are_within_what_their_cut_leaves_apart(seed):
    graph = CostGraph(random_branches(random.Random(seed), 9))
    first, last = graph.unlinked
    for a, cut, b in itertools.combinations(range(10), 3):
        tensors = [(int(t.producer), [int(name) for name in t.consumers]) for t in graph.profile.tensors]
        if not any(a <= at < cut and any(cut <= k < b for k in to) for at, to in tensors):
            assert first[cut] <= a and b <= last[cut]
    assert (last[graph.linked] == first[graph.linked]).all()


@pytest.mark.parametrize("seed", range(6))
def test_many_skips_are_summed_in_little_memory_as_in_a_table(seed, monkeypatch):
    rng = random.Random(seed)
    n = rng.choice([5, 8, 16, 33])
    uses = [Use(at, rng.randrange(-1, at), float(rng.randrange(9))) for at in range(n) for _ in range(3)]
    tables = IntervalSum(n, uses)
    first, last = np.array(runs(n)).T
    for width in (1, 2, 7):
        monkeypatch.setattr(intervals, "BANDS", (width,))
        assert IntervalSum(n, uses)(first, last).tolist() == tables(first, last).tolist()
    monkeypatch.setattr(intervals, "MOST_CELLS", 0)
    levels = IntervalSum(n, uses)
    assert levels(first, last).tolist() == tables(first, last).tolist()
    written_out = [
        sum(use.amount for use in uses if use.previous < i <= use.at < j) for i, j in zip(first, last, strict=True)
    ]
    assert tables(first, last).tolist() == written_out
