"""Every stream is held up at random: the numbers must not change by a single bit, or a wait is missing."""

import random
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest
import torch
from torch import nn

import mobius_ds.runtime.sweeps.sweep_schedules as schedules_module
from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.dram.store import ParameterStore
from mobius_ds.runtime.sweeps.pipeline import Pipeline
from mobius_ds.schedule.tasks import Kind
from tests.features import survives
from tests.ranks import outcomes_of_ranks, run_ranks
from tests.runtime.jobs import config, endless, failure, initialize, language_model, mine, weights
from tests.test_toys import Scale, train_one_step

ACCUMULATION = 2
CLIPPING = (0.5, 0.0)
"""Without clipping the optimizer may run beside the backward sweep."""


@contextmanager
def delayed(delay: Callable[[], float]) -> Iterator[None]:
    """Sleeps ``delay()`` seconds before and after every task of this process, on whichever stream it runs."""
    do = Device.do

    def late(device: Device, work: Callable[[], Any], after: Any, event: Any) -> None:
        def slow() -> Any:
            time.sleep(delay())
            result = work()
            time.sleep(delay())
            return result

        do(device, slow, after, event)

    Device.do = late
    try:
        yield
    finally:
        Device.do = do


def at_random(seed: int, longest: float = 1.5e-3) -> Callable[[], float]:
    """Mostly not at all, now and then long enough for other streams to run far ahead."""
    chance = random.Random(seed)
    return lambda: chance.choice((0, 0, 0, 0, 0, 0.1, 0.3, 1)) * chance.random() * longest


def tied_model(blocks: int) -> nn.Module:
    """Tied weights on the first and the last stage, and dropout; ``blocks`` + 2 layers."""
    model = language_model(tied=True, blocks=blocks)
    for block in model.blocks:
        block.down = nn.Sequential(block.down, nn.Dropout(0.1))
    return model


def train(blocks: int = 4, clipping: float = 0.5) -> List[Any]:
    """Three steps, the last with ``train_batch``: this rank's losses, the gradient norm, and the final weights."""
    torch.manual_seed(0)
    model = tied_model(blocks)
    settings = config(accumulation=ACCUMULATION, gradient_clipping=clipping)
    settings["mobius"]["layers_per_stage"] = 1
    engine = initialize(model, settings)
    try:
        numbers = []
        for step in range(2):
            for micro in range(ACCUMULATION):
                loss = engine(*mine(step * ACCUMULATION + micro)).loss
                engine.backward(loss)
                engine.step()
                numbers.append(loss.item())
        numbers.append(engine.train_batch(endless(2 * ACCUMULATION)).item())
        return [*numbers, float(engine.get_global_grad_norm()), weights(model)]
    finally:
        engine.destroy()


def same_bits(one: List[Any], other: List[Any]) -> bool:
    return one[:-1] == other[:-1] and all(torch.equal(one[-1][name], weight) for name, weight in other[-1].items())


def train_under_delays(seeds: int) -> List[int]:
    """The seeds whose numbers differ from the undelayed run's."""
    import torch.distributed as dist
    undelayed = {clipping: train(clipping=clipping) for clipping in CLIPPING}
    assert all(len(set(numbers[:-1])) == len(numbers) - 1 for numbers in undelayed.values())  # it does learn
    different = []
    for seed in range(seeds):
        clipping = CLIPPING[seed % 2]
        with delayed(at_random(100 * seed + dist.get_rank())):
            if not same_bits(undelayed[clipping], train(clipping=clipping)):
                different.append(seed)
    return different


@survives("Schedules", "streams held up at random, on 2 and 4 ranks", "no bit of losses, norms and weights changes")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ranks", [2, 4])
def test_delays_change_no_bit(ranks, seeds):
    assert run_ranks(ranks, train_under_delays, seeds, timeout=120 + 10 * seeds) == [[]] * ranks


# A test that cannot fail shows nothing: each of these waits is taken out of the schedule in turn. Not among them:
# recompute's wait for its activations (its gradients come behind them on the same stream), and the waits that keep the
# activations of no more than two microbatches on a device (on CPU each upload is a tensor of its own: they cost memory).

Wait = Tuple[Kind, Kind]
"""(task, what it waits for)"""

NEEDED_ON_ONE_RANK: Dict[str, Wait] = {
    "a slot is overwritten while its stage runs forward": (Kind.WEIGHTS, Kind.FORWARD),
    "a slot is overwritten while its stage runs backward": (Kind.WEIGHTS, Kind.BACKWARD),
    "gradients are zeroed before they are out": (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS),
    "gradients go out before they are complete": (Kind.WEIGHT_GRADIENTS, Kind.BACKWARD),
    "parameters are updated before their gradients are out": (Kind.UPDATE, Kind.WEIGHT_GRADIENTS),
    "compute does not wait for its weights": (Kind.FORWARD, Kind.WEIGHTS),
    "backward does not wait for its weights": (Kind.BACKWARD, Kind.WEIGHTS),
    "compute does not wait for its activations": (Kind.FORWARD, Kind.ACTIVATIONS),
    "backward does not wait for its gradients": (Kind.BACKWARD, Kind.GRADIENTS),
    "activations go out before they are made": (Kind.GIVE_ACTIVATIONS, Kind.FORWARD),
    "activations come in before they are out": (Kind.ACTIVATIONS, Kind.GIVE_ACTIVATIONS),
}

