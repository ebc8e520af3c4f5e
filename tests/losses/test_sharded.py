"""The loss with classes spread over processes equals the loss of one; real processes that talk by gloo."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from proxygml import ProxyGMLLoss
from proxygml.distributed.collectives import gather_rows
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.sharded import ShardedProxyGMLLoss, distributed_topk, initial_proxies

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*every link of a sample")]
SIZES = (1, 2, 4)
CLASSES, PER_CLASS, DIMENSION = 11, 3, 6  # 11 classes: no number of processes above 1 divides them
TABLE_1 = [
    {"positive_mask": positive, "mask_softmax": mask, "proxy_weight": weight}
    for positive, mask, weight in itertools.product([False, True], [False, True], [0.0, 0.3])
]
OPTIONS = [
    *({"links": links, **row} for links, row in itertools.product([2, 8, 33], TABLE_1)),
    {"links": 8, "scale": 5.0, "literal_mask": True},
    {"links": 8, "proxy_weight": 0.0, "sparse_gradient": True},
    {"links": 8, "proxy_rows": 10_000},
]
CASES = [(case, torch.float64) for case in range(len(OPTIONS))]
CASES += [(case, torch.float32) for case in range(0, len(OPTIONS), 4)]  # rounding is all that differs


def batch_of(size: int, rank: int, case: int) -> tuple[Tensor, Tensor]:
    """Embeddings and labels of a process; their number differs between processes, and some have none."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    count = 5 if size == 1 else (rank + case) % 4
    return (
        torch.randn(count, DIMENSION, generator=generator, dtype=torch.float64),
        torch.randint(CLASSES, (count,), generator=generator),
    )


def proxies_of(case: int) -> Tensor:
    generator = torch.Generator().manual_seed(case)
    return torch.randn(CLASSES, PER_CLASS, DIMENSION, generator=generator, dtype=torch.float64)


def sharded(case: int, precision: torch.dtype, group: dist.ProcessGroup | None) -> ShardedProxyGMLLoss:
    settings = ProxyGMLSettings(proxies_per_class=PER_CLASS, **OPTIONS[case])
    loss = ShardedProxyGMLLoss(CLASSES, DIMENSION, settings, group=group).to(precision)
    with torch.no_grad():
        loss.proxies.copy_(proxies_of(case)[loss.first_class :][: len(loss.proxies)])
    return loss


def work(rank: int, folder: str) -> None:
    """What every process does, in groups of each size; what it finds is left in files for the tests."""
    torch.set_num_threads(1)
    most = max(SIZES)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=most)
    for size in SIZES:
        group = dist.new_group(range(size)) if size < most else None  # None: all processes
        if rank < size:
            torch.save(work_in_group(rank, size, group), f"{folder}/{size}-{rank}.pt")
    dist.destroy_process_group()


def work_in_group(rank: int, size: int, group: dist.ProcessGroup | None) -> dict:
    found = {"losses": {}, "network": [], "chosen": []}
    for case, precision in CASES:
        loss = sharded(case, precision, group)
        embeddings, labels = batch_of(size, rank, case)
        embeddings = embeddings.to(precision).requires_grad_()
        value = loss(embeddings, labels)
        value.backward()
        gradient = loss.proxies.grad
        found["losses"][case, precision] = {
            "value": value.detach(),
            "embeddings": embeddings.grad,
            "proxies": gradient.to_dense() if gradient.is_sparse else gradient,
            "rows": len(gradient.coalesce().values()) if gradient.is_sparse else None,
            "terms": loss.last_terms,
        }
    torch.manual_seed(0)
    network = nn.parallel.DistributedDataParallel(nn.Linear(DIMENSION, DIMENSION).double(), process_group=group)
    loss = sharded(len(OPTIONS) - 1, torch.float64, group)
    optimizer = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=0.01)
    for case in range(8):
        features, labels = batch_of(size, rank, case)
        optimizer.zero_grad()
        loss(network(features), labels).backward()
        optimizer.step()
    found["network"] = [parameter.detach() for parameter in network.parameters()]
    found["trained"] = loss.proxies.detach()
    for case in range(12):
        ranks = whole_ranks(case).tensor_split(size, dim=1)[rank]
        found["chosen"].append(distributed_topk(ranks, 1 + case % 12, group))
    rows = torch.arange(2 * rank, dtype=torch.float64)[:, None].requires_grad_()  # none of rank 0
    gathered = gather_rows(rows, group, shared=True)
    (gathered * (rank + 1)).sum().backward()
    found["gathered"], found["of rows"] = gathered.detach(), rows.grad
    started = ShardedProxyGMLLoss(3000, 2, ProxyGMLSettings(proxies_per_class=2, links=50), seed=7, group=group)
    found["started"] = started.proxies.detach()
    found["refused"] = refusal(lambda: ShardedProxyGMLLoss(CLASSES + (rank == size - 1), DIMENSION, group=group))
    loss, last = ShardedProxyGMLLoss(CLASSES, DIMENSION, group=group), rank == size - 1
    embeddings, labels = torch.ones(2, DIMENSION), torch.tensor([0, 1])
    found["no class"] = refusal(lambda: loss(embeddings, labels + CLASSES * last))
    found["no number"] = refusal(lambda: loss(embeddings * (math.nan if last else 1), labels))
    found["no batch"] = refusal(lambda: loss(embeddings[:0], labels[:0]))
    return found


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except ValueError as error:
        return str(error)


