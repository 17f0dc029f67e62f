"""The replay against closed forms, published figures and a longest path; predictions against sums made by hand."""

import itertools
import random
from dataclasses import replace

import chains
import pytest
from longest_path import AS_SENT, longest_path

from partitioner.actions import Action, chain
from partitioner.clock import Replica, StageCost, Transfer, run_clock
from partitioner.costs import Baseline, replica_sync_s, single_device
from partitioner.errors import ArgumentError
from partitioner.graph import CostGraph
from partitioner.plan import Plan, Stage
from partitioner.profiles import Layer, LayerCost, Parameter, Profile, Tensor
from partitioner.schedule import build_schedule, forward_only, in_flight, schedule_table
from partitioner.simulator import predict, replay, simulate
from partitioner.specs import Cluster, Device, Link, Saving, Training
from partitioner.split import Split, place

FREE = Link(sizes_bytes=(0, 1), seconds=(0.0, 0.0))
NAMES = ("gpipe", "1f1b")
SIZES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 13)))


# Closed forms


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_equal_stages_idle_as_the_closed_form_says(name, p, m):
    step = replay(build_schedule(name, p, m), [StageCost(1.0, 2.0)] * p)
    assert step.step_s == pytest.approx(3.0 * (m + p - 1))
    assert step.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("m", "speedup", "idle"), [(1, 1.0, 0.75), (4, 2.2857, 0.4286), (8, 2.9091, 0.2727), (32, 3.6571, 0.0857)]
)
def test_four_equal_stages_speed_up_as_published(name, m, speedup, idle):
    step = replay(build_schedule(name, 4, m), [StageCost(1.0 / m, 2.0 / m)] * 4)
    assert 4 * 3.0 / step.step_s == pytest.approx(speedup, abs=5e-5)
    assert step.bubble_fraction == pytest.approx(idle, abs=5e-5)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0])
@pytest.mark.parametrize("each", [2, 3])
def test_interleaved_stages_fill_and_drain_as_many_times_faster(p, m, each):
    step = replay(build_schedule("interleaved", each * p, m, num_ranks=p), [StageCost(1.0, 2.0)] * (each * p))
    assert step.step_s == pytest.approx(3.0 * (each * m + p - 1))
    assert step.bubble_fraction == pytest.approx((p - 1) / (each * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.0, 1.5)])
def test_zero_bubble_orders_idle_as_their_paper_says(p, m, f, i, w):
    """(p - 1) (F + I - W) with the memory of 1F1B, (p - 1) (F + I - 2 W) with twice that; nothing where F = I = W."""
    stages = [StageCost(f, i + w, backward_input_s=i, backward_weight_s=w)] * (2 * p)
    edges = [Transfer(*edge, 0.0, 0.0) for edge in chain(2 * p)]
    one = run_clock(schedule_table("zero-bubble", p, m), Replica(tuple(stages[:p]), tuple(edges[: p - 1])))
    two = run_clock(schedule_table("zero-bubble-h2", p, m), Replica(tuple(stages[:p]), tuple(edges[: p - 1])))
    assert one.rank_end_s.max() == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w))
    assert two.period_s == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - 2 * w))
    if f == i == w:
        vee = run_clock(schedule_table("zero-bubble-v", 2 * p, m), Replica(tuple(stages), tuple(edges)))
        assert vee.period_s == pytest.approx(two.period_s * 2)  # twice the layers
        assert vee.rank_end_s.max() == pytest.approx(6 * m * f + (p - 1) * f)


@pytest.mark.parametrize("slow", range(4))
def test_gpipe_fills_and_drains_at_the_pace_of_the_slowest_stage_as_published(slow):
    seconds = [3.0 if stage == slow else 1.0 for stage in range(4)]
    step = replay(build_schedule("gpipe", 4, 8), [StageCost(t / 24, t / 12) for t in seconds])
    assert 6.0 / step.step_s == pytest.approx(1.7778, abs=5e-5)
    assert step.bubble_fraction == pytest.approx(0.5556, abs=5e-5)


def test_1f1b_hides_the_wait_of_a_slow_first_stage_but_not_of_a_slow_last_one():
    # Stage 0 runs three more forwards while its first micro-batch is away, which takes the others less time than that.
    first, last = (
        replay(build_schedule("1f1b", 4, 8), [StageCost(t / 24, t / 12) for t in seconds])
        for seconds in ((3.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 3.0))
    )
    assert first.idle_s(0) == pytest.approx(0.0)
    assert 6.0 / first.step_s == pytest.approx(2.0)
    assert 6.0 / last.step_s == pytest.approx(1.7778, abs=5e-5)


