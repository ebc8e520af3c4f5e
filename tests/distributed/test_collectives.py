"""Batches that real processes share: a network learns in them what it learns in one process from the whole batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from proxygml import backbones, evaluation, losses
from proxygml.distributed.batch_norm import JointBatchNorm, join_batch_norms
from proxygml.distributed.collectives import gather_rows

STEPS, BATCH, CLASSES = 20, 7, 4
WAYS = ("counted", "in a gallery", "searched")
METHODS = ("proxygml", "ms", "semihard", "softtriple", "contrastive")


def made(method: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = backbones.build("convnet", embedding_dim=8).double()
    settings = {"ratio": 0.5} if method == "proxygml" else {}
    loss = losses.make(method, CLASSES, 8, settings).double()
    return network, loss, torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=1e-3, eps=1e-2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH if step % 5 else 1,), generator=generator)  # one image: others have none
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
        join_batch_norms(network)
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
    network = backbones.build("convnet", embedding_dim=8).eval()
    images = torch.rand(2, 3, 16, 16)
    before = network(images)
    join_batch_norms(network)
    assert any(isinstance(module, JointBatchNorm) for module in network.modules())
    torch.testing.assert_close(network(images), before)


@pytest.mark.parametrize("way", WAYS)
def test_shared_evaluation(found: list[dict], way: str) -> None:
    expected = scores(way).to_json()
    assert 0 < expected["map_at_r"] < 1
    for process in found:
        assert process["scores"][way] == expected
