"""The recorder on an engine that counts its own bytes. What it sees of ZeRO-3 is in ``test_zero3_traffic``."""

import json

import pytest
import torch

from mobius_ds.observation.recorder import EngineRecorder
from mobius_ds.observation.records import rank_file, read_progress, read_records
from mobius_ds.runtime.device.ledger import Ledger


class Engine(torch.nn.Module):
    """What the recorder may use of an engine, with two microbatches a step and 10 bytes a forward."""

    global_rank, world_size = 0, 1

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.global_steps = self.microbatches = 0
        self.measured, self.predicted = Ledger(), Ledger()

    def forward(self, x):
        for ledger in (self.measured, self.predicted):
            ledger.add("activations_in", 10)
        return self.module(x).sum()

    def backward(self, loss, scale_wrt_gas=True):
        loss.backward()

    def step(self):
        self.microbatches += 1
        if self.microbatches % 2 == 0:
            self.global_steps += 1

    def train_batch(self, data):
        losses = []
        for x in data:
            losses.append(self(x))
            self.backward(losses[-1])
            self.step()
        return torch.stack(losses).mean()

    def destroy(self):
        self.measured = None  # nothing can be asked any more

    def gradient_accumulation_steps(self):
        return 2

    def get_data_types(self):
        return torch.float32, torch.float32

    def take_traffic(self):
        return self.measured.take()

    def take_predicted_traffic(self):
        return self.predicted.take()

    def peak_device_bytes(self):
        return 123

    def host_bytes_per_node(self):
        return 456

    def pinned_bytes(self):
        return 0

    def pageable_bytes(self):
        return 0


@pytest.fixture
def engine(tmp_path):
    engine = Engine()
    torch.nn.init.ones_(engine.module.weight)
    EngineRecorder(engine, tmp_path).attach()
    return engine


def microbatches(*values):
    return [torch.tensor([float(value)]) for value in values]


def recorded(engine, folder):
    engine.destroy()
    return json.loads(rank_file(folder, 0).read_text())


def test_a_step_is_its_microbatches_and_nothing_between(engine, tmp_path):
    with torch.no_grad():
        engine(torch.ones(1))  # before the first step
    for first, second in ((1, 3), (5, 7)):
        for x in microbatches(first, second):
            engine.backward(engine(x))
            engine.step()
        engine.module.eval()
        engine(torch.ones(1))  # evaluation
        engine.module.train()
    record = recorded(engine, tmp_path)
    assert record["losses"] == [2.0, 6.0]
    assert [traffic["activations_in"] for traffic in record["traffic"]] == [20, 20]
    assert record["traffic"] == record["predicted_traffic"]
    assert record["delivered_bytes"] == [20, 20]
    assert (record["parameters"], record["peak_device_bytes"], record["store_bytes"]) == (1, 123, 456)
    assert read_progress(tmp_path) == 2


def test_train_batch_is_one_step(engine, tmp_path):
    engine.train_batch(microbatches(1, 3))
    engine.train_batch(microbatches(5, 7))
    record = recorded(engine, tmp_path)
    assert record["losses"] == [2.0, 6.0]
    assert [traffic["activations_in"] for traffic in record["traffic"]] == [20, 20]


def test_a_forward_of_the_raw_module_is_counted(engine, tmp_path):
    for x in microbatches(1, 3):
        engine.measured.add("parameters_in", 5)  # what such a forward would move
        engine.backward(engine.module(x).sum())
        engine.step()
    assert recorded(engine, tmp_path)["traffic"][0]["parameters_in"] == 10


def test_a_loss_the_caller_has_divided_already_is_summed(engine, tmp_path):
    for x in microbatches(1, 3):
        engine.backward(engine(x) / 2, scale_wrt_gas=False)
        engine.step()
    assert recorded(engine, tmp_path)["losses"] == [2.0]


def test_a_loss_that_bypassed_the_engine_is_missing(engine, tmp_path):
    for x in microbatches(1, 3):
        engine(x).backward()
        engine.step()
    assert recorded(engine, tmp_path)["losses"] == [None]


def test_a_missing_rank_is_named(engine, tmp_path):
    engine.train_batch(microbatches(1, 3))
    engine.destroy()
    assert len(read_records(tmp_path, ranks=1)) == 1
    with pytest.raises(FileNotFoundError, match="no record of rank 1 of 2"):
        read_records(tmp_path, ranks=2)
