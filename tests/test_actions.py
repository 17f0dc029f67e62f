"""Lists of actions: walked in order, proved sound, and every fault shown where it is."""

import networkx as nx
import pytest

from partitioner.actions import Action, chain, check_schedule, grid, most_held, walk
from partitioner.errors import ArgumentError
from partitioner.schedule import build_schedule


def orders_of(text):
    """One line a rank, actions in order."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "-1F0", "²F0", "2f0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ArgumentError, match="as in '2F0'"):
        Action.parse(text)


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


def test_a_backward_may_be_whole_on_one_stage_and_in_two_parts_on_another():
    mixed = orders_of("""
        0F0 0F1 0B0 0B1
        1F0 1I0 1F1 1I1 1W0 1W1
    """)
    check_schedule(mixed)
    assert most_held(mixed) == {0: 2, 1: 2}


def test_only_the_input_part_of_a_backward_holds_the_stage_before_up():
    assert grid(orders_of("0F0 0B0\n1F0 1I0 1W0")).splitlines()[1:] == [
        "rank 0  0F0    .    .  0B0",
        "rank 1    .  1F0  1I0  1W0",
    ]


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


def test_a_lost_part_of_a_backward_is_named():
    text = message(orders_of("0F0 0B0\n1F0 1I0"))
    assert "1W0 is missing" in text
    assert "[1I0]" in text


def test_a_backward_that_is_there_whole_and_in_part_is_named():
    assert "0W0 is part of 0B0, which is there as well" in message(orders_of("0F0 0B0 0W0"))


def test_a_weight_part_before_its_input_part_is_a_circle_of_one():
    assert "rank 0 waits at 0W0 for 0I0" in message(orders_of("0F0 0W0 0I0"))


def test_a_kind_that_there_is_not_is_refused():
    assert "0X0 is of no kind of F, B, I, W" in message([[Action(0, "X", 0)]])


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
    assert "message 0 from stage 0 (rank 0) to stage 1 (rank 1) is 0F0 for 1F0, but rank 1 then waits for 0F1" in text
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
