"""Training: `train(recipe, folder)` -> Run.

Order, crops and learning rates are functions of (seed, epoch, step), so that a run that was stopped and one that was
not go through the same numbers.
"""

import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from proxygml import backbones, datasets, evaluation, losses, pictures, sampling
from proxygml.datasets import ImageList
from proxygml.embeddings import Embeddings, embed, raw_pixels
from proxygml.images import Augmentation, Crops
from proxygml.recipes import Recipe
from proxygml.runs import Run

Progress = Callable[[str, int, int, str], None]  # what is going on, done, of how many, a note


def train(recipe: Recipe, folder: Path, *, progress: Progress | None = None) -> Run:
    """Train from the beginning in a new folder."""
    return _run(Run.create(Path(folder), recipe), progress or _nobody_watches)


def resume(folder: Path, *, progress: Progress | None = None) -> Run:
    """Go on after the last finished epoch, to the end that an undisturbed run would have reached."""
    return _run(Run.open(Path(folder)), progress or _nobody_watches)


def load_model(run: Run) -> nn.Module:
    """The trained network of a run, in evaluation mode."""
    model = build_model(run.recipe)
    model.load_state_dict(run.load_best()["model"])
    return model.eval()


def build_model(recipe: Recipe) -> nn.Module:
    """The network that a recipe asks for, with its initial weights."""
    return backbones.build(recipe.backbone, embedding_dim=recipe.embedding_dim, pooling=recipe.pooling)


def build_loss(recipe: Recipe, num_classes: int) -> nn.Module:
    """The loss that a recipe asks for."""
    if recipe.loss not in losses.LOSSES:
        raise ValueError(f"expected a loss among {', '.join(losses.LOSSES)}, got {recipe.loss!r}")
    return losses.LOSSES[recipe.loss](
        num_classes,
        recipe.embedding_dim,
        proxies_per_class=recipe.proxies_per_class,
        ratio=recipe.ratio,
        links=recipe.links,
        proxy_weight=recipe.proxy_weight,
        positive_mask=recipe.positive_mask,
        literal_mask=recipe.literal_mask,
        mask_softmax=recipe.mask_softmax,
    )


def load_images(recipe: Recipe) -> tuple[ImageList, ImageList]:
    """The training and the test images of a recipe."""
    return datasets.load(recipe.dataset, recipe.data, size=recipe.image_size, classes=recipe.classes)


def test_crops(recipe: Recipe, images: ImageList) -> Crops:
    """Images as a trained network sees them: centre crops."""
    return Crops(images.open, images.labels, size=recipe.image_size, test_crop=recipe.test_crop)


def hold_out(images: ImageList, share: float) -> tuple[ImageList, ImageList | None]:
    """The images of most classes, to train on, and those of a share of the classes, to choose the best epoch on."""
    classes = len(images.class_names)
    count = round(share * classes)
    if count < 2:
        return images, None
    order = np.random.default_rng(0).permutation(classes)  # the same classes for every seed, so that seeds compare
    return images.of_classes(np.sort(order[count:])), images.of_classes(np.sort(order[:count]))


def learning_rate_factor(recipe: Recipe, epoch: float) -> float:
    """What the learning rates are multiplied by at this (fractional) epoch."""
    if recipe.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / recipe.epochs))
    return 0.1 ** sum(epoch >= milestone for milestone in recipe.decay)