def test_gpipe_of_unequal_stages_is_two_pipelines_one_after_the_other():
    rng = random.Random(1)
    for _ in range(50):
        p, m = rng.randint(1, 6), rng.randint(1, 9)
        stages = [StageCost(rng.random(), rng.random()) for _ in range(p)]
        f, b = [stage.forward_s for stage in stages], [stage.backward_s for stage in stages]
        expected = sum(f) + (m - 1) * max(f) + sum(b) + (m - 1) * max(b)
        assert replay(build_schedule("gpipe", p, m), stages).step_s == pytest.approx(expected)


@pytest.mark.parametrize("m", [1, 5])
def test_inference_of_one_microbatch_is_plain_model_parallelism(m):
    stages = [StageCost(t, 0.0) for t in (1.0, 3.0, 2.0)]
    transfers = [Transfer(0, 1, 0.5, 9.0), Transfer(1, 2, 0.25, 9.0)]
    step = replay(forward_only(3, m), stages, transfers)
    assert step.step_s == pytest.approx(1.0 + 0.5 + 3.0 * m + 0.25 + 2.0)
    assert {span.kind for span in step.spans} <= {"F", "send", "recv"}


def test_one_microbatch_goes_there_and_back():
    stages = [StageCost(1.0, 2.0), StageCost(3.0, 4.0)]
    step = replay(build_schedule("1f1b", 2, 1), stages, [Transfer(0, 1, 0.5, 0.25)], overhead_s=0.125)
    assert step.step_s == pytest.approx(1 + 3 + 4 + 2 + 0.5 + 0.25 + 4 * 0.125)


def test_transfers_hide_behind_compute_only_where_they_overlap():
    stages = [StageCost(1.0, 0.0)] * 2
    hidden = replay(forward_only(2, 10), stages, [Transfer(0, 1, 1.0, 0.0)])
    shown = replay(forward_only(2, 10), stages, [Transfer(0, 1, 1.0, 0.0)], overlap=False)
    assert hidden.step_s == pytest.approx(1 + 1 + 10)
    assert shown.step_s == pytest.approx(1 + 10 * 2)
    assert hidden.communication_s(1) == pytest.approx(1.0)
    assert shown.communication_s(1) == pytest.approx(10.0)
    assert hidden.idle_s(1) == shown.idle_s(1) == pytest.approx(1.0)


def test_a_wire_carries_one_message_at_a_time():
    step = replay(forward_only(2, 10), [StageCost(1.0, 0.0)] * 2, [Transfer(0, 1, 3.0, 0.0)])
    assert step.step_s == pytest.approx(1 + 10 * 3 + 1)


def test_stages_without_an_edge_between_them_do_not_wait():
    towers = replay(forward_only(3, 1), [StageCost(2.0, 0.0)] * 3, [Transfer(0, 2, 0.0, 0.0), Transfer(1, 2, 0.0, 0.0)])
    assert towers.step_s == pytest.approx(4.0)


def test_sync_follows_the_last_backward_and_the_optimizer_the_step():
    stages = [StageCost(1.0, 1.0, sync_s=0.5, optimizer_s=0.25), StageCost(1.0, 1.0, sync_s=9.0, optimizer_s=0.125)]
    step = replay(build_schedule("gpipe", 2, 1), stages)
    assert [(s.rank, s.start_s, s.end_s) for s in sorted(step.spans) if s.kind == "sync"] == [
        (0, 4.0, 4.5),
        (1, 3.0, 12.0),
    ]
    assert [(s.rank, s.start_s) for s in sorted(step.spans) if s.kind == "optimizer"] == [(0, 12.0), (1, 12.0)]
    assert (step.step_s, step.optimizer_s) == (12.0, 0.25)


def test_a_schedule_that_cannot_run_is_refused_with_its_grid():
    orders = list(build_schedule("1f1b", 2, 2))
    orders[1] = tuple(reversed(orders[1]))
    with pytest.raises(ArgumentError, match=r"\[1B1\]"):
        replay(orders, [StageCost(1.0, 1.0)] * 2)
    with pytest.raises(ArgumentError, match="has 2 stages, but costs are given for 3"):
        replay(build_schedule("1f1b", 2, 2), [StageCost(1.0, 1.0)] * 3, [Transfer(0, 1, 0.0, 0.0)])


