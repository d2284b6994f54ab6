"""DeepSpeed's pipeline scripts: a ``PipelineModule`` that the script cuts into stages keeps its batch arithmetic."""

from typing import Any, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.features import refused, works
from tests.ranks import run_ranks
from tests.runtime.jobs import SEQUENCE, VOCABULARY, WIDTH, config, failure, initialize, rank_and_size, tokens, weights

MICROBATCHES = 4
STEPS = 3


class Dropping(nn.Module):
    """A block with dropout, whose weights depend on torch's generator."""

    def __init__(self, drop: float):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Classified(nn.Module):
    """The last layer: a linear one and a buffer that counts nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.linear(x) * self.scale


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def project_with(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


def pipeline_module(stages: int, tied: bool = False, drop: float = 0.0, **options: Any):
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    torch.manual_seed(3)
    first, last = LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Classified)
    if tied:
        first = TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH)
        last = TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=project_with)
    return PipelineModule([first, *[LayerSpec(Dropping, drop) for _ in range(4)], torch.tanh, last], num_stages=stages,
                          loss_fn=token_loss, **options)


def data(stages: int):
    """What the iterators of a replica's ranks yield: every replica has its own microbatches, all together the same."""
    rank, size = rank_and_size()
    replicas = size // stages
    number = rank % replicas  # DeepSpeed's order: the ranks of one stage are neighbours
    while True:
        yield tokens(number)
        number += replicas


def train(stages: int, settings: Dict[str, Any], prepare: Any = None, **options: Any) -> Dict[str, Any]:
    """A pipeline script of so many stages."""
    _, size = rank_and_size()
    module = pipeline_module(stages, **options)
    before = sum(1 for _ in module.parameters())
    if prepare is not None:
        prepare(module)
    accumulation = MICROBATCHES // (size // stages)
    engine = initialize(module, config(accumulation=accumulation, train_batch_size=2 * MICROBATCHES, **settings),
                        model_parameters=[p for p in module.parameters() if p.requires_grad])
    iterator = data(stages)
    losses = [engine.train_batch(data_iter=iterator).item() for _ in range(STEPS)]
    evaluated = engine.eval_batch(iterator).item()
    result = {"losses": losses, "evaluated": evaluated, "weights": weights(engine.module), "held before": before,
              "arithmetic": (engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.micro_batches),
              "stage": (engine.is_first_stage(), engine.is_last_stage()), "next": next(iterator)[0],
              "traffic": engine.take_traffic() == engine.take_predicted_traffic(), "samples": engine.global_samples,
              "is the script's": engine.module is module}
    engine.destroy()
    return result


def by_stages(stages: List[int], variants: List[Dict[str, Any]]) -> List[List[Dict[str, Any]]]:
    return [[train(count, {"gradient_clipping": 0.5}, **variant) for count in stages] for variant in variants]


VARIANTS = [{}, {"tied": True}, {"drop": 0.3}, {"seed_layers": True, "partition_method": "uniform"}]


@works("PipelineModule", "num_stages, LayerSpec and TiedLayerSpec with train_batch and eval_batch: losses of one stage")
@pytest.mark.parametrize("ranks, stages", [(2, [1, 2]), (4, [1, 2, 4])])
def test_losses_do_not_depend_on_num_stages(ranks, stages):
    alone = run_ranks(1, by_stages, [1], VARIANTS)[0]
    results = run_ranks(ranks, by_stages, stages, VARIANTS)
    for rank, result in enumerate(results):
        for variant, [expected], runs in zip(VARIANTS, alone, result):
            for count, run in zip(stages, runs):
                what = f"{count} stages on rank {rank} of {ranks}, {variant}"
                assert run["losses"] == pytest.approx(expected["losses"], abs=2e-6), what
                assert run["evaluated"] == pytest.approx(expected["evaluated"], abs=2e-6), what
                for name, tensor in run["weights"].items():
                    torch.testing.assert_close(tensor, expected["weights"][name], atol=5e-5, rtol=0)
                assert run["weights"].keys() == expected["weights"].keys()
                assert run["traffic"] and run["is the script's"]
                assert run["samples"] == STEPS * 2 * MICROBATCHES


@works("PipelineModule", "batch arithmetic: data-parallel degree from the topology, ranks of a replica read the same data")
def test_the_batch_arithmetic_is_deepspeeds():
    results = run_ranks(2, by_stages, [2], [{}])
    for rank, [[run]] in enumerate(results):
        # One replica: a batch is train_batch_size / micro microbatches, whatever the number of ranks.
        assert run["arithmetic"] == (2 * MICROBATCHES, MICROBATCHES, MICROBATCHES)
        assert run["stage"] == (rank == 0, rank == 1)
        assert run["held before"] < len(run["weights"])
        # Every rank has read the same data: those of three batches and an evaluation.
        assert torch.equal(run["next"], tokens((STEPS + 1) * MICROBATCHES)[0])


