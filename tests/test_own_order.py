"""Orders that a plan has for its own stage times: found, kept in its file, simulated, drawn; refused where they lie."""

import json
import random
from functools import cache

import pytest
from chains import chain, cluster

from partitioner.actions import Action, check_schedule, most_held
from partitioner.actions import chain as chain_of_stages
from partitioner.clock import run_clock
from partitioner.costs import replica_costs
from partitioner.errors import PartitionerError
from partitioner.graph import CostGraph
from partitioner.own_order import best_order
from partitioner.plan import Plan, load
from partitioner.report.document import document
from partitioner.residency import residency
from partitioner.schedule import build_schedule, schedule_table
from partitioner.simulator import simulate
from partitioner.solver import solve
from partitioner.specs import Training


@cache
def uneven_plan(schedule="zero-bubble", memory_bytes=2**30):
    return planned(schedule, memory_bytes)


def planned(schedule="zero-bubble", memory_bytes=2**30, seed=3, **more):
    rng = random.Random(seed)
    profile = chain(
        [rng.uniform(0.5, 1.5) for _ in range(12)],
        [rng.uniform(1.0, 3.0) for _ in range(12)],
        saved_bytes=100,
        tensor_bytes=10,
        parameter_bytes=5,
    )
    training = Training(batch_size=12, mesh={"pp": 4}, schedule=schedule, microbatches=12, **more)
    return solve(profile, cluster(4, memory_bytes=memory_bytes), training)


def textbook_step_s(plan):
    (replica,) = replica_costs(CostGraph(plan.profile), plan.cluster, plan.training, plan.split)
    table = schedule_table(plan.schedule, plan.num_stages, plan.num_microbatches, plan.mesh["pp"])
    return float(run_clock(table, replica).rank_end_s.max())


@pytest.mark.parametrize("schedule", ["zero-bubble", "zero-bubble-h2", "zero-bubble-v"])
def test_a_plan_has_the_order_found_where_it_is_faster_than_the_schedules_own(schedule, tmp_path):
    plan = uneven_plan(schedule)
    assert plan.orders is not None and not plan.runnable
    assert plan.prediction.step_s < textbook_step_s(plan)
    assert plan.prediction.step_s == pytest.approx(best_order(plan).step_s)
    assert simulate(plan).step_s == pytest.approx(plan.prediction.step_s)
    check_schedule(plan.actions(), chain_of_stages(plan.num_stages))
    assert "the order of actions was searched" in " ".join(plan.why)
    assert "not known: the order of actions was searched" in str(plan)
    page, textbook = document(plan), document(plan.model_copy(update={"orders": None}))
    assert "proven best" in textbook and "proven best" not in page and "<dd>not known<" in page
    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert again == plan and again.actions() == plan.actions()
    assert str(again) == str(plan)