# Where the time of a rank goes


def test_every_rank_accounts_for_the_whole_step():
    rng = random.Random(11)
    for overlap in (True, False) * 30:
        p, m = rng.randint(1, 5), rng.randint(1, 7)
        stages = [StageCost(rng.random(), rng.random(), sync_s=rng.random()) for _ in range(p)]
        edges = sorted({*chain(p), *(pair for pair in itertools.combinations(range(p), 2) if rng.random() < 0.3)})
        transfers = [Transfer(*edge, rng.random(), rng.random()) for edge in edges]
        step = replay(build_schedule(rng.choice(NAMES), p, m), stages, transfers, overlap=overlap)
        for rank in range(p):
            mine = sorted((s.start_s, s.end_s) for s in step.spans if s.rank == rank and s.kind != "send")
            assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(mine))
            busy_s = step.busy_s(rank) + step.communication_s(rank)
            assert busy_s == pytest.approx(sum(end - start for start, end in mine))
            assert step.idle_s(rank) == pytest.approx(step.step_s - busy_s)


def test_a_rank_communicates_while_it_waits_for_something_that_was_sent_and_idles_before():
    rng = random.Random(13)
    for _ in range(60):
        p, m = rng.randint(3, 5), rng.randint(1, 6)
        stages = [StageCost(rng.random(), rng.random()) for _ in range(p)]
        edges = sorted({*chain(p), *(pair for pair in itertools.combinations(range(p), 2) if rng.random() < 0.5)})
        transfers = [Transfer(*edge, 3 * rng.random(), 3 * rng.random()) for edge in edges]
        orders, overhead_s = build_schedule("1f1b", p, m), 0.0
        step = replay(orders, stages, transfers)
        end = longest_path(orders, stages, transfers, overhead_s, True)
        for rank, order in enumerate(orders):
            communication_s = free = 0.0
            for action in order:
                stage, kind, k = action
                others = [(t.target if kind == "B" else t.source) for t in transfers if stage in (t.source, t.target)]
                sent_as = AS_SENT[kind]
                messages = [(other, stage, sent_as, k) for other in others if (other, stage, sent_as, k) in end]
                travels = [(end[Action(message[0], kind, k)], end[message]) for message in messages]
                start = max([free, *(arrived for _, arrived in travels)])
                times = sorted({free, start, *(t for pair in travels for t in pair if free < t < start)})
                for first, last in itertools.pairwise(times):
                    if any(sent <= first and last <= arrived for sent, arrived in travels):
                        communication_s += last - first
                free = end[action]
            assert step.communication_s(rank) == pytest.approx(communication_s)


# Predictions


def profile_of(seconds, *, parameter_bytes=0, tensor_bytes=0, fixed_s=0.0, **more):
    """A chain of layers: forward `seconds` a sample plus `fixed_s`, backward twice that; a tensor to the next layer."""
    ids = [f"layer{k}" for k in range(len(seconds))]
    layers = tuple(
        Layer(
            id=name,
            class_name="Linear",
            parameter_bytes=parameter_bytes,
            gradient_bytes=parameter_bytes,
            costs=tuple(
                LayerCost(samples=n, forward_s=fixed_s + s * n, backward_s=2 * (fixed_s + s * n)) for n in (1, 2)
            ),
        )
        for name, s in zip(ids, seconds, strict=True)
    )
    tensors = tuple(
        Tensor(
            id=f"out{k}",
            producer=ids[k],
            consumers=(ids[k + 1],),
            shape=(1,),
            dtype="float32",
            bytes_at=(tensor_bytes, 2 * tensor_bytes),
            needs_gradient=True,
        )
        for k in range(len(ids) - 1)
    )
    fields = {
        "model": "chain",
        "layers": layers,
        "tensors": tensors,
        "parameters": (),
        "microbatch_sizes": (1, 2),
        "device": "test",
        "device_kind": "cpu",
        "provenance": "given",
    }
    return Profile(**(fields | more))


