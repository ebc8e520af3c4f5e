"""What the page is told: plain values, ready to be sent."""

from collections.abc import Callable
from functools import partial

import numpy as np
from PIL import Image

from proxygml.server.failures import Failures, find_failures, mistaken
from proxygml.server.jobs import Job
from proxygml.server.map import draw, layouts
from proxygml.server.space import Space, Subgraph

FEW = 20_000  # images up to which failures are looked for without being asked: it takes seconds
MOST_CLASSES_TOLD = 20  # of those that a subgraph reaches


class Answers:
    """Answers about one space; what takes long goes on in `jobs`."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.failures = Job(partial(find_failures, space))
        self.jobs = {"failures": self.failures} | {name: Job(partial(self._draw, name)) for name in layouts()}

    def begin(self) -> None:
        """Begin what the page needs at once."""
        self.jobs["pca"].start()
        if len(self.space) <= FEW:
            self.failures.start()

    def end(self) -> None:
        """End all work, or leave it behind where it does not end at once."""
        for job in self.jobs.values():
            job.cancel()
        for job in self.jobs.values():
            job.wait(0.5)

    def why_not(self, name: str) -> str:
        """Why a job cannot be done here, or an empty text."""
        missing = layouts().get(name, "")
        return f"{name} is not installed here: {missing}" if missing else ""

    def progress(self) -> dict[str, dict]:
        """How far every job is; once failures are known, how often the nearest is right."""
        told = {name: job.told() for name, job in self.jobs.items()}
        if self.failures.state == "done":
            told["failures"]["recall_at_1"] = self.failures.result.recall_at_1
        return told

    def about(self) -> dict:
        """The space as a whole."""
        space, proxies = self.space, self.space.proxies
        return {
            "name": space.name,
            "images": len(space),
            "dimensions": space.vectors.shape[1],
            "classes": space.class_names,
            "sizes": space.class_sizes.tolist(),
            "examples": np.unique(space.classes, return_index=True)[1].tolist(),  # an image of each class
            "pictures": space.open_image is not None,
            "unit": space.unit,
            "upload": space.embed_image is not None,
            "no_upload": space.no_upload,
            "layouts": layouts(),
            "proxies": None
            if proxies is None
            else {
                "classes": list(proxies.class_names),
                "per_class": proxies.vectors.shape[1],
                "links": proxies.links,
                "shown": self._classes_of_proxies(),
            },
        }

    def images(self, text: str, class_number: int | None, order: str, start: int, count: int) -> dict:
        """A page of the images that match."""
        chosen = self.space.matching(text, class_number)
        if order != "number":
            kept = np.zeros(len(self.space), bool)
            kept[chosen] = True
            ranked = self.failures.result.worst(order)
            chosen = ranked[kept[ranked]]
        return {"total": len(chosen), "images": [self._entry(int(i)) for i in chosen[start : start + count]]}

    def image(self, number: int, count: int) -> dict:
        """An image with its nearest others and its subgraph."""
        found, distances = self.space.nearest_others(np.array([number]), count)
        own = self.space.classes[number]
        return self._entry(number) | {
            "nearest": self._found(found[0], distances[0], own),
            "subgraph": self._told(self.space.subgraph_of(number)),
        }

    def upload(self, image: Image.Image, count: int) -> dict:
        """The images nearest to one that was sent, and its subgraph."""
        if self.space.embed_image is None:
            raise ValueError(self.space.no_upload)
        vector = self.space.embed_image(image)  # (D,)
        found, distances = self.space.nearest(vector[None], count)
        proxies = self.space.proxies
        return {
            "size": image.size,
            "nearest": self._found(found[0], distances[0], None),
            "subgraph": None if proxies is None else self._told(proxies.subgraph(vector, None)),
        }

    def confusions(self) -> list[dict]:
        """Pairs of classes, the most confused first."""
        return [pair._asdict() for pair in self.failures.result.confusions]

    def mistaken(self, first: int, second: int, count: int) -> dict:
        """Images of two classes that are taken for each other."""
        pairs = mistaken(self.space, self.failures.result, first, second)
        return {
            "total": len(pairs),
            "pairs": [
                {"image": self._entry(image), "found": self._entry(found), "rank": rank}
                for image, found, rank in pairs[:count]
            ],
        }

    def _entry(self, number: int) -> dict:
        entry = {"number": number, "class": int(self.space.classes[number]), "path": self.space.paths[number]}
        if self.failures.state == "done":
            failures: Failures = self.failures.result
            entry |= {
                "first_right": int(failures.first_right[number]),
                "wrong_share": round(float(failures.wrong_share[number]), 4),
                "depth": failures.nearest.shape[1],
            }
        return entry

    def _found(self, found: np.ndarray, distances: np.ndarray, own: int | None) -> list[dict]:
        similarity = self.space.similarity(distances)  # (K,)
        return [
            {"number": int(i), "class": int(self.space.classes[i]), "path": self.space.paths[i], "similarity": float(s)}
            | ({} if own is None else {"right": bool(self.space.classes[i] == own)})
            for i, s in zip(found, similarity, strict=True)
        ]

    def _told(self, subgraph: Subgraph | None) -> dict | None:
        proxies = self.space.proxies
        if subgraph is None or proxies is None:
            return None
        order = np.argsort(-subgraph.shares, kind="stable")[:MOST_CLASSES_TOLD]
        per_class = proxies.vectors.shape[1]
        counts = np.bincount(subgraph.linked // per_class, minlength=len(proxies.vectors))
        return {
            "linked": subgraph.linked.tolist(),
            "cosines": np.round(subgraph.cosines.astype(float), 4).tolist(),
            "own_class": subgraph.own_class,
            "reached": [
                {
                    "class": int(subgraph.reached[i]),
                    "links": int(counts[subgraph.reached[i]]),
                    "score": float(subgraph.scores[i]),
                    "share": float(subgraph.shares[i]),
                }
                for i in order
            ],
            "more": len(subgraph.reached) - len(order),
        }

    def _classes_of_proxies(self) -> list[int]:
        """Of every class of proxies its number among the classes that are shown, or -1."""
        shown = {int(label): number for number, label in enumerate(np.unique(self.space.original_labels))}
        labels = () if self.space.proxies is None else self.space.proxies.labels
        return [shown.get(int(label), -1) if label >= 0 else -1 for label in labels]

    def _draw(self, layout: str, report: Callable[[int, int], None]) -> np.ndarray:
        """All images and after them all proxies as points (M + CN, 2)."""
        vectors = self.space.vectors
        if self.space.proxies is not None:
            vectors = np.concatenate([vectors, self.space.proxies.unit_vectors.astype(np.float32)])
        return draw(layout, vectors, report)