def written_by_the_script(module: nn.Module) -> None:
    """What a script does to the layers that its rank holds."""
    for name, parameter in module.named_parameters():
        if name == "6.linear.bias":
            parameter.data.fill_(0.25)  # unseen by version counters
        if name == "2.norm.weight":
            parameter.requires_grad_(False)
    for name, buffer in module.named_buffers():
        buffer.fill_(0.5)


def with_groups(stages: int) -> Dict[str, Any]:
    _, size = rank_and_size()
    module = pipeline_module(stages)
    written_by_the_script(module)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [p for _, p in trained if p.dim() > 1], "weight_decay": 0.5},
                                   {"params": [p for _, p in trained if p.dim() <= 1], "weight_decay": 0.0}], lr=1e-2)
    settings = config(accumulation=MICROBATCHES // (size // stages))
    del settings["optimizer"]
    engine = initialize(module, settings, optimizer=optimizer)
    iterator = data(stages)
    losses = [engine.train_batch(data_iter=iterator).item() for _ in range(STEPS)]
    result = {"losses": losses, "weights": weights(engine.module), "sizes": [len(g["params"]) for g in engine.optimizer.param_groups]}
    engine.destroy()
    return result


@works("PipelineModule", "weights that the script loads into its rank's layers, frozen layers, a client optimizer's groups")
def test_what_the_script_wrote_into_its_layers_reaches_all_ranks():
    [expected] = run_ranks(1, with_groups, 1)
    for run in run_ranks(2, with_groups, 2):
        assert run["losses"] == pytest.approx(expected["losses"], abs=2e-6)
        assert run["sizes"] == expected["sizes"]
        assert torch.equal(run["weights"]["2.norm.weight"], torch.ones(WIDTH))  # frozen
        for name, tensor in run["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], atol=5e-5, rtol=0)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6 * MICROBATCHES

    def __getitem__(self, index):
        ids, labels = tokens(index, batch=1)
        return ids[0], labels[0]


def swapped(batch: Any) -> Any:
    labels, ids = batch
    return ids, labels


def with_own_loader(stages: int) -> List[float]:
    _, size = rank_and_size()
    accumulation = MICROBATCHES // (size // stages)
    engine = initialize(pipeline_module(stages), config(accumulation=accumulation), training_data=Numbers())
    losses = [engine.train_batch().item() for _ in range(5)]  # longer than the data: it starts over
    backwards = ((labels, ids) for ids, labels in data(stages))
    engine.set_batch_fn(swapped)
    engine.set_dataiterator(backwards)
    losses += [engine.train_batch().item() for _ in range(2)]
    engine.destroy()
    return losses


@works("PipelineModule", "training_data, set_dataloader, set_dataiterator, set_batch_fn")
def test_data_comes_as_a_pipeline_engine_reads_it():
    [expected] = run_ranks(1, with_own_loader, 1)
    for stages in (1, 2):
        for losses in run_ranks(2, with_own_loader, stages):
            assert losses == pytest.approx(expected, abs=2e-6)


def misuse() -> Dict[str, str]:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    tensor_parallel = PipelineModule([nn.Linear(WIDTH, WIDTH) for _ in range(4)],
                                     topology=PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))
    said = {"tensor parallel": failure(lambda: initialize(tensor_parallel, config()))}
    engine = initialize(pipeline_module(2), config(accumulation=2))
    said["forward"] = failure(lambda: engine(tokens(0)[0]))
    with torch.no_grad():
        said["evaluation"] = str(tuple(engine(tokens(0)[0]).shape))
    said["data runs out"] = failure(lambda: engine.train_batch(iter([tokens(0)])))
    engine.destroy()
    return said


@refused("PipelineModule", "forward, backward and step with num_stages above 1, as under DeepSpeed",
         "Only train_batch() is accessible in pipeline mode")
def test_misuse_is_one_clear_error():
    for said in run_ranks(2, misuse):
        assert "tensor parallelism" in said["tensor parallel"]
        assert "Only train_batch() is accessible in pipeline mode" in said["forward"]
        assert said["evaluation"] == str((2, SEQUENCE, VOCABULARY))
        assert said["data runs out"].startswith("StopIteration")
