"""Responses about a space: JSON, and arrays as bytes. The methods of `Responses` are routes of the server."""

from functools import partial
from typing import Annotated, Literal

import numpy as np
from fastapi import Body, HTTPException, Query, Response

from proxygml.display import counted
from proxygml.server.failures import find_failures, list_confused
from proxygml.server.jobs import Job, Report
from proxygml.server.map import draw, layouts
from proxygml.server.schema import Number
from proxygml.server.space import Space, Subgraph

MAX_IMAGES = 20_000  # up to this many, failures are computed at the start: it takes seconds
MAX_ACTIVE_CLASSES = 20  # in the response about a subgraph
JobName = Literal["failures", "pca", "tsne", "umap"]
Count = Annotated[int, Query(ge=1, le=200)]


class Responses:
    """Responses about one space; slow computations run in `jobs`."""

    def __init__(self, space: Space, server_id: str) -> None:
        self.space, self.server_id = space, server_id
        self.failures = Job(partial(find_failures, space))
        self.jobs = {"failures": self.failures} | {name: Job(partial(self._draw, name)) for name in layouts()}

    def start_jobs(self) -> None:
        """Start the jobs that the page needs at once."""
        self.jobs["pca"].start()
        if len(self.space) <= MAX_IMAGES and not self.space.no_errors:
            self.failures.start()

    def stop_jobs(self) -> None:
        """Cancel all jobs; a thread that does not end within half a second is abandoned."""
        for job in self.jobs.values():
            job.cancel()
        for job in self.jobs.values():
            job.wait(0.5)

    def progress(self) -> dict[str, dict]:
        """The status of every job; with Recall@1 once failures are computed."""
        status = {name: job.status() for name, job in self.jobs.items()}
        if self.failures.state == "done":
            status["failures"]["recall_at_1"] = self.failures.result.recall_at_1
        return status

    def start(self, name: JobName) -> dict:
        if command := layouts().get(name):
            raise HTTPException(409, f"{name} is not installed: {command}")
        if name == "failures" and self.space.no_errors:
            raise HTTPException(409, f"no errors are counted: {self.space.no_errors}")
        self.jobs[name].start()
        return self.jobs[name].status()

    def cancel(self, name: JobName) -> dict:
        self.jobs[name].cancel()
        return self.jobs[name].status()

    def points(self, layout: Literal["pca", "tsne", "umap"]) -> Response:
        return _binary(self.jobs[layout].result, "<f4")

    def classes(self) -> Response:
        return _binary(self.space.classes, "<i4")

    def right(self) -> Response:
        return _binary(self.failures.result.first_right == 1, "u1")

    def about(self) -> dict:
        """The space as a whole."""
        space, proxies = self.space, self.space.proxies
        numbers = {label: number for number, label in enumerate(space.labels.tolist())}
        return {
            "name": space.name,
            "server_id": self.server_id,
            "images": len(space),
            "dimensions": space.vectors.shape[1],
            "classes": [name or "no label" for name in space.class_names],
            "sizes": space.class_sizes.tolist(),
            "examples": np.unique(space.classes, return_index=True)[1].tolist(),  # an image of each class
            "pictures": space.open_image is not None,
            "unit": space.unit,
            "upload": space.encoder is not None,
            "no_upload": space.no_upload,
            "no_errors": space.no_errors,
            "layouts": layouts(),
            "proxies": proxies
            and {
                "classes": proxies.class_names,
                "per_class": proxies.vectors.shape[1],
                "links": proxies.links,
                # The class of the images that belongs to each class of proxies, or -1.
                "image_classes": [numbers.get(label, -1) if label >= 0 else -1 for label in proxies.labels.tolist()],
            },
        }

    def images(
        self,
        text: Annotated[str, Query(max_length=200)] = "",
        class_number: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
        order: Literal["number", "rank", "fraction"] = "number",
        start: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        count: Count = 60,
    ) -> dict:
        """A page of the images that match a text and a class."""
        selected = self.space.matching(text, class_number)
        if order != "number":
            ranked = self.failures.result.worst_first(order)
            selected = ranked[np.isin(ranked, selected)]
        return {"total": len(selected), "images": [self._image(i) for i in selected[start : start + count].tolist()]}

    def image(self, number: int) -> dict:
        """An image with its subgraph."""
        check_number(number, len(self.space), "image")
        return self._image(number) | {"subgraph": self._subgraph(self.space.subgraph_of(number))}

    def subgraph(self, vector: Annotated[list[Number], Body(embed=True)]) -> dict | None:
        """The subgraph of the vector of an upload; None without proxies."""
        if len(vector) != self.space.dim:
            raise HTTPException(422, f"expected a vector of {counted(self.space.dim, 'number')}, got {len(vector)}")
        if self.space.proxies is None:
            return None
        return self._subgraph(self.space.proxies.subgraph(np.array(vector), None))

    def confusions(self) -> list[dict]:
        """Pairs of classes, the most confused first."""
        return [pair._asdict() for pair in self.failures.result.confusions]

    def confused(self, first: int, second: int, count: Count = 100) -> dict:
        """Images of one of two classes with neighbors of the other."""
        for number in (first, second):
            check_number(number, len(self.space.class_names), "class")
        pairs = list_confused(self.space, self.failures.result, first, second)
        return {
            "total": len(pairs),
            "pairs": [
                {"image": self._image(image), "neighbor": self._image(neighbor), "rank": rank}
                for image, neighbor, rank in pairs[:count]
            ],
        }

    def _image(self, number: int) -> dict:
        image = {"number": number, "class": int(self.space.classes[number]), "path": self.space.paths[number]}
        if self.failures.state == "done":
            failures = self.failures.result
            image["first_right"] = int(failures.first_right[number])
            image["wrong_fraction"] = round(float(failures.wrong_fraction[number]), 4)
            image["depth"] = failures.nearest.shape[1]
        return image

    def _subgraph(self, subgraph: Subgraph | None) -> dict | None:
        proxies = self.space.proxies
        if subgraph is None or proxies is None:
            return None
        links = np.bincount(subgraph.linked // proxies.vectors.shape[1], minlength=len(proxies.vectors))  # (C,)
        order = np.argsort(-subgraph.probabilities, kind="stable")[:MAX_ACTIVE_CLASSES]
        classes = subgraph.active_classes[order]
        columns = classes, links[classes], subgraph.scores[order], subgraph.probabilities[order]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {
            "linked": subgraph.linked.tolist(),
            "cosines": np.round(subgraph.cosines.astype(float), 4).tolist(),
            "own_class": subgraph.own_class,
            "active_classes": [dict(zip(("class", "links", "score", "probability"), row, strict=True)) for row in rows],
            "more": len(subgraph.active_classes) - len(order),
        }

    def _draw(self, layout: str, report: Report) -> np.ndarray:
        """All images followed by all proxies as points (M + CN, 2)."""
        vectors = self.space.vectors
        if self.space.proxies is not None:
            vectors = np.concatenate([vectors, self.space.proxies.unit_vectors.astype(np.float32)])
        return draw(layout, vectors, report)


def check_number(number: int, count: int, name: str) -> None:
    """Status 404 if there is no image or class of this number."""
    if not 0 <= number < count:
        raise HTTPException(404, f"expected {name} 0 to {count - 1}, got {number}")


def _binary(array: np.ndarray, dtype: str) -> Response:
    return Response(array.astype(dtype).tobytes(), media_type="application/octet-stream")