def cluster_of(num_devices, *, link=FREE, nodes=None, inter=None, speeds=None, memory_bytes=2**40):
    devices = tuple(
        Device(name="test", kind="cpu", memory_bytes=memory_bytes, relative_speed=speed)
        for speed in speeds or [1.0] * num_devices
    )
    return Cluster(devices=devices, nodes=tuple(nodes or [0] * num_devices), intra=link, inter=inter or link)


def prediction_of(
    profile, cluster, *, batch_size, cuts, m, dp=1, schedule="1f1b", pp=None, devices=None, recompute=(), **more
):
    mesh = {"pp": pp or len(cuts) + 1, "dp": dp}
    split = Split.placed(cluster, cuts, mesh, m, schedule, tuple(map(Saving, recompute)))
    if devices is not None:
        split = replace(split, devices=devices)
    return predict(CostGraph.from_profile(profile), cluster, Training(batch_size=batch_size), split, **more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("m", "speedup", "idle"), [(1, 1.0, 0.75), (4, 2.2857, 0.4286), (8, 2.9091, 0.2727), (32, 3.6571, 0.0857)]
)
def test_a_prediction_gives_the_published_figures(name, m, speedup, idle):
    found = prediction_of(profile_of([1.0] * 8), cluster_of(4), batch_size=32, cuts=(2, 4, 6), m=m, schedule=name)
    assert found.speedup == pytest.approx(speedup, abs=5e-5)
    assert found.bubble_fraction == pytest.approx(idle, abs=5e-5)
    assert found.efficiency == pytest.approx(1 - idle, abs=5e-5)
    assert found.lost.fill_drain == pytest.approx(idle, abs=5e-5)
    assert found.lost.total == pytest.approx(found.lost.fill_drain)
    assert [stage.in_flight for stage in found.stages] == [in_flight(name, s, 4, m) for s in range(4)]


def test_a_prediction_with_several_stages_a_rank_counts_devices_not_stages():
    """2 ranks, 4 micro-batches of 1 s there and 2 s back each: (p - 1) / (v m + p - 1) of the time is idle."""
    profile, cluster = profile_of([1.0] * 8), cluster_of(2)
    found = prediction_of(profile, cluster, batch_size=4, cuts=(2, 4, 6), m=4, pp=2, schedule="interleaved")
    assert found.bubble_fraction == pytest.approx(1 / 9)
    assert found.efficiency == pytest.approx(8 / 9)
    assert found.speedup == pytest.approx(16 / 9)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    on_rank = [found.stages[0], found.stages[2]]
    assert sum(one.compute_s + one.communication_s + one.idle_s for one in on_rank) == pytest.approx(found.step_s)
    assert found.lost.total == pytest.approx(1 - found.efficiency)
    alone = prediction_of(profile, cluster, batch_size=4, cuts=(4,), m=4)
    assert found.step_s < alone.step_s
    with pytest.raises(ArgumentError, match=r"the cuts .* make 4 stages, but the mesh has pp=3"):
        prediction_of(profile, cluster_of(3), batch_size=4, cuts=(2, 4, 6), m=4, pp=3, schedule="interleaved")


def test_a_slow_head_caps_the_speedup_for_any_number_of_microbatches():
    profile, cluster = profile_of([1.0] * 6 + [8.0]), cluster_of(2)
    speedups = [prediction_of(profile, cluster, batch_size=256, cuts=(6,), m=m).speedup for m in (1, 4, 64, 256)]
    assert speedups == sorted(speedups)
    assert 1.7 < speedups[-1] <= 1.75


def test_a_device_twice_as_fast_takes_half_the_time():
    profile = profile_of([1.0] * 12)
    found = prediction_of(profile, cluster_of(2, speeds=[2.0, 1.0]), batch_size=512, cuts=(8,), m=512)
    assert [stage.forward_s for stage in found.stages] == pytest.approx([4.0, 4.0])
    assert found.single_device_s == pytest.approx(3 * 512 * 12 / 2.0)
    assert found.speedup == pytest.approx(1.5, rel=0.01)
    assert found.lost.imbalance == pytest.approx(0.25, rel=0.01)


