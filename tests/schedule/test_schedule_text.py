"""A schedule's text: read back it is the schedule, by hand or as printed, and a proof that fails points into it."""

from dataclasses import replace

import pytest
from hypothesis import given

from mobius_ds.inputs.profile import LayerProfile
from mobius_ds.schedule.mobius import forward_schedule, outputs_schedule
from mobius_ds.schedule.peers import (gpipe_schedule, looped_schedule, one_forward_one_backward_schedule,
                                      roundpipe_schedule, zero3_offload_schedule)
from mobius_ds.schedule.plan import Plan, make_plan
from mobius_ds.schedule.proof import InvalidSchedule, check_schedule
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Key, Kind, Stream, Task
from tests.schedule.test_schedule import UNTIMED, cases, equal_volumes, schedules

LAYERS = [LayerProfile("layer", 1.0, 2.0, 8, 8, 8, 8)] * 3


@UNTIMED
@given(cases())
def test_what_is_printed_reads_back(case):
    for schedule in (*schedules(case), outputs_schedule(case.plan, case.home, case.volumes)):
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("schedule", [
    gpipe_schedule(3, 4, [8, 8, 8]), looped_schedule(2, 6, 3, [8] * 6), one_forward_one_backward_schedule(3, 4),
    roundpipe_schedule(2, 3, 2, 2, 2), zero3_offload_schedule(LAYERS, 2)], ids=lambda schedule: schedule.name)
def test_peers_read_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule


def test_tasks_stand_to_the_right_of_what_they_wait_for():
    schedule = forward_schedule(make_plan(4, 2, stages=4), [0, 1], equal_volumes(4, 2))
    place = {cell.strip(): number for line in schedule.table() for number, cell in enumerate(line.split("|")) if cell.strip()}
    assert all(place[str(key)] < place[str(task.key)] for task in schedule.tasks for key in task.after)


def test_a_schedule_is_written_by_hand():
    schedule = Schedule.parse("""
mine on 1 GPUs
gpu 0 prefetch | 0W
gpu 0 compute | 0F0 | 0F1

0W 16B
0F0 after 0W
""")
    assert schedule.rows() == {
        (0, Stream.PREFETCH): (Task(Key(Kind.WEIGHTS, 0), 0, 16, ()),),
        (0, Stream.COMPUTE): (Task(Key(Kind.FORWARD, 0, 0), 0, 0, (Key(Kind.WEIGHTS, 0),)), Task(Key(Kind.FORWARD, 0, 1), 0, 0, ()))}


@pytest.mark.parametrize("damage, said", [
    (("forward on 2 GPUs", "forward"), "'forward' is not how a schedule begins, such as: forward on 2 GPUs"),
    (("gpu 0 compute", "gpu 0 dream"), "'dream' is not a valid Stream"),
    (("gpu 0 compute", "gpu x compute"), "is no row of a schedule"),
    (("| 0F0", "| 0Z0"), "'0Z0' is no task's name"),
    (("| 0F0", "| 0W"), "0W is no task of a compute stream"),
    (("P0 8B\n", "P0 8b\n"), "it should read like 0I0 4096B after P0"),
    (("P0 8B\n", "P9 8B\n"), "P9 stands in no row")])
def test_a_damaged_text_is_refused(damage, said):
    text = str(forward_schedule(make_plan(2, 2), [0, 1], equal_volumes(2, 2)))
    assert damage[0] in text
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        Schedule.parse(text.replace(*damage))


def broken(stages: int, microbatches: int, without: Key) -> str:
    """What the proof says of a forward whose first compute of the last stage waits for nothing."""
    plan = make_plan(stages, 2, stages=stages)
    schedule = forward_schedule(plan, [m % 2 for m in range(microbatches)], equal_volumes(stages, microbatches))
    schedule = replace(schedule, tasks=tuple(task._replace(after=()) if task.key == without else task for task in schedule.tasks))
    with pytest.raises(InvalidSchedule) as raised:
        check_schedule(schedule, plan)
    return str(raised.value)


def test_a_failed_proof_points_at_its_tasks():
    said, *table = broken(2, 2, Key(Kind.FORWARD, 1, 0)).split("\n")
    assert said == "forward schedule: 1F0 on GPU 1 may run before 1W on GPU 1 has ended: it computes with weights that have not arrived"
    at = next(number for number, line in enumerate(table) if line.startswith("gpu 1 compute"))
    assert table[at + 1].strip() == "^^^" and table[at][table[at + 1].index("^"):].startswith("1F0")
    at = next(number for number, line in enumerate(table) if line.startswith("gpu 1 prefetch"))
    assert table[at + 1].strip() == "^^" and table[at][table[at + 1].index("^"):].startswith("1W")


def test_of_a_large_schedule_only_what_is_around_is_shown():
    said = broken(24, 8, Key(Kind.FORWARD, 20, 3))
    assert max(map(len, said.split("\n")[1:])) < 160 and "20F3" in said and " 0F0 " not in said


def test_a_circle_is_shown_as_well():
    plan = Plan(1, (1,), (0,))
    first, second = Key(Kind.FORWARD, 0, 0), Key(Kind.WEIGHTS, 0)
    schedule = Schedule("forward", 1, (Task(first, 0, 0, (second,)), Task(second, 0, 8, (first,))))
    with pytest.raises(InvalidSchedule, match=r"in a circle: 0F0 waits for 0W waits for 0F0\n(.|\n)*\^\^\^"):
        check_schedule(schedule, plan)


def test_tasks_far_apart_are_both_pointed_at():
    plan = make_plan(32, 8, stages=32)
    schedule = forward_schedule(plan, list(range(8)), equal_volumes(32, 8))
    table = schedule.table([Key(Kind.FORWARD, 2, 0), Key(Kind.FORWARD, 30, 7)])
    pointed = [row[below.index("^"):below.rindex("^") + 1] for row, below in zip(table, table[1:]) if "^" in below]
    assert pointed == ["2F0", "30F7"] and " ... " in table[0] and max(map(len, table)) < 160