@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """Takes one kind of wait out of every schedule. Whether anyone checks the schedule is the caller's business."""
    waiting, awaited = wait
    builders = {name: getattr(schedules_module, name) for name in ("forward_schedule", "backward_schedule")}

    def stripped(build: Callable) -> Callable:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            built = build(*args, **kwargs)
            tasks = tuple(task._replace(after=tuple(key for key in task.after if key.kind is not awaited))
                          if task.key.kind is waiting else task for task in built.tasks)
            return type(built)(built.name, built.gpus, tasks)
        return schedule

    for name, build in builders.items():
        setattr(schedules_module, name, stripped(build))
    try:
        yield
    finally:
        for name, build in builders.items():
            setattr(schedules_module, name, build)


@contextmanager
def unchecked() -> Iterator[None]:
    """Runs schedules that the checker would refuse."""
    check = schedules_module.check_schedule
    schedules_module.check_schedule = lambda *_: None
    try:
        yield
    finally:
        schedules_module.check_schedule = check


def seeds_until_noticed(waits: Dict[str, Wait]) -> Dict[str, Optional[int]]:
    """For each wait, the first seed whose delays show that it is missing."""
    undelayed = train(clipping=0.0)
    noticed: Dict[str, Optional[int]] = {}
    for what, wait in waits.items():
        noticed[what] = None
        for seed in range(20):
            with without(wait), unchecked(), delayed(at_random(seed, longest=0.01)):
                try:
                    wrong = not same_bits(undelayed, train(clipping=0.0))
                except Exception:  # whatever a task says whose data is not there yet
                    wrong = True
            if wrong:
                noticed[what] = seed
                break
    return noticed


def test_delays_notice_every_missing_wait_within_a_rank():
    [noticed] = run_ranks(1, seeds_until_noticed, NEEDED_ON_ONE_RANK)
    assert [what for what, seed in noticed.items() if seed is None] == []


SUM_IN_ORDER = (Kind.WEIGHT_GRADIENTS, Kind.WEIGHT_GRADIENTS)
"""A tied parameter's gradients are added up by one stage after the other."""


def said_of_wrong_schedules() -> Dict[str, str]:
    said = {}
    for what, wait in NEEDED_ON_ONE_RANK.items():
        with without(wait):
            said[what] = failure(lambda: train(clipping=0.0))
    with without(SUM_IN_ORDER):
        said["tied gradients are added at once"] = failure(lambda: train(blocks=2))
    return said


@survives("Schedules", "a schedule that lacks a wait",
          "proved wrong before it runs; the error names both tasks and what would be read or overwritten")
def test_a_schedule_with_a_missing_wait_is_never_run():
    for said in run_ranks(2, said_of_wrong_schedules):
        assert [what for what, error in said.items() if not error.startswith("InvalidSchedule")] == []


def tied_gradients_in_any_order() -> bool:
    """Whether a slow rank's share of a tied gradient gets lost when nobody waits for it."""
    import torch.distributed as dist

    def delay() -> float:
        return 0.05 if dist.get_rank() == 1 and threading.current_thread().name == "mobius-offload" else 0.0

    # Four stages: with more, a stage in between waits for the last one's gradient buffer, and so for the same task.
    undelayed = train(blocks=2)
    with delayed(delay):
        assert same_bits(undelayed, train(blocks=2))
        with without(SUM_IN_ORDER), unchecked():
            return not same_bits(undelayed, train(blocks=2))


def test_delays_notice_a_missing_wait_between_ranks():
    assert run_ranks(2, tied_gradients_in_any_order) == [True, True]


def a_layer_on_three_stages() -> List[float]:
    shared = Scale(2)
    return train_one_step(nn.Sequential(shared, Scale(3), shared, shared), (1, 2))["change"]


def test_each_of_several_tasks_that_wait_for_one_of_another_rank_hears_of_it():
    assert run_ranks(2, a_layer_on_three_stages, timeout=60) == [[54, 12]] * 2


# On CPU a device tensor and a DRAM tensor look alike: what would mix devices on a GPU must fail here as well.

@contextmanager
def sweeps_cannot_touch_the_modules_weights() -> Iterator[None]:
    """The module's parameters are unreadable during every forward and backward sweep."""
    methods = {name: getattr(Pipeline, name) for name in ("forward", "backward", "outputs")}

    def guarded(method: Callable) -> Callable:
        def run(pipeline: Pipeline, *args: Any) -> Any:
            with pipeline.store.unreadable_weights():
                return method(pipeline, *args)
        return run

    for name, method in methods.items():
        setattr(Pipeline, name, guarded(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Pipeline, name, method)


def train_with_unreadable_weights() -> bool:
    expected = train()
    with sweeps_cannot_touch_the_modules_weights():
        guarded = train()
    return same_bits(expected, guarded)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_computes_from_dram(ranks):
    assert run_ranks(ranks, train_with_unreadable_weights) == [True] * ranks


def touch(guard: bool) -> float:
    model = language_model()
    engine = initialize(model, config())
    store: ParameterStore = engine.pipeline.store
    if not guard:
        return model.head.weight.sum().item()
    with store.unreadable_weights():
        return model.head.weight.sum().item()


def test_a_touch_of_unreadable_weights_kills_the_process():
    [unguarded] = outcomes_of_ranks(1, touch, False)
    assert (unguarded.error, unguarded.exit_code) == (None, 0)
    [guarded] = outcomes_of_ranks(1, touch, True)
    assert guarded.result is None and guarded.exit_code < 0