def test_what_a_plan_of_its_own_order_holds_is_what_it_says_and_within_the_limit():
    roomy = uneven_plan()
    for memory_bytes in (2**30, max(stage.memory.total for stage in roomy.prediction.stages) * 3 // 4):
        plan = uneven_plan(memory_bytes=memory_bytes)
        held = most_held(plan.actions())
        for stage, one in zip(plan.prediction.stages, residency(plan, simulate(plan)), strict=True):
            assert one.peak.total == stage.memory.total <= memory_bytes
        assert [stage.in_flight for stage in plan.prediction.stages] == [held[stage] for stage in range(4)]


def test_where_the_schedules_own_order_is_the_best_a_plan_has_none():
    """Nothing beats (p - 1) (F + I - W) without more memory than the order itself takes."""
    profile = chain([1.0] * 4, [2.0] * 4, saved_bytes=100)
    most = 3 * 100 + 5
    training = Training(batch_size=6, mesh={"pp": 4}, schedule="1f1b", microbatches=6)
    assert solve(profile, cluster(4), training).orders is None
    training = Training(batch_size=3, mesh={"pp": 3}, schedule="zero-bubble", microbatches=3)
    plan = solve(chain([1.0] * 3, [2.0] * 3, saved_bytes=100), cluster(3, memory_bytes=most), training)
    assert plan.orders is None
    assert plan.actions() == build_schedule("zero-bubble", 3, 3)


def test_a_plan_is_no_slower_than_any_textbook_order_that_fits_its_stages():
    """Three micro-batches on these stages: no order that is searched comes up to the one of zero-bubble-h2."""
    rng = random.Random(5)
    forward_s = [rng.choice([0.0, rng.uniform(0.5, 1.5), 3.0]) for _ in range(16)]
    profile = chain(forward_s, [2 * s * rng.uniform(0.5, 1.5) for s in forward_s], saved_bytes=100, tensor_bytes=10)
    training = Training(batch_size=3, mesh={"pp": 4}, schedule="zero-bubble", microbatches=3)
    plan = solve(profile, cluster(4), training)
    assert plan.prediction.step_s <= simulate(plan, schedule="zero-bubble-h2").step_s * (1 + 1e-9)
    assert plan.prediction.step_s == pytest.approx(best_order(plan).step_s)


def test_another_schedule_is_simulated_in_the_order_that_a_plan_for_it_would_have():
    plan = uneven_plan()
    whole = uneven_plan("1f1b")
    assert whole.orders is None
    pinned = {layer: stage.index for stage in whole.stages for layer in stage.layers}
    other = planned(pin=pinned)
    assert other.orders is not None
    assert simulate(whole, schedule="zero-bubble").step_s == pytest.approx(other.prediction.step_s)
    assert simulate(plan, microbatches=6).step_s > 0


def changed(plan, change):
    fields = json.loads(plan.model_dump_json())
    fields["orders"] = change([order.split() for order in fields["orders"]])
    fields["orders"] = [" ".join(order) for order in fields["orders"]]
    return Plan.model_validate(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda orders: [orders[0][1:], *orders[1:]], "0F0 is missing"),
        (lambda orders: [orders[0][::-1], *orders[1:]], "the orders run 0"),
        (lambda orders: [orders[1], orders[0], *orders[2:]], "the orders run stages on ranks"),
        (lambda orders: orders[:3], "the orders run stages on ranks"),
        (lambda orders: [[*order, f"{k}F12", f"{k}I12", f"{k}W12"] for k, order in enumerate(orders)], "run 13 micro"),
        (lambda orders: [[*orders[0][:-1], "0B11"], *orders[1:]], "zero-bubble runs F and I and W"),
        (lambda orders: [["0X0", *orders[0]], *orders[1:]], "cannot read the action '0X0'"),
        (
            lambda orders: [[*orders[0][:1], *orders[0][2:-2], orders[0][1], *orders[0][-2:]], *orders[1:]],
            "orders run 0",
        ),
    ],
)
def test_orders_that_cannot_be_the_plans_are_refused_when_it_is_read(change, said):
    with pytest.raises((ValueError, PartitionerError), match=said):
        changed(uneven_plan(), change)


def test_orders_that_wait_in_a_circle_are_refused_with_their_grid():
    """Rank 0 wants a gradient before it sends what rank 1 runs before that."""
    plan = uneven_plan("1f1b")
    orders = [list(map(str, order)) for order in plan.actions()]
    first = orders[0].index("0F1")
    orders[0] = [*orders[0][:first], "0B0", *(word for word in orders[0][first:] if word != "0B0")]
    fields = json.loads(plan.model_dump_json())
    fields["orders"] = [" ".join(order) for order in orders]
    with pytest.raises((ValueError, PartitionerError), match=r"no rank can go on"):
        Plan.model_validate(fields)


def test_a_plan_may_have_an_order_of_its_own_of_whole_backwards():
    """All forwards first, under 1f1b: as long as gpipe, and held as gpipe holds."""
    plan = uneven_plan("1f1b")
    gpipe = build_schedule("gpipe", plan.num_stages, plan.num_microbatches)
    own = Plan.model_validate(
        json.loads(plan.model_dump_json()) | {"orders": [" ".join(map(str, order)) for order in gpipe]}
    )
    assert own.actions() == gpipe
    assert simulate(own).step_s == pytest.approx(simulate(plan, schedule="gpipe").step_s)
    assert all(action in own.actions()[1] for action in (Action(1, "F", 11), Action(1, "B", 11)))
