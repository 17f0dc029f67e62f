"""Plans as data: saved, loaded, checked against their profile and cluster, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from given import given_cluster, given_plan, given_profile

from partitioner.errors import ArgumentError
from partitioner.plan import LostEfficiency, MemoryItems, Plan, Stage, load
from partitioner.specs import Training


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    plan = given_plan()
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan


def test_a_plan_file_stands_alone(tmp_path: Path) -> None:
    """Profile, cluster and training are in it: it can be simulated where nothing else is."""
    given_plan().save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert [layer["id"] for layer in content["profile"]["layers"]] == [f"block.{k}" for k in range(4)]
    assert content["cluster"]["devices"][0]["memory_bytes"] == 2**30
    assert content["training"]["batch_size"] == 8
    assert content["version"] == 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"schedule": "zero-bubbles"}, "schedule"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"stages": []}, "stages"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_the_field(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(given_plan().model_dump_json()) | changes))
    with pytest.raises(ArgumentError, match=rf"plan\.json is .*{field}"):
        load(path)


def test_a_file_of_a_later_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(given_plan().model_dump_json()) | {"version": 99}))
    with pytest.raises(ArgumentError, match="is a Plan of format 99, this partitioner reads format 3"):
        load(path)


def stages(*layers: tuple[str, ...], ranks: tuple[tuple[int, ...], ...] = ((0,), (1,))) -> tuple[Stage, ...]:
    return tuple(
        Stage(index=k, layers=names, ranks=placed) for k, (names, placed) in enumerate(zip(layers, ranks, strict=True))
    )


B = [f"block.{k}" for k in range(4)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": stages((B[0], B[1]), (B[2],))}, "hold 3 layers, the profile has 4; not placed: block.3"),
        ({"stages": stages((B[1], B[0]), (B[2], B[3]))}, "the order differs"),
        ({"stages": stages((B[0], B[1]), (B[1], B[2], B[3]))}, "hold 5 layers"),
        ({"stages": stages((B[0], B[1]), (B[2], B[3]), ranks=((0,), (0,)))}, "mesh .* does not match 2 stages"),
        ({"stages": stages((B[0], B[1]), (B[2], B[3]), ranks=((0,), (2,)))}, r"ranks \[0, 2\]"),
        ({"cluster": given_cluster(1)}, "0 to 1 of 1 devices"),
        ({"mesh": {"pp": 1, "dp": 2}}, "mesh"),
        ({"mesh": {"pp": 2}}, "mesh"),
        ({"mesh": {"pp": 2, "dp": 2}}, "mesh"),
        ({"schedule": "interleaved"}, "2 or more stages a rank, got 2 on 2"),
        (
            {
                "schedule": "interleaved",
                "stages": stages((B[0],), (B[1],), (B[2],), (B[3],), ranks=((0,), (1,), (1,), (0,))),
            },
            r"interleaved runs its stages on the pipeline's ranks \(0, 1, 0, 1\), the plan has \(0, 1, 1, 0\)",
        ),
        (
            {"stages": stages((B[0],), (B[1],), (B[2],), (B[3],), ranks=((0,), (1,), (0,), (1,)))},
            "1f1b runs one stage a rank",
        ),
    ],
)
def test_a_plan_that_loses_layers_or_ranks_cannot_be_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        given_plan(**changes)


def test_a_file_from_before_plans_had_devices_has_rank_i_on_device_i(tmp_path: Path) -> None:
    plan = given_plan()
    fields = json.loads(plan.model_dump_json()) | {"version": 1}
    del fields["devices"]
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    assert load(tmp_path / "plan.json") == plan
    assert plan.devices == (0, 1)


def test_a_file_from_before_ranks_took_turns_reads_as_it_was(tmp_path: Path) -> None:
    plan = given_plan()
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(plan.model_dump_json()) | {"version": 2}))
    assert load(tmp_path / "plan.json") == plan and not plan.takes_turns


def test_ranks_sit_on_the_devices_that_the_plan_names(tmp_path: Path) -> None:
    nodes = {"nodes": (0, 0, 1, 1)}
    plan = given_plan(cluster=given_cluster(4).model_copy(update=nodes), devices=(1, 3))
    plan.save(tmp_path / "plan.json")
    plan = load(tmp_path / "plan.json")
    assert plan.stage_devices == ((1,), (3,))
    assert [plan.node_of(rank) for rank in range(2)] == [0, 1]
    assert [plan.index_in_node(rank) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("devices", [(0, 0), (0, 2), (0,), (1, 0, 2), (-1, 0)])
def test_every_rank_needs_a_device_of_its_own(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not one of 0 to 1 for each of the ranks 0 to 1"):
        given_plan(cluster=given_cluster(2), devices=devices)


def test_a_layer_is_on_the_stage_that_lists_it() -> None:
    assert given_plan().stage_of() == {"block.0": 0, "block.1": 0, "block.2": 0, "block.3": 1}


def test_replicas_share_the_batch_and_each_splits_its_part() -> None:
    plan = given_plan(
        cluster=given_cluster(4),
        training=Training(batch_size=48),
        mesh={"pp": 2, "dp": 2},
        stages=stages((B[0], B[1]), (B[2], B[3]), ranks=((0, 2), (1, 3))),
        num_microbatches=3,
    )
    assert (plan.num_stages, plan.num_replicas, plan.num_ranks) == (2, 2, 4)
    assert plan.microbatch_samples * plan.num_microbatches * plan.num_replicas == 48


def test_a_rank_may_have_several_stages() -> None:
    each = [(name,) for name in B]
    looped = given_plan(schedule="interleaved", stages=stages(*each, ranks=((0,), (1,), (0,), (1,))))
    vee = given_plan(schedule="zero-bubble-v", stages=stages(*each, ranks=((1,), (0,), (0,), (1,))))
    assert (looped.num_stages, looped.stages_per_rank, looped.num_ranks) == (4, 2, 2)
    assert (looped.placement, vee.placement) == ((0, 1, 0, 1), (0, 1, 1, 0))


def test_the_gap_is_what_the_whole_step_takes_above_the_bound() -> None:
    assert given_plan(lower_bound_s=0.16).gap == pytest.approx(0.17 / 0.16 - 1)
    assert given_plan(lower_bound_s=0.17).gap == pytest.approx(0.0)
    assert given_plan(lower_bound_s=0.18).gap == 0.0


def test_nothing_is_known_of_the_best_where_the_order_was_searched() -> None:
    plan = given_plan()
    own = tuple(" ".join(map(str, order)) for order in plan.actions())
    searched = type(plan).model_validate(plan.model_dump() | {"orders": own})
    assert plan.gap is not None and searched.gap is None
    assert "not known: the order of actions was searched" in str(searched)


def test_memory_and_losses_add_up_over_all_their_parts() -> None:
    memory = {name: 2**k for k, name in enumerate(MemoryItems.model_fields)}
    assert MemoryItems(**memory).total == 2 ** len(memory) - 1
    lost = {name: 2.0**-k for k, name in enumerate(LostEfficiency.model_fields)}
    assert LostEfficiency(**lost).total == sum(lost.values())


def test_a_split_spec_names_the_first_layer_of_every_later_stage() -> None:
    assert given_plan().to_split_spec() == {"block.3": "beginning"}


def test_a_cut_before_a_repeated_call_has_no_split_spec() -> None:
    profile = given_profile()
    renamed = json.loads(profile.model_dump_json().replace("block.3", "block.0#1"))
    plan = given_plan(profile=type(profile).model_validate(renamed), stages=stages((B[0], B[1], B[2]), ("block.0#1",)))
    with pytest.raises(ArgumentError, match=r"block\.0#1"):
        plan.to_split_spec()


def test_a_plan_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        given_plan().num_microbatches = 8


def test_any_plan_survives_json() -> None:
    plan = given_plan(runnable=False, why=("é → ü",))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