def whole_ranks(case: int) -> Tensor:
    """Ranks (4, 12) with many that are equal, negative ones and zeros of both signs."""
    generator = torch.Generator().manual_seed(case)
    ranks = torch.randint(-3, 4, (4, 12), generator=generator) / 2
    ranks = ranks.to(torch.float32 if case % 2 else torch.float64)
    return torch.where(torch.rand(4, 12, generator=generator) < 0.3, -ranks, ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where as many processes as the largest group has have left what they found."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=max(SIZES))
    return folder


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size} processes")
def found(request: pytest.FixtureRequest, folder: Path) -> list[dict]:
    """What each process of a group has found, by rank."""
    size = request.param
    return [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]


def whole(case: int) -> ProxyGMLLoss:
    loss = ProxyGMLLoss(CLASSES, DIMENSION, proxies_per_class=PER_CLASS, **OPTIONS[case]).double()
    with torch.no_grad():
        loss.proxies.copy_(proxies_of(case))
    return loss


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_equals_one_process(found: list[dict], precision: torch.dtype) -> None:
    size = len(found)
    within = {"atol": 1e-6, "rtol": 1e-5} if precision == torch.float32 else {"atol": 1e-12, "rtol": 1e-10}
    for case in [case for case, of in CASES if of == precision]:
        loss = whole(case)
        batches = [batch_of(size, rank, case) for rank in range(size)]
        embeddings = torch.cat([batch[0] for batch in batches]).requires_grad_()
        value = loss(embeddings, torch.cat([batch[1] for batch in batches]))
        value.backward()
        gradient = loss.proxies.grad
        here = [process["losses"][case, precision] for process in found]
        for process in here:
            torch.testing.assert_close(process["value"].double(), value.detach(), **within)
            for ours, theirs in zip(process["terms"], loss.last_terms, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours.double(), theirs, **within)
        of_embeddings = torch.cat([process["embeddings"] for process in here]).double() / size  # DDP takes the mean
        torch.testing.assert_close(of_embeddings, embeddings.grad, **within)
        of_proxies = torch.cat([process["proxies"] for process in here]).double()
        torch.testing.assert_close(of_proxies, gradient.to_dense() if gradient.is_sparse else gradient, **within)
        if gradient.is_sparse:
            assert sum(process["rows"] for process in here) == len(gradient.coalesce().values())


def test_data_parallel_equals_one_process(found: list[dict]) -> None:
    torch.manual_seed(0)
    network, loss = nn.Linear(DIMENSION, DIMENSION).double(), whole(len(OPTIONS) - 1)
    optimizer = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=0.01)
    for case in range(8):
        batches = [batch_of(len(found), rank, case) for rank in range(len(found))]
        features, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss(network(features), labels).backward()
        optimizer.step()
    for process in found:
        for ours, theirs in zip(process["network"], network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), atol=1e-9, rtol=0)
    torch.testing.assert_close(torch.cat([process["trained"] for process in found]), loss.proxies.detach())


def test_distributed_topk(found: list[dict]) -> None:
    for case in range(12):
        ranks, count = whole_ranks(case), 1 + case % 12
        order = (-ranks).sort(dim=1, stable=True).indices[:, :count]
        expected = torch.zeros_like(ranks, dtype=torch.bool).scatter(1, order, True)
        assert torch.equal(torch.cat([process["chosen"][case] for process in found], dim=1), expected)


def test_gathered_rows_and_gradients(found: list[dict]) -> None:
    size = len(found)
    everyone = torch.cat([torch.arange(2 * rank, dtype=torch.float64)[:, None] for rank in range(size)])
    for rank, process in enumerate(found):
        assert torch.equal(process["gathered"], everyone)
        said = size * size * (size + 1) / 2  # by each process its rank + 1; and the mean that is still to come
        assert torch.equal(process["of rows"], torch.full((2 * rank, 1), said, dtype=torch.float64))


def test_start_does_not_depend_on_processes(found: list[dict]) -> None:
    started = torch.cat([process["started"] for process in found])
    assert torch.equal(started, initial_proxies(torch.Size((3000, 2, 2)), 0, 3000, seed=7))
    assert len(started.flatten().unique()) > 11_000  # blocks of classes do not repeat each other
    assert started.abs().max() <= 1 / math.sqrt(6000)


def test_processes_with_different_settings_all_refuse(found: list[dict]) -> None:
    for process in found:
        if len(found) == 1:
            assert process["refused"] is None
        else:
            assert process["refused"].startswith("expected the same settings on all processes, got on ranks 0 and")
            assert "num_classes 11 and 12" in process["refused"]


def test_all_processes_refuse_together(found: list[dict]) -> None:
    rows, lowest = 2 * len(found), CLASSES if len(found) == 1 else 0
    for process in found:
        assert process["no class"] == f"expected labels in 0..10, got {lowest}..12: number the classes from 0"
        assert process["no number"] == f"expected finite embeddings, got NaN or infinity in 2 of {rows} rows"
        assert process["no batch"] == "expected at least one embedding, got an empty batch"


def test_one_process_without_a_group() -> None:
    with pytest.raises(ValueError, match="use ProxyGMLLoss in one"):
        ShardedProxyGMLLoss(3, 2)