def _run(run: Run, progress: Progress) -> Run:
    recipe = run.recipe
    fabric = Fabric(accelerator=recipe.device, devices=1, precision=recipe.precision)
    fabric.launch()
    fabric.seed_everything(recipe.seed, verbose=False)
    progress("loading images", 0, 1, recipe.dataset)
    train_images, test_images = load_images(recipe)
    train_images, held_out_images = hold_out(train_images, recipe.held_out)

    model = build_model(recipe)
    loss = build_loss(recipe, len(train_images.class_names))
    trunk, head, proxies = list(model.trunk.parameters()), list(model.head.parameters()), list(loss.parameters())
    optimizer = torch.optim.Adam(
        [
            {"params": trunk + head, "lr": recipe.learning_rate, "name": "network"},
            {"params": proxies, "lr": recipe.proxy_learning_rate, "name": "proxies"},
        ],
        eps=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    base_rates = [group["lr"] for group in optimizer.param_groups]
    model, loss = fabric.setup_module(model), fabric.setup_module(loss)
    optimizer = fabric.setup_optimizers(optimizer)

    def score(images: ImageList, what: str, cluster: bool) -> tuple[evaluation.Scores, Embeddings]:
        """Scores of the network as it is now."""
        embeddings = embed(
            model,
            test_crops(recipe, images),
            images.paths,
            batch_size=max(128, recipe.batch_size),
            workers=recipe.workers,
            device=fabric.device,
            progress=lambda done, total: progress(what, done, total, ""),
        )
        scores = evaluation.evaluate(
            embeddings.vectors, embeddings.labels, recall_at=recipe.recall_at, cluster=cluster, seed=recipe.seed
        )
        return scores, embeddings

    checkpoint = run.load_last()
    if checkpoint is None:
        scores, entries, best = {}, [], None
        if recipe.baselines:
            progress("scoring raw pixels", 0, 1, "")
            pixels = raw_pixels(test_crops(recipe, test_images))
            scores["pixels"] = evaluation.evaluate(
                pixels, test_images.labels, recall_at=recipe.recall_at, seed=recipe.seed
            ).to_json()
            scores["untrained"] = score(test_images, "scoring the untrained network", cluster=True)[0].to_json()
    else:
        model.load_state_dict(checkpoint["model"])
        loss.load_state_dict(checkpoint["loss"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["random_state"])
        scores, best = checkpoint["scores"], checkpoint["best"]
        entries = run.log[: checkpoint["epochs_done"]]
    run.write_log(entries)

    steps_per_epoch = len(sampling.shuffled(len(train_images), recipe.batch_size, seed=0, epoch=0))
    for epoch in range(0 if checkpoint is None else checkpoint["epochs_done"], recipe.epochs):
        started = time.perf_counter()
        model.train()
        if recipe.freeze_batch_norm:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        for parameter in trunk:
            parameter.requires_grad_(epoch not in recipe.warmup)

        sums: dict[str, float] = {}
        for step, (images, labels) in enumerate(_batches(recipe, train_images, epoch)):
            factor = learning_rate_factor(recipe, epoch + step / steps_per_epoch)
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * factor
            value = loss(model(images.to(fabric.device)), labels.to(fabric.device))
            if not math.isfinite(value.item()):
                raise ValueError(f"the loss became {value.item()} in epoch {epoch + 1}: lower learning_rate")
            optimizer.zero_grad()
            fabric.backward(value)
            optimizer.step()
            for name, term in _terms(loss, value):
                sums[name] = sums.get(name, 0.0) + term * len(labels)
            progress(
                "training",
                epoch * steps_per_epoch + step + 1,
                recipe.epochs * steps_per_epoch,
                f"epoch {epoch + 1}/{recipe.epochs}  loss {value.item():.3f}" + _held_out_note(entries),
            )
        train_seconds = time.perf_counter() - started

        entry = {"epoch": epoch + 1}
        entry |= {name: total / len(train_images) for name, total in sums.items()}
        entry |= {f"learning_rate_{group['name']}": group["lr"] for group in optimizer.param_groups}
        judge = None
        if held_out_images is not None:
            judge, _ = score(held_out_images, "scoring held-out classes", cluster=False)
            entry["held_out"] = judge.to_json()
        if recipe.test_every_epoch:
            test_scores, _ = score(test_images, "scoring test classes", cluster=True)
            entry["test"] = test_scores.to_json()
            judge = judge or test_scores
        entry |= {
            "images_per_second": len(train_images) / train_seconds,
            "seconds": time.perf_counter() - started,
            "peak_memory_mb": _peak_memory_mb(fabric.device),
        }
        # Without a judge every epoch is better than the one before it: the last stays.
        if judge is None or best is None or judge.map_at_r > best["map_at_r"]:
            best = {"epoch": epoch + 1, "map_at_r": None if judge is None else judge.map_at_r}
            run.save_best({"model": model.state_dict(), "loss": loss.state_dict(), "epoch": epoch + 1})
        entries.append(entry)
        run.write_log(entries)
        run.save_last(
            {
                "epochs_done": epoch + 1,
                "model": model.state_dict(),
                "loss": loss.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random_state": torch.get_rng_state(),
                "best": best,
                "scores": scores,
            }
        )

    model.load_state_dict(run.load_best()["model"])
    trained, embeddings = score(test_images, "scoring test classes", cluster=True)
    scores = {
        "trained": trained.to_json(),
        **scores,
        "best_epoch": best["epoch"],
        "seconds": sum(e["seconds"] for e in entries),
    }
    progress("drawing pictures", 0, 1, "")
    pictures.draw_curves(entries, run.folder / "curves.png")
    pictures.draw_retrieval(test_images.open, embeddings.vectors, embeddings.labels, run.folder / "retrieval.png")
    pictures.draw_map(embeddings.vectors, embeddings.labels, test_images.class_names, run.folder / "map.png")
    run.write_scores(scores)
    return run


def _batches(recipe: Recipe, images: ImageList, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch: images (B, 3, H, W), labels (B,)."""
    crops = Crops(
        images.open,
        images.labels,
        size=recipe.image_size,
        augmentation=Augmentation(recipe.crop_scale, recipe.crop_ratio, recipe.flip),
        seed=recipe.seed,
        epoch=epoch,
    )
    batches = sampling.shuffled(len(images), recipe.batch_size, seed=recipe.seed, epoch=epoch)
    return iter(DataLoader(crops, batch_sampler=batches, num_workers=recipe.workers))


def _terms(loss: nn.Module, value: Tensor) -> Iterator[tuple[str, float]]:
    """The loss and, where it tells them, its parts, for the log."""
    yield "loss", value.item()
    terms = getattr(loss, "last_terms", None)
    for name, term in terms._asdict().items() if terms is not None else ():
        if term is not None:
            yield name, term.item()


def _held_out_note(entries: list[dict]) -> str:
    if not entries or "held_out" not in entries[-1]:
        return ""
    return f"  held-out R@1 {100 * entries[-1]['held_out']['recall@1']:.1f} %"


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _nobody_watches(what: str, done: int, total: int, note: str) -> None:
    pass
