"""The HTTP API, version 1: embed images, search, classify, add and remove items. No path in a request is opened.

Axes: Q queries of a batch, D embedding.
"""

import asyncio
from typing import Annotated, NamedTuple, cast

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPBearer

from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Hit, Index
from proxygml.server import schema
from proxygml.server.batching import Batcher
from proxygml.server.images import read_upload
from proxygml.server.items import Encoder, Items
from proxygml.server.schema import IMAGE, MAX_ITEMS, Count, Name, Text, errors
from proxygml.tasks.classify import VOTERS, answer

MAX_UPLOADS, UPLOAD_SECONDS = 8, 60.0  # at a time, each of up to 64 MB; time for one to arrive
MAX_DECODED = 2  # uploads at a time: each may take a gigabyte
MAX_CROPS, MAX_QUERIES = 32, 100  # images that share a forward pass, and vectors that share a search


class Embedded(NamedTuple):
    """The vector (D,) of an upload, and its size in pixels."""

    vector: np.ndarray
    width: int
    height: int


def reject_unknown_parameters(request: Request) -> None:
    """Status 422 for a query parameter that the route does not have."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            expected = f"only the query parameters {', '.join(known)}" if known else "no query parameters"
            raise HTTPException(422, f"expected {expected}, got {name[:100]!r}")


def create_router(items: Items) -> APIRouter:
    """The routes of /v1. Concurrent images share a forward pass, and concurrent vectors a search."""
    router = APIRouter(
        prefix="/v1",
        # The guard checks the token; HTTPBearer is for the OpenAPI document.
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(reject_unknown_parameters)],
        generate_unique_id_function=lambda route: route.name,
    )
    uploads, decoding = asyncio.Semaphore(MAX_UPLOADS), asyncio.Semaphore(MAX_DECODED)

    def embed_all(crops: list[np.ndarray]) -> list[np.ndarray]:
        return list(cast(Encoder, items.encoder).encode_crops(crops))  # (Q, D)

    def decode(contents: bytes) -> tuple[np.ndarray, tuple[int, int]]:
        image = read_upload(contents)
        size = image.size  # before it is decoded, perhaps at a fraction of its size
        return cast(Encoder, items.encoder).crop(image), size

    def search_all(queries: list[tuple[np.ndarray, int]]) -> list[list[Hit]]:
        vectors, counts = zip(*queries, strict=True)
        results = items.search(np.stack(vectors), max(counts))  # queries (Q, D)
        return [hits[:count] for hits, count in zip(results, counts, strict=True)]

    embed, search = Batcher(embed_all, MAX_CROPS), Batcher(search_all, MAX_QUERIES)

    async def upload(request: Request) -> Embedded:
        """The vector of the image that is the body of a request."""
        if items.encoder is None:
            raise HTTPException(409, items.no_upload)
        if request.headers.get("content-type", "").startswith("multipart/"):
            raise HTTPException(415, "expected the image itself as the body, got a form: curl --data-binary @photo.jpg")
        async with uploads:
            try:
                contents = await asyncio.wait_for(request.body(), UPLOAD_SECONDS)
                async with decoding:
                    crop, size = await run_in_threadpool(decode, contents)
            except asyncio.TimeoutError as error:
                raise HTTPException(408, f"the image took more than {UPLOAD_SECONDS:.0f} s to arrive") from error
            except (ValueError, OSError) as error:
                raise HTTPException(415, str(error)) from error
        return Embedded(await embed(crop), *size)

    def writable() -> Index:
        if items.writer is None:
            raise HTTPException(409, items.read_only)
        return items.writer

    def check_vector(vector: list[float]) -> np.ndarray:
        if len(vector) != items.dim:
            raise HTTPException(422, f"expected a vector of {counted(items.dim, 'number')}, got {len(vector)}")
        return np.array(vector, np.float32)

    async def nearest(vector: np.ndarray, count: int) -> schema.Results:
        return schema.Results(hits=[schema.Hit(**hit._asdict()) for hit in await search((vector, count))])

    async def nearest_others(item: int | str, count: int) -> schema.Results:
        found = await run_in_threadpool(items.find, item)
        if found is None:
            raise HTTPException(404, f"there is no item {item!r}")
        results = await nearest(found[1], count + 1)
        return schema.Results(hits=[hit for hit in results.hits if hit.id != found[0]][:count])

    async def classify(vector: np.ndarray) -> schema.Answer:
        calibration = await run_in_threadpool(lambda: items.calibration)
        try:
            result = answer(await search((vector, VOTERS)), calibration)
        except ValueError as error:
            raise HTTPException(409, str(error)) from error
        candidates = [schema.Candidate(**candidate._asdict()) for candidate in result.candidates]
        return schema.Answer(**result._asdict() | {"candidates": candidates})

    async def add(index: Index, new: Embeddings) -> schema.Added:
        if new.model != items.model:
            expected, got = (f"model {model}" if model else "an unknown model" for model in (items.model, new.model))
            raise HTTPException(409, f"expected vectors of {expected}, got vectors of {got}: see /v1/health")
        added = await run_in_threadpool(index.add, new)
        return schema.Added(added=added, existing=len(new) - added)

    Upload = Annotated[Embedded, Depends(upload)]  # noqa: N806 # a type
    Writable = Annotated[Index, Depends(writable)]  # noqa: N806

    @router.get("/health", responses=errors())
    def health() -> schema.Health:
        """That the server answers, and what it searches in."""
        return schema.Health(
            items=len(items),
            dim=items.dim,
            model=items.model,
            embeds=items.encoder is not None,
            writable=items.writer is not None,
        )

    @router.post("/embed", responses=errors(408, 409, 413, 415), openapi_extra=IMAGE)
    async def embed_image(image: Upload) -> schema.Embedded:
        """The vector of an image file, which is the body of the request."""
        return schema.Embedded(**image._asdict() | {"vector": image.vector.tolist()}, model=items.model)

    @router.post("/search/image", responses=errors(408, 409, 413, 415), openapi_extra=IMAGE)
    async def search_image(image: Upload, count: Count = 10) -> schema.Results:
        """The items nearest to an image file, which is the body of the request."""
        return await nearest(image.vector, count)

    @router.post("/search/vector", responses=errors(400, 413))
    async def search_vector(query: schema.VectorQuery, count: Count = 10) -> schema.Results:
        """The items nearest to a vector."""
        return await nearest(check_vector(query.vector), count)

    @router.get("/search/path", responses=errors(404))
    async def search_path(path: Text, count: Count = 10) -> schema.Results:
        """The items nearest to the item with this path, without itself."""
        return await nearest_others(path, count)

    @router.get("/search/id", responses=errors(404))
    async def search_id(id: Annotated[int, Query(ge=0, lt=2**63)], count: Count = 10) -> schema.Results:
        """The items nearest to the item with this id, as hits have them, without itself."""
        return await nearest_others(id, count)

    @router.post("/classify/image", responses=errors(408, 409, 413, 415), openapi_extra=IMAGE)
    async def classify_image(image: Upload) -> schema.Answer:
        """The class of an image file, which is the body of the request, by a vote of the nearest items."""
        return await classify(image.vector)

    @router.post("/classify/vector", responses=errors(400, 409, 413))
    async def classify_vector(query: schema.VectorQuery) -> schema.Answer:
        """The class of a vector, by a vote of the nearest items."""
        return await classify(check_vector(query.vector))

    @router.post("/items", responses=errors(400, 409, 413))
    async def add_items(index: Writable, new: schema.NewItems) -> schema.Added:
        """Add vectors with paths and classes."""
        vectors = np.stack([check_vector(item.vector) for item in new.items])  # (M, D)
        names, labels = np.unique([item.label for item in new.items], return_inverse=True)
        paths = np.array([item.path for item in new.items])
        return await add(index, Embeddings(vectors, labels, paths, names, new.model))

    @router.post("/items/image", responses=errors(408, 409, 413, 415), openapi_extra=IMAGE)
    async def add_image(index: Writable, image: Upload, path: Name, label: Text) -> schema.Added:
        """Embed an image file, which is the body of the request, and add its vector."""
        new = Embeddings(image.vector[None], np.zeros(1, int), np.array([path]), np.array([label]), items.model)
        return await add(index, new)

    @router.delete("/items", responses=errors(404, 409))
    async def remove_items(
        index: Writable, path: Annotated[list[Text], Query(min_length=1, max_length=MAX_ITEMS)]
    ) -> schema.Removed:
        """Remove items; if one is missing, none is removed."""
        try:
            return schema.Removed(removed=await run_in_threadpool(index.remove, path))
        except ValueError as error:
            raise HTTPException(404, str(error)) from error

    return router