def test_lost_efficiency_of_a_step_worked_out_by_hand():
    # Two stages of 3 and 1 seconds forward (backward twice) a sample, 4 samples one at a time, gpipe; a message takes
    # 0.5 s. The first stage is the slower one: forward 4 x 3 + 0.5 + 1; backward 2 + 0.5 + 4 x 6.
    profile = profile_of([3.0, 1.0], parameter_bytes=400, tensor_bytes=100, optimizer_s=1.0)
    cluster = cluster_of(4, link=Link(sizes_bytes=(0, 1), seconds=(0.5, 0.5)))
    found = prediction_of(profile, cluster, batch_size=8, cuts=(1,), m=4, dp=2, schedule="gpipe")
    sync_s, optimizer_s = 2 * 0.5, 0.5
    assert found.step_s == pytest.approx(40.0 + sync_s)
    assert found.optimizer_s == pytest.approx(optimizer_s)
    total_s, single_s = 41.0 + 0.5, 8 * 12.0 + 1.0
    assert found.single_device_s == pytest.approx(single_s)
    assert found.throughput == pytest.approx(8 / total_s)
    assert found.speedup == pytest.approx(single_s / total_s)
    assert found.lost.optimizer * total_s == pytest.approx(0.5 - 1.0 / 4)
    assert found.lost.sync * total_s == pytest.approx(1.0)
    assert found.lost.communication * total_s == pytest.approx(1.0)
    assert found.lost.fill_drain * total_s == pytest.approx(39.0 - 36.0)
    assert found.lost.imbalance * total_s == pytest.approx(36.0 - 24.0)
    assert found.lost.small_microbatch == pytest.approx(0.0)
    assert found.lost.total == pytest.approx(1 - found.efficiency)
    slow, fast = found.stages
    assert (slow.compute_s, fast.compute_s) == pytest.approx((36.0, 12.0))
    assert slow.communication_s == pytest.approx(0.5 + sync_s)
    assert fast.communication_s == pytest.approx(4 * 0.5 + sync_s)
    assert (slow.send_bytes, fast.send_bytes) == (100, 0)


def test_small_microbatches_lose_their_fixed_cost_a_call():
    profile = profile_of([1.0] * 4, fixed_s=0.5)
    found = prediction_of(profile, cluster_of(2), batch_size=8, cuts=(2,), m=4, overhead_s=0.25)
    work_s, single_s = 3 * 4 * (0.5 + 2.0), 3 * 4 * (0.5 + 8.0) + 2 * 0.25
    assert found.single_device_s == pytest.approx(single_s)
    lost_s = 4 * (work_s / 2 + 2 * 0.25) - single_s / 2
    total_s = found.step_s + found.optimizer_s
    assert found.lost.small_microbatch * total_s == pytest.approx(lost_s)


def random_case(rng):
    n, p, dp = rng.randint(4, 9), rng.randint(1, 3), rng.randint(1, 3)
    profile = profile_of(
        [rng.random() for _ in range(n)],
        parameter_bytes=rng.randint(0, 1000),
        tensor_bytes=rng.randint(0, 1000),
        fixed_s=rng.random(),
        optimizer_s=rng.random(),
    )
    cluster = cluster_of(
        p * dp,
        link=Link.of(rng.random() / 10, 10000.0),
        inter=Link.of(rng.random(), 1000.0),
        nodes=sorted(rng.randint(0, 1) for _ in range(p * dp)),
        speeds=[rng.choice([1.0, 1.0, 2.0]) for _ in range(p * dp)],
    )
    m = rng.choice([1, 2, 4])
    request = {"batch_size": dp * m * rng.randint(1, 3), "m": m, "dp": dp, "schedule": rng.choice(NAMES)}
    request["cuts"] = tuple(sorted(rng.sample(range(1, n), p - 1)))
    return profile, cluster, request


def test_running_a_part_of_the_model_is_a_loss_of_its_own():
    """2 stages of 2 s there and 2 s back, 8 micro-batches, and 0.5 s more on each forward: 8 x 0.5 s a device."""
    profile, cluster = profile_of([1.0] * 4), cluster_of(2)
    plain = prediction_of(profile, cluster, batch_size=8, cuts=(2,), m=8)
    found = prediction_of(profile.model_copy(update={"slicing_s": 0.5}), cluster, batch_size=8, cuts=(2,), m=8)
    assert found.lost.slicing * found.step_s == pytest.approx(8 * 0.5)
    assert found.lost.imbalance == pytest.approx(0.0)
    assert found.lost.small_microbatch == pytest.approx(0.0)
    assert found.lost.fill_drain * found.step_s == pytest.approx(plain.lost.fill_drain * plain.step_s + 0.5)
    assert found.lost.total == pytest.approx(1 - found.efficiency)
    assert plain.lost.slicing == 0


