"""Schedules: complete, runnable, and holding in memory exactly what in_flight says; faults are shown where they are."""

import itertools

import networkx as nx
import pytest

from partitioner.errors import ArgumentError
from partitioner.schedule import (
    Action,
    build_schedule,
    chain,
    check_schedule,
    forward_only,
    grid,
    in_flight,
    walk,
)

SIZES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 8, 13)))
NAMES = ("gpipe", "1f1b")


def orders_of(text):
    """One line a rank, actions in order."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_every_schedule_is_sound_at_every_size(name, num_stages, num_microbatches):
    orders = build_schedule(name, num_stages, num_microbatches)
    check_schedule(orders)
    check_schedule(orders, [*chain(num_stages), *((0, target) for target in range(2, num_stages))])
    check_schedule(forward_only(num_stages, num_microbatches))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_in_flight_is_what_the_action_list_holds(name, num_stages, num_microbatches):
    for stage, order in enumerate(build_schedule(name, num_stages, num_microbatches)):
        held = itertools.accumulate(1 if action.kind == "F" else -1 for action in order)
        assert max(held) == in_flight(name, stage, num_stages, num_microbatches)


def test_in_flight_of_the_published_case():
    def of(name, m):
        return [in_flight(name, stage, 4, m) for stage in range(4)]

    assert of("1f1b", 8) == [4, 3, 2, 1]
    assert of("1f1b", 2) == [2, 2, 2, 1]
    assert of("1f1b", 1) == [1, 1, 1, 1]
    assert of("gpipe", 8) == [8, 8, 8, 8]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_equal_stages_take_the_slots_of_the_closed_form(name, num_stages, num_microbatches):
    picture = grid(build_schedule(name, num_stages, num_microbatches))
    assert len(picture.splitlines()[0].split()) - 1 == 2 * (num_microbatches + num_stages - 1)


def test_one_device_runs_one_microbatch_after_another_under_1f1b():
    assert [str(action) for action in build_schedule("1f1b", 1, 2)[0]] == ["0F0", "0B0", "0F1", "0B1"]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_adds_gradients_in_the_order_of_the_microbatches(name):
    for order in build_schedule(name, 4, 6):
        assert [action.microbatch for action in order if action.kind == "B"] == list(range(6))


def test_actions_print_and_parse():
    for action in itertools.chain(*build_schedule("1f1b", 12, 11)):
        assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "-1F0", "²F0", "2f0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ArgumentError, match="as in '2F0'"):
        Action.parse(text)


def test_impossible_sizes_and_names_are_refused():
    with pytest.raises(ArgumentError, match="got 0 and 4"):
        build_schedule("1f1b", 0, 4)
    with pytest.raises(ArgumentError, match="got 3 and 0"):
        forward_only(3, 0)
    with pytest.raises(ArgumentError, match="'zero-bubble'"):
        build_schedule("zero-bubble", 2, 2)


def test_walk_is_a_topological_order_of_the_dependencies():
    orders = build_schedule("1f1b", 5, 7)
    edges = [*chain(5), (0, 3), (1, 4)]
    graph = nx.DiGraph()
    for order in orders:
        nx.add_path(graph, order)
    for source, target in edges:
        for k in range(7):
            graph.add_edge(Action(source, "F", k), Action(target, "F", k))
            graph.add_edge(Action(target, "B", k), Action(source, "B", k))
    steps = [action for _, action in walk(orders, edges)]
    place = {action: k for k, action in enumerate(steps)}
    assert len(steps) == len(place) == graph.number_of_nodes()
    assert all(place[a] < place[b] for a, b in graph.edges)


def test_a_schedule_may_put_several_stages_on_a_rank():
    interleaved = orders_of("""
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)
    check_schedule(interleaved)
    assert len(grid(interleaved).splitlines()) == 3


# What is wrong is said, and marked on the grid


def message(orders, edges=None):
    with pytest.raises(ArgumentError) as caught:
        check_schedule(orders, edges)
    return str(caught.value)


def test_an_empty_schedule_is_refused():
    assert "is empty" in message([[], []])


def test_a_lost_action_is_named():
    text = message(orders_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1"))
    assert "1B1 is missing" in text
    assert "[1F1]" in text


def test_a_lost_stage_is_named():
    assert "1F0 is missing" in message(orders_of("0F0\n2F0"))


def test_a_doubled_action_is_named_and_marked():
    text = message(orders_of("0F0 0F0 0B0\n1F0 1B0"))
    assert "0F0 is there twice" in text
    assert "[0F0]" in text


def test_a_stage_on_two_ranks_is_named():
    assert "stage 0 is on ranks 0 and 1" in message(orders_of("0F0\n0F1 1F0 1F1"))


def test_a_circle_of_waits_is_told_and_marked():
    text = message(orders_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    assert "rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1" in text
    assert text.splitlines()[1:] == [
        "t           0      1      2      3      4",
        "rank 0    0F0      .  [0B0]    0F1    0B1",
        "rank 1      .    1F0  [1F1]    1B0    1B1",
    ]


def test_a_backward_before_its_own_forward_is_a_circle_of_one():
    assert "rank 0 waits at 0B0 for 0F0" in message(orders_of("0B0 0F0"))


def test_messages_that_cross_on_an_edge_are_found():
    text = message(orders_of("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1"))
    assert "message 0 from rank 0 to rank 1 is 0F0 for 1F0, but rank 1 then waits for 0F1" in text
    assert "[0F0]" in text
    assert "[1F1]" in text


def test_edges_that_go_back_or_out_are_refused():
    with pytest.raises(ArgumentError, match="edge 1 -> 0"):
        check_schedule(build_schedule("gpipe", 2, 1), [(1, 0)])
    with pytest.raises(ArgumentError, match="edge 0 -> 2"):
        check_schedule(build_schedule("gpipe", 2, 1), [(0, 2)])


def test_the_picture_of_a_fault_in_a_long_schedule_stays_small():
    orders = [list(order) for order in build_schedule("1f1b", 64, 256)]
    orders[40][200], orders[40][202] = orders[40][202], orders[40][200]
    text = message(orders)
    assert len(text.splitlines()) < 14
    assert max(map(len, text.splitlines()[1:])) < 300
    assert "[40" in text
