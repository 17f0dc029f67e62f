"""Bytes of a rank against sums made by hand, by stage place, schedule and kind of replica."""

import pytest
from chains import chain, cluster

from partitioner.graph import CostGraph
from partitioner.memory import BUCKET_BYTES, interval_memory, memory_limit, stage_memory
from partitioner.profiles import Buffer
from partitioner.specs import Device, Saving, Training
from partitioner.split import Split

DEVICE = Device(name="Toy", memory_bytes=10_000, overhead_bytes=100)


def items_of(profile, *, cuts, stage, m=8, dp=1, schedule="1f1b", batch_size=8, **training):
    training, p = Training(batch_size=batch_size * dp, **training), len(cuts) + 1
    savings = (Saving(shard=training.one_shard),) * p
    split = Split.placed(cluster(p * dp), cuts, {"pp": p, "dp": dp}, m, schedule, savings)
    return stage_memory(CostGraph(profile), training, DEVICE, split, stage)


def test_each_item_of_a_middle_stage_is_what_it_says():
    profile = chain(
        [1.0] * 6,
        saved_bytes=[1, 2, 3, 4, 5, 6],
        tensor_bytes=[10, 20, 30, 40, 50, 60],
        parameter_bytes=400,
        buffer_bytes=7,
    )
    items = items_of(profile, cuts=(2, 4), stage=1, optimizer_bytes=8)
    held = 2  # 1f1b, stage 1 of 3
    assert items.weights == items.gradients == 800
    assert items.optimizer == 8 * 200
    assert items.buffers == 7
    assert items.activations == held * (3 + 4)
    assert items.received == held * 20
    assert items.workspace == held * 40 + (20 + 40)  # sent and kept for backward; one gradient each way
    assert items.overhead == 100
    assert items.total == 800 + 800 + 1600 + 7 + 14 + 40 + 140 + 100


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])])
def test_activations_are_those_in_flight(schedule, held):
    profile = chain([1.0] * 4, saved_bytes=1000)
    found = [items_of(profile, cuts=(1, 2, 3), stage=stage, schedule=schedule).activations for stage in range(4)]
    assert found == [1000 * count for count in held]


def test_a_tensor_without_gradient_is_held_but_nothing_comes_back_for_it():
    profile = chain([1.0] * 2, skips=[(0, [1], 30, False)])
    first, second = (items_of(profile, cuts=(1,), stage=stage) for stage in (0, 1))
    assert (first.workspace, second.received, second.workspace) == (2 * 30, 30, 0)


def test_only_trainable_parameters_have_gradients_and_optimizer_state():
    profile = chain([1.0], parameter_bytes=400)
    frozen = profile.model_copy(update={"parameters": (profile.parameters[0].model_copy(update={"trainable": False}),)})
    items = items_of(frozen, cuts=(), stage=0)
    assert (items.weights, items.gradients, items.optimizer) == (400, 0, 0)


def test_a_tied_parameter_is_held_once_by_each_stage_that_uses_it():
    profile = chain([1.0] * 4, ties=[((0, 1, 3), 400)])
    assert [items_of(profile, cuts=(2,), stage=stage).weights for stage in (0, 1)] == [400, 400]
    assert [items_of(profile, cuts=(2, 3), stage=stage).weights for stage in (0, 1, 2)] == [400, 0, 400]
    assert items_of(profile, cuts=(), stage=0).weights == 400


def test_buffers_are_charged_to_the_stages_that_use_them_and_the_rest_to_all():
    plain = chain([1.0] * 4, buffer_bytes=7)
    layers = (plain.layers[0].model_copy(update={"buffer_bytes": 90}), *plain.layers[1:])
    profile = plain.model_copy(
        update={
            "layers": layers,
            "buffers": (
                Buffer(names=("0.a",), bytes=50, layers=("0",)),
                Buffer(names=("table", "3.table"), bytes=300, layers=("1", "3")),
            ),
        }
    )
    buffers = [items_of(profile, cuts=(2,), stage=stage).buffers for stage in (0, 1)]
    assert buffers == [7 + 90 + 300, 7 + 300]  # 40 of layer 0 are listed nowhere: they are its own
    assert items_of(profile, cuts=(), stage=0).buffers == 7 + 90 + 300
    assert [items_of(profile, cuts=(2, 3), stage=stage).buffers for stage in (0, 1, 2)] == [397, 7, 307]


def test_replicas_of_a_whole_model_hold_their_gradients_again_in_buckets():
    profile = chain([1.0] * 2, parameter_bytes=2 * BUCKET_BYTES)
    assert items_of(profile, cuts=(), stage=0, dp=1).buckets == 0
    assert items_of(profile, cuts=(), stage=0, dp=2).buckets == 4 * BUCKET_BYTES
    assert items_of(profile, cuts=(1,), stage=0, dp=2).buckets == BUCKET_BYTES  # one bucket at a time


def test_the_micro_batch_is_the_batch_over_replicas_and_micro_batches():
    profile = chain([1.0], saved_bytes=100)
    assert items_of(profile, cuts=(), stage=0, m=2, batch_size=8).activations == 4 * 100
    assert items_of(profile, cuts=(), stage=0, m=2, batch_size=8, dp=4).activations == 4 * 100


def test_many_runs_at_once_are_the_runs_one_by_one():
    profile = chain(
        [1.0] * 5, saved_bytes=[5, 4, 3, 2, 1], tensor_bytes=9, parameter_bytes=[4, 8, 12, 16, 20], ties=[((0, 4), 40)]
    )
    graph, training = CostGraph(profile), Training(batch_size=4)
    first, last = [0, 1, 2, 0], [2, 3, 5, 5]
    together = interval_memory(graph, training, first, last, samples=1, held=[3, 2, 1, 4], replicated=True)
    for k, held in enumerate([3, 2, 1, 4]):
        alone = interval_memory(graph, training, first[k], last[k], samples=1, held=held, replicated=True)
        assert {name: float(value[k]) for name, value in together.items()} == {n: float(v) for n, v in alone.items()}


def test_the_limit_is_the_device_unless_the_user_sets_a_lower_one():
    assert memory_limit(DEVICE, Training(batch_size=1)) == 10_000
    assert memory_limit(DEVICE, Training(batch_size=1, memory_limit_bytes=4_000)) == 4_000
    assert (
        memory_limit(cluster(1, memory_bytes=500).devices[0], Training(batch_size=1, memory_limit_bytes=4_000)) == 500
    )


def test_stages_of_one_rank_are_counted_at_its_peak_not_each_at_its_own():
    from partitioner.memory import rank_memory
    from partitioner.schedule import build_schedule
    from partitioner.steps import Layout

    profile = chain([1.0] * 6, saved_bytes=[10, 20, 30, 40, 50, 60])
    training = Training(batch_size=12, optimizer_bytes=0)
    found = rank_memory(
        CostGraph(profile),
        training,
        DEVICE,
        Layout(pp=3, stages_per_rank=2, cuts=(1, 2, 3, 4, 5), num_microbatches=12, schedule="interleaved"),
    )
    saved = (10, 20, 30, 40, 50, 60)
    for rank, order in enumerate(build_schedule("interleaved", 6, 12, num_ranks=3)):
        now = most = 0
        for action in order:
            now += saved[action.stage] * {"F": 1, "B": -1}[action.kind]
            most = max(most, now)
        assert found[rank].activations == most