def test_running_layers_again_is_a_loss_of_its_own():
    """The first of two equal stages recomputes: its backwards take 2 s longer, which the other stage waits for."""
    profile, cluster = profile_of([1.0] * 4), cluster_of(2)
    plain = prediction_of(profile, cluster, batch_size=8, cuts=(2,), m=8)
    found = prediction_of(profile, cluster, batch_size=8, cuts=(2,), m=8, recompute=[True, False])
    assert [stage.backward_s for stage in found.stages] == pytest.approx([plain.stages[0].backward_s + 2.0, 4.0])
    assert found.lost.recompute * found.step_s == pytest.approx(8 * 2.0)
    assert found.lost.imbalance == pytest.approx(0.0)
    assert found.lost.total == pytest.approx(1 - found.efficiency)
    both = prediction_of(profile, cluster, batch_size=8, cuts=(2,), m=8, recompute=[True, True])
    assert both.step_s == pytest.approx((8 + 1) * (6.0 + 2.0))
    split = prediction_of(
        profile, cluster, batch_size=8, cuts=(2,), m=8, recompute=[True, True], schedule="zero-bubble"
    )
    assert split.step_s == pytest.approx(8 * 8.0 + 1 * (2.0 + 4.0 - 2.0))  # forwards again belong to I


def test_replicas_of_a_whole_model_reduce_buckets_under_their_last_backward():
    """Four layers of 1 s back each; gradients of 30, 30, 0 and 30 MiB; an all-reduce takes 0.1 s a MiB.

    The last layer's bucket goes out after 1 s and is through after 4 s; then comes that of layer 1, ready after 3 s,
    until 7 s; then that of layer 0, ready after 4 s, until 10 s: 6 s after the backward.
    """
    mib = 2**20
    profile = chains.chain([0.5] * 4, [1.0] * 4, parameter_bytes=[30 * mib, 30 * mib, 0, 30 * mib])
    link = Link(sizes_bytes=(0, mib), seconds=(0.0, 0.1))
    assert replica_sync_s(CostGraph(profile), link, 1, 2, 1.0) == pytest.approx(6.0)
    assert replica_sync_s(CostGraph(profile), link, 1, 2, 0.25) == pytest.approx(3.0)  # only the last bucket shows
    assert replica_sync_s(CostGraph(profile), link, 1, 1, 1.0) == 0
    small = Link(sizes_bytes=(0, mib), seconds=(0.0, 0.001))
    found = prediction_of(profile, cluster_of(2, link=small), batch_size=2, cuts=(), m=1, dp=2)
    assert found.step_s == pytest.approx(6.0 + 0.03)
    assert found.lost.sync * (found.step_s + found.optimizer_s) == pytest.approx(0.03)


def test_the_parts_of_lost_efficiency_add_up_and_those_of_each_stage_too():
    rng = random.Random(3)
    for _ in range(100):
        profile, cluster, request = random_case(rng)
        found = prediction_of(
            profile, cluster, **request, overhead_s=rng.choice([0.0, 0.1]), overlap=rng.random() < 0.7
        )
        assert found.lost.total == pytest.approx(1 - found.efficiency)
        parts = found.lost.model_dump()
        assert all(value > -1e-9 for value in parts.values()), parts
        for stage in found.stages:
            assert stage.compute_s + stage.communication_s + stage.idle_s == pytest.approx(found.step_s)


def plan_of(profile, cluster, *, batch_size, cuts, m, dp, schedule):
    graph = CostGraph.from_profile(profile)
    ranks = place(cluster, len(cuts) + 1, dp)
    return Plan(
        profile=profile,
        cluster=cluster,
        training=Training(batch_size=batch_size),
        mesh={"pp": len(cuts) + 1, "dp": dp},
        schedule=schedule,
        num_microbatches=m,
        stages=[Stage(index=k, layers=ids, ranks=ranks[k]) for k, ids in enumerate(graph.stage_ids(cuts))],
        prediction=prediction_of(profile, cluster, batch_size=batch_size, cuts=cuts, m=m, dp=dp, schedule=schedule),
        lower_bound_s=0.0,
    )


