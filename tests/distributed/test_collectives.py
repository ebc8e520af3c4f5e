"""Batches that real processes share: a network learns in them what it learns in one process from the whole batch."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from proxygml import backbones, evaluation, losses
from proxygml.distributed.batch_norm import JointBatchNorm, join_batch_norms
from proxygml.distributed.collectives import average_gradients, gather_rows

STEPS, BATCH, CLASSES = 7, 7, 4
CPU = torch.device("cpu")
WAYS = ("counted", "in a gallery", "searched")
METHODS = ("proxygml", "ms", "semihard", "softtriple", "contrastive")


def made(method: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = backbones.Embedder(backbones.build_trunk("convnet"), 8).double()
    settings = {"ratio": 0.5} if method == "proxygml" else {}
    loss = losses.make(method, CLASSES, 8, settings).double()
    return network, loss, torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=1e-3, eps=1e-2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH if step % 3 else 1,), generator=generator)  # one image: others have none
    return torch.rand(len(labels), 3, 16, 16, generator=generator, dtype=torch.float64), labels


def state(network: nn.Module, loss: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for module in (network, loss) for name, value in module.state_dict().items()}


def scores(way: str, process: tuple[int, int] = (0, 1)) -> evaluation.Scores:
    """The scores of random vectors, some of them equal, in blocks of 16."""
    generator = torch.Generator().manual_seed(0)
    classes, width = (2, 512) if way == "searched" else (40, 8)  # many positives in wide vectors are not counted
    labels = torch.randint(classes, (280,), generator=generator)
    vectors = torch.randn(classes, width, generator=generator)[labels]
    vectors += torch.randn(vectors.shape, generator=generator)
    vectors[30:40] = vectors[50:60]
    sides = {"gallery": vectors[100:], "gallery_labels": labels[100:]} if way == "in a gallery" else {}
    asking = slice(0, 100 if sides else None)
    return evaluation.evaluate(vectors[asking], labels[asking], **sides, cluster=False, block=16, process=process)


def work(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    found = {}
    for method in METHODS:
        network, loss, optimizer = made(method)
        join_batch_norms(network, CPU)
        parallel = nn.parallel.DistributedDataParallel(network, broadcast_buffers=False)
        values = []
        for step in range(STEPS):
            mine = np.array_split(np.arange(len(batch(step)[1])), size)[rank]
            images, labels = (part[mine] for part in batch(step))
            value = loss(*(gather_rows(rows, shared=False) for rows in (parallel(images), labels)))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.item())
        found[method] = {"values": values, "state": state(network, loss)}
    dense, sparse = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
    dense.grad = torch.full((2, 4), float(rank)).T  # not contiguous
    sparse.grad = torch.sparse_coo_tensor([[rank, 3]], [[3.0, 3.0], [rank, 0.0]], (4, 2), check_invariants=True)
    average_gradients([dense, sparse, nn.Parameter(torch.zeros(1))])
    found["averages"] = dense.grad, sparse.grad
    found["scores"] = {way: scores(way, (rank, size)).to_json() for way in WAYS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of three processes has found, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (3, str(folder)), nprocs=3)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(3)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_shared_batches_equal_one_process(found: list[dict], method: str) -> None:
    network, loss, optimizer = made(method)
    for step in range(STEPS):
        images, labels = batch(step)
        value = loss(network(images), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        for process in found:
            assert process[method]["values"][step] == pytest.approx(value.item(), abs=1e-8)
    for process in found:
        for name, expected in state(network, loss).items():
            torch.testing.assert_close(process[method]["state"][name], expected, atol=1e-8, rtol=0, msg=name)


def test_batch_norm_keeps_its_state() -> None:
    network = backbones.Embedder(backbones.build_trunk("convnet"), 8).eval()
    images = torch.rand(2, 3, 16, 16)
    before = network(images)
    join_batch_norms(network, CPU)
    assert any(isinstance(module, JointBatchNorm) for module in network.modules())
    torch.testing.assert_close(network(images), before)


def test_gradients_are_averaged(found: list[dict]) -> None:
    for process in found:
        dense, sparse = process["averages"]
        assert torch.equal(dense, torch.ones(4, 2))
        assert sparse.is_sparse
        assert torch.equal(sparse.to_dense(), torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 0.0]]))


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("precision", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 0.01)]
)
def test_batch_norm_in_any_precision(
    group: None, precision: torch.dtype, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics are float32: the count of 2**17 values is infinite in float16, and their mean is far from 0."""
    reduced: list[torch.dtype] = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda values: (reduced.append(values.dtype), all_reduce(values)))
    torch.manual_seed(0)
    images = (torch.randn(2, 1, 256, 256) + 50).to(precision)
    found = []
    for given in (images.double(), images):
        layer = nn.BatchNorm2d(1)
        if found:
            join_batch_norms(layer, CPU)
        else:
            layer.double()
        output = layer(given.requires_grad_())
        (output * torch.linspace(0, 1, 256)).sum().backward()
        found.append([output, given.grad, layer.running_mean, layer.running_var, layer.weight.grad])
    assert found[1][0].dtype == precision
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=within * expected.abs().max().item(), rtol=0)
    assert len(reduced) == 2  # one forward, one backward


def test_gpus_use_sync_batch_norm() -> None:
    from proxygml.training.loop import freeze_statistics  # slow to import in every process

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm1d(4))
    weight = network[1].weight
    join_batch_norms(network, torch.device("cuda"))
    assert [type(layer) for layer in network[1:]] == [nn.SyncBatchNorm] * 2
    assert network[1].weight is weight
    freeze_statistics(network)
    assert not network[1].training
    for images, precision in ((1, torch.bfloat16), (0, torch.float32)):  # or statistics would differ in size
        assert network[1](torch.ones(images, 4, 2, 2, dtype=torch.bfloat16)).dtype == precision


@pytest.mark.parametrize("way", WAYS)
def test_shared_evaluation(found: list[dict], way: str) -> None:
    expected = scores(way).to_json()
    assert 0 < expected["map_at_r"] < 1
    for process in found:
        assert process["scores"][way] == expected
