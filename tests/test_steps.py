"""Steps under a layout: closed forms of schedules, sums of parts, refusals with both numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.actions import Table, chain
from partitioner.calibration import Calibration, Evidence, distances
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.errors import ArgumentError
from partitioner.ordering import Room, search_order
from partitioner.rates import constants
from partitioner.specs import EXCHANGES, Cluster, Shard, known_link
from partitioner.steps import (
    Layout,
    balanced,
    data_parallel_speedup,
    place_of,
    planner,
    rank_parameters,
    training_step,
)
from partitioner.work import Kernel, LayerWork, ModelWork

T = 4096.0
H = 8192.0


def matmul(m: float, n: float, k: float, split: str, weight: bool = False) -> Kernel:
    return Kernel(
        "matmul", "mm", 2 * m * n * k, 4 * (m * k + k * n + m * n), 1.0, (1, m, n, k), split, True, weight, True
    )  # type: ignore[arg-type]


LAYER = LayerWork(
    forward=(matmul(T, 4 * H, H, "n"), matmul(T, H, 4 * H, "k")),
    backward=(
        matmul(T, 4 * H, H, "n"),
        matmul(H, 4 * H, T, "n", True),
        matmul(T, H, 4 * H, "k"),
        matmul(4 * H, H, T, "m", True),
    ),
    output_bytes=4 * T * H,
    output_float32_bytes=4 * T * H,
    parameters=8 * H * H,
    sharded_parameters=8 * H * H,
    forward_reduces=(4 * T * H,),
    backward_reduces=(4 * T * H,),
)
WORK = ModelWork(tuple(f"b{k}" for k in range(16)), (1,), ((LAYER,) * 16,))


def step(**layout: object):  # type: ignore[no-untyped-def]
    return training_step(WORK, "A100-80GB", Layout(**layout), precision="bf16")  # type: ignore[arg-type]


def test_the_parts_add_up_to_the_step() -> None:
    whole = step(tp=2, pp=4, dp=4, num_microbatches=8, recompute="always", overlap=False, shard="zero1")
    names = "compute_s recompute_s tp_s gather_s send_s bubble_s dp_s optimizer_s base_s".split()
    assert whole.step_s == pytest.approx(sum(getattr(whole, name) for name in names))
    assert all(getattr(whole, name) > 0 for name in names if name != "gather_s")
    assert whole.provenance == "estimated" and whole.band > 0


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (8, 32)])
def test_the_bubble_of_equal_stages_is_p_minus_1_of_m(stages: int, microbatches: int) -> None:
    one = step(pp=stages, num_microbatches=microbatches)
    busy = one.compute_s + one.send_s
    ends = one.stages[0].send_s  # the ends of the pipeline send half as much
    assert one.bubble_s == pytest.approx((stages - 1) / microbatches * busy, abs=4 * ends)


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank() -> None:
    plain = step(pp=4, num_microbatches=8)
    interleaved = step(pp=4, num_microbatches=8, schedule="interleaved", stages_per_rank=4)
    assert interleaved.bubble_s == pytest.approx(plain.bubble_s / 4, rel=0.05)
    h1, h2 = (step(pp=4, num_microbatches=8, schedule=name) for name in ("zero-bubble", "zero-bubble-h2"))
    weight = plain.stages[0].weight_s
    assert h1.bubble_s == pytest.approx(max(0.0, plain.bubble_s - 2 * 3 * weight))
    assert h2.bubble_s == pytest.approx(max(0.0, plain.bubble_s - min(3 * 3, 8) * weight))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 2), (4, 6), (8, 8)])
def test_without_a_barrier_the_longer_schedule_takes_a_searched_orders_period(p: int, m: int) -> None:
    free = step(pp=p, num_microbatches=m, schedule="zero-bubble-h2", barrier=False)
    one = free.stages[0]
    cost = StageCost(
        one.forward_s,
        one.backward_s,
        backward_input_s=one.backward_s - one.weight_s,
        backward_weight_s=one.weight_s,
    )
    replica = Replica((cost,) * p, tuple(Transfer(*edge, 0.0, 0.0) for edge in chain(p)))
    room = Room.microbatches(2 * p, range(p), until_weight=1.0)
    orders = search_order(replica, range(p), m, room, barrier=False).orders
    period_s = run_clock(Table.of(orders), replica, overlap=False).period_s
    assert free.compute_s + free.bubble_s == pytest.approx(period_s, rel=0.02)


def test_gradients_are_added_by_what_is_moved_for_it() -> None:
    fused, apart = (step(num_microbatches=2, accumulated_bytes=moved) for moved in (4.0, 18.0))
    rates = planner(WORK, "A100-80GB").rates
    more = 14 * WORK.parameters / rates.moved_per_s
    assert apart.compute_s - fused.compute_s == pytest.approx(2 * more)


def test_a_host_that_waits_for_each_kernel_adds_its_time_to_the_devices() -> None:
    ahead, waiting = step(num_microbatches=2), step(num_microbatches=2, blocking=True)
    prices = planner(WORK, "A100-80GB", precision="bf16")
    host = 16 * sum(
        prices.rates.host_seconds(len(kernels), backward)
        for kernels, backward in ((LAYER.forward, False), (LAYER.backward, True))
    )
    per_microbatch = prices.rates.constants.host_microbatch_s
    assert waiting.compute_s == pytest.approx(ahead.compute_s + 2 * (host + per_microbatch))


def test_full_recomputation_runs_the_forward_again() -> None:
    never, always = step(recompute="never"), step(recompute="always")
    assert always.recompute_s == pytest.approx(never.stages[0].forward_s)
    assert step(recompute="always", recompute_share=0.5).recompute_s == pytest.approx(always.recompute_s / 2)
    assert step(recompute="selective").recompute_s == 0  # there is nothing but linear layers


def test_tensor_parallelism_divides_the_work_and_pays_for_reductions() -> None:
    alone, split = step(), step(tp=4)
    assert split.compute_s == pytest.approx(alone.compute_s / 4, rel=0.1)
    assert alone.tp_s == 0 and split.tp_s > 0
    assert rank_parameters(LAYER, 4) == LAYER.parameters / 4


def test_messages_that_travel_in_pieces_show_less() -> None:
    shown, hidden = step(tp=4), step(tp=4, tp_overlap=True)
    assert hidden.tp_s == pytest.approx((1 - constants().overlap_pieces) * shown.tp_s)
    assert hidden.compute_s == pytest.approx(shown.compute_s)
    assert step(pp=4, num_microbatches=4, send_overlap=True).send_s == 0


def test_flops_are_those_of_the_model() -> None:
    one = step(dp=2, num_microbatches=3)
    assert one.flops == 2 * 3 * 16 * 6 * LAYER.parameters * T


def test_overlap_hides_reductions_and_sharding_divides_the_optimizer() -> None:
    shown, hidden = step(dp=8, overlap=False), step(dp=8)
    assert hidden.dp_s < shown.dp_s
    assert step(dp=8, shard="zero1").optimizer_s == pytest.approx(shown.optimizer_s / 8)
    assert step(dp=8, shard="zero3").gather_s > 0


def test_calibration_multiplies_every_part_and_narrows_the_band() -> None:
    plan = planner(WORK, "A100-80GB", precision="bf16")
    layout = Layout(pp=2, num_microbatches=4)
    before = plan.step(layout)
    plan.calibration = Calibration([Evidence(place_of(layout), 0.1)])
    after, moved = plan.step(layout), math.exp(0.1 * (1 - distances().repeat))
    assert after.factor == pytest.approx(moved) and before.factor == 1
    for name in ("step_s", "compute_s", "send_s", "bubble_s", "optimizer_s", "base_s"):
        assert getattr(after, name) == pytest.approx(moved * getattr(before, name))
    assert after.band == pytest.approx(before.band * math.sqrt(1 - (1 - distances().repeat) ** 2))


def test_convolutions_widen_the_band_by_their_share() -> None:
    prices = planner(WORK, "A100-80GB", precision="bf16")
    c, layout = constants(), Layout()
    kernel = Kernel("convolution", "convolution", 1e12, 1e9, 1.0)
    mixed = dataclasses.replace(LAYER, forward=(*LAYER.forward, kernel))
    priced = prices.layer(mixed, layout)
    share = prices.rates.kernel_seconds(kernel, "bf16") / (priced.forward[0] + priced.backward[0])
    assert 0 < share < 1
    assert prices.band_of([priced]) == pytest.approx((1 - share) * c.error_band + share * c.convolution_band)
    assert prices.band(layout) == c.error_band == prices.step(layout).band


def test_a_cluster_brings_its_own_links() -> None:
    cluster = Cluster.parse("2x4xA100-80GB")
    slow = cluster.model_copy(update={"inter": cluster.inter.model_copy(update={"seconds": (1e-3, 1.0)})})
    layout = Layout(dp=8, overlap=False)
    assert training_step(WORK, slow, layout).dp_s > 2 * training_step(WORK, cluster, layout).dp_s


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.integers(1, 4))
def test_balanced_cuts_are_those_of_brute_force(seconds: list[float], stages: int) -> None:
    stages = min(stages, len(seconds))

    def largest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, len(seconds))))

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(seconds)), stages - 1))
    cuts = balanced(seconds, stages)
    assert len(cuts) == stages - 1
    assert largest(cuts) == pytest.approx(best)


def test_replicas_without_communication_scale_but_for_waiting() -> None:
    prices = planner(WORK, "H100")
    network, moved_per_s = prices.network, prices.rates.moved_per_s
    free = dataclasses.replace(
        network,
        constants=dataclasses.replace(
            network.constants, straggler=0.0, gradient_copies=0.0, replica_base_s=0.0, overlap_gradients=1.0
        ),
    )
    assert data_parallel_speedup(10.0, 1e6, 8, 8, free, moved_per_s) == pytest.approx(8)
    assert data_parallel_speedup(0.01, 1e9, 8, 8, network, moved_per_s) < 7
    assert data_parallel_speedup(1.0, 1e9, 1, 8, network, moved_per_s) == 1


@pytest.mark.parametrize("shard", ["zero1", "zero2", "zero3"])
def test_replicas_exchange_weights_and_gradients_as_often_as_the_shard_level_says(shard: Shard) -> None:
    """No overlap: every exchange shows. Weights and gradients of all layers are alike in 16 bits."""
    m, exchange = 4, EXCHANGES[shard]
    layout = Layout(dp=8, num_microbatches=m, shard=shard, overlap=False)
    prices = planner(WORK, "A100-80GB", precision="bf16")
    found, c = prices.step(layout), constants()
    waiting_s = c.waiting_s(8, m * found.stages[0].total_s) + c.replica_base_s
    all_layers = prices.network.all_gather_s(2 * WORK.parameters, 8, 8)
    one_by_one = 16 * prices.network.all_gather_s(2 * LAYER.parameters, 8, 8)
    assert found.dp_s - waiting_s == pytest.approx((exchange.step_gathers + exchange.step_scatters) * all_layers)
    times = m * (exchange.microbatch_gathers + exchange.microbatch_scatters)
    assert found.gather_s == pytest.approx(times * one_by_one)


def test_nothing_hides_behind_arithmetic_where_messages_go_through_the_host() -> None:
    network = planner(WORK, "RTX4090").network
    assert network.intra.through_host
    assert network.shown_s(0.1, 0.9, 10.0) == 0.1
    between = dataclasses.replace(network, intra=known_link("pcie4"))
    assert between.shown_s(0.1, 0.9, 10.0) == pytest.approx(0.01)


def test_replicas_whose_inputs_the_host_prepares_scale_less() -> None:
    prices = planner(WORK, "H100")
    told = [
        data_parallel_speedup(1.0, 1e8, 8, 8, prices.network, prices.rates.moved_per_s, prepared=prepared)
        for prepared in (False, True)
    ]
    assert told[1] == pytest.approx(8 / (8 / told[0] + 3 * constants().shared_host))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=32), "16 layers cannot fill 32 stages"),
        (Layout(tp=0), "tp=0 is impossible"),
        (Layout(recompute="full"), "recompute 'full' is not known: use never, selective, always"),  # type: ignore[arg-type]
        (Layout(microbatch=0), "a micro-batch of 0 samples"),
        (Layout(pp=2, cuts=(1, 2)), "2 cuts make 3 stages, not 2"),
        (Layout(pp=2, stages_per_rank=2), "2 stages a rank need schedule='interleaved', not '1f1b'"),
    ],
)
def test_impossible_layouts_are_refused_with_their_numbers(layout: Layout, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        training_step(WORK, "A100-80GB", layout)


def test_an_unknown_precision_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="precision 'int4' is not known: use fp32, tf32"):
        planner(WORK, "A100-80GB", precision="int4")  # type: ignore[arg-type]