def test_simulating_a_plan_shows_the_step_that_was_predicted_on_all_ranks():
    rng = random.Random(5)
    for _ in range(40):
        profile, cluster, request = random_case(rng)
        plan = plan_of(profile, cluster, **request)
        step = simulate(plan)
        assert step.num_ranks == plan.num_ranks == len({span.rank for span in step.spans})
        assert step.step_s == pytest.approx(plan.prediction.step_s)
        assert step.optimizer_s == pytest.approx(plan.prediction.optimizer_s)
        assert step.bubble_fraction == pytest.approx(plan.prediction.bubble_fraction)


def test_a_plan_can_be_simulated_otherwise_than_it_was_made():
    plan = plan_of(profile_of([1.0] * 4), cluster_of(2), batch_size=8, cuts=(2,), m=2, dp=1, schedule="1f1b")
    assert simulate(plan, microbatches=8).step_s == pytest.approx(3 * 2 * (8 + 1))
    assert simulate(plan, cluster=cluster_of(2, speeds=[2.0, 2.0])).step_s == pytest.approx(simulate(plan).step_s / 2)
    order = [span.kind for span in simulate(plan, schedule="gpipe").spans if span.rank == 1 and span.kind in "FB"]
    assert order == ["F", "F", "B", "B"]
    split = [
        span.kind for span in simulate(plan, schedule="zero-bubble").spans if span.rank == 0 and span.kind in "FIW"
    ]
    assert split == ["F", "F", "I", "W", "I", "W"]
    with pytest.raises(ArgumentError, match="2 or more stages a rank"):
        simulate(plan, schedule="interleaved")
    with pytest.raises(ArgumentError, match="no device 1: the cluster has 1"):
        simulate(plan, cluster=cluster_of(1))


def test_the_slower_replica_holds_up_the_sync_of_all():
    profile = profile_of([1.0, 1.0], parameter_bytes=100)
    cluster = cluster_of(
        4, speeds=[1.0, 1.0, 0.5, 0.5], link=Link(sizes_bytes=(0, 1), seconds=(0.0, 0.0)), nodes=[0, 0, 1, 1]
    )
    cluster = cluster.model_copy(update={"inter": Link(sizes_bytes=(0, 1), seconds=(0.25, 0.25))})
    step = simulate(plan_of(profile, cluster, batch_size=4, cuts=(1,), m=2, dp=2, schedule="1f1b"))
    syncs = {span.rank: (span.start_s, span.end_s) for span in step.spans if span.kind == "sync"}
    assert syncs[0] == syncs[2] == pytest.approx((18.0, 18.5))
    assert step.step_s == pytest.approx(18.5)
    found = prediction_of(profile, cluster, batch_size=4, cuts=(1,), m=2, dp=2)
    assert [stage.compute_s for stage in found.stages] == pytest.approx([12.0, 12.0])
    assert [stage.forward_s for stage in found.stages] == pytest.approx([2.0, 2.0])
    # Ranks 0 and 1 are busy for 6 s and sync for 0.5 s, ranks 2 and 3 are busy for 12 s.
    assert found.bubble_fraction == pytest.approx((2 * 12.0 + 2 * 6.0) / (4 * 18.5))


def test_a_shared_parameter_is_synced_by_its_owners():
    tied = Parameter(
        names=("a", "b"), shape=(25,), dtype="float32", bytes=100, trainable=True, layers=("layer0", "layer3")
    )
    profile = profile_of([1.0] * 4, parameters=(tied,))
    cluster = cluster_of(2, link=Link(sizes_bytes=(0, 100), seconds=(0.0, 100.0)))
    found = prediction_of(profile, cluster, batch_size=2, cuts=(2,), m=2)
    assert found.step_s == pytest.approx(3 * 2 * (2 + 1) + 2 * 50.0)
    frozen = tied.model_copy(update={"trainable": False})
    found = prediction_of(profile_of([1.0] * 4, parameters=(frozen,)), cluster, batch_size=2, cuts=(2,), m=2)
    assert found.step_s == pytest.approx(3 * 2 * (2 + 1))


def test_one_device_uses_its_best_microbatch_that_fits():
    profile = profile_of([1.0, 1.0], tensor_bytes=1000, fixed_s=1.0)
    graph, training = CostGraph.from_profile(profile), Training(batch_size=8)
    assert single_device(graph, cluster_of(1), training) == Baseline(3 * 2 * (1 + 8.0), 0.0, 1, True, 1.0)
    saved = [
        layer.model_copy(
            update={"costs": tuple(c.model_copy(update={"saved_bytes": 1000 * c.samples}) for c in layer.costs)}
        )
        for layer in profile.layers
    ]
    graph = CostGraph.from_profile(profile.model_copy(update={"layers": tuple(saved)}))
    tight = single_device(graph, cluster_of(1, memory_bytes=5000), training)
    assert (tight.num_microbatches, tight.fits) == (4, True)
    assert tight.step_s == pytest.approx(4 * 3 * 2 * (1 + 2.0))
    none = single_device(graph, cluster_of(1, memory_bytes=1000), training)
    assert (none.num_microbatches, none.fits) == (1, False)


def test_neighbours_in_the_pipeline_share_a_node():
    assert place(cluster_of(4, nodes=[0, 0, 1, 1]), 2, 2) == ((0, 2), (1, 3))
    assert place(cluster_of(4, nodes=[0, 1, 0, 1]), 2, 2) == ((0, 1), (2, 3))
    with pytest.raises(ArgumentError, match="need 6 devices, the cluster has 4"):
        place(cluster_of(4), 2, 3)


def test_the_placement_of_ranks_decides_which_traffic_crosses_nodes():
    profile = profile_of([1.0, 1.0], parameter_bytes=1000, tensor_bytes=1)
    cluster = cluster_of(4, nodes=[0, 0, 1, 1], link=FREE, inter=Link.of(0.0, 100.0))
    request = {"batch_size": 8, "cuts": (1,), "m": 4, "dp": 2}
    replicas_apart = prediction_of(profile, cluster, **request)
    replicas_together = prediction_of(profile, cluster, **request, devices=((0, 1), (2, 3)))
    assert replicas_apart.lost.sync > 0
    assert replicas_together.lost.sync == 0
    assert replicas_together.step_s < replicas_apart.step_s


def test_a_tensor_that_skips_a_stage_goes_straight_to_where_it_is_used():
    profile = profile_of([1.0, 8.0, 1.0], tensor_bytes=100)
    first = profile.tensors[0].model_copy(update={"consumers": ("layer1", "layer2")})
    profile = profile.model_copy(update={"tensors": (first, profile.tensors[1])})
    found = prediction_of(profile, cluster_of(3, link=Link.of(0.0, 50.0)), batch_size=1, cuts=(1, 2), m=1)
    assert [stage.send_bytes for stage in found.stages] == [200, 100, 0]
    # 2 s for each message; what skips the slow stage arrives long before it is needed.
    assert found.step_s == pytest.approx(3 * 10.0 + 4 * 2.0)


def test_a_tensor_without_gradient_costs_only_its_way_forward():
    profile = profile_of([1.0, 1.0], tensor_bytes=100)
    mask = profile.tensors[0].model_copy(update={"needs_gradient": False})
    profile = profile.model_copy(update={"tensors": (mask,)})
    found = prediction_of(profile, cluster_of(2, link=Link.of(0.25, 100.0)), batch_size=1, cuts=(1,), m=1)
    assert found.step_s == pytest.approx(6.0 + (0.25 + 1.0) + 0.25)  # an empty answer still takes its latency


def test_a_faster_device_updates_its_parameters_faster():
    profile = profile_of([1.0] * 4, parameter_bytes=100, optimizer_s=1.0)
    found = prediction_of(profile, cluster_of(2, speeds=[2.0, 2.0]), batch_size=1, cuts=(3,), m=1)
    assert found.optimizer_s == pytest.approx(0.75 / 2)
    assert found.single_device_s == pytest.approx((4 * 3.0 + 1.0) / 2)


def test_a_profile_without_any_time_is_refused():
    with pytest.raises(ArgumentError, match="takes 0 s"):
        prediction_of(profile_of([0.0, 0.0]), cluster_of(2), batch_size=1, cuts=(1,), m=1)


def test_requests_that_contradict_themselves_are_refused():
    profile = profile_of([1.0] * 4)
    with pytest.raises(ArgumentError, match=r"make 2 stages, but the mesh has pp=4"):
        prediction_of(profile, cluster_of(4), batch_size=4, cuts=(2,), m=1, pp=4)
    with pytest.raises(ArgumentError, match="a batch of 4 cannot be cut into 2 replicas x 4"):
        prediction_of(profile, cluster_of(4), batch_size=4, cuts=(2,), m=4, dp=2)
