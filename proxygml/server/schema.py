"""Requests and responses of the API as pydantic models: the OpenAPI document describes them."""

import re
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from proxygml.retrieval.validation import MAX_VALUE
from proxygml.version import __version__

MAX_COUNT, MAX_ITEMS, MAX_LENGTH = 1000, 1000, 4096  # hits, items and characters of a text in a request
# No absolute path and no part "..": `proxygml browse` will look for the image of an item below the current folder.
NAME = r"^(?![/\\~]|\w:[/\\])(?!([\s\S]*[/\\])?\.\.([/\\]|$))[^\x00]+$"


def check_name(path: str) -> str:
    """The path of a new item, which must not name a file elsewhere on this machine."""
    if not re.search(NAME, path):
        raise ValueError(f"expected a relative path without .. or a URL, got {path[:100]!r}: it only names the item")
    return path


Text = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH, pattern=r"^[^\x00]+$")]
Name = Annotated[
    str, Field(min_length=1, max_length=MAX_LENGTH, json_schema_extra={"pattern": NAME}), AfterValidator(check_name)
]
Number = Annotated[float, Field(ge=-MAX_VALUE / 2, le=MAX_VALUE / 2, allow_inf_nan=False)]  # also as float32
Count = Annotated[int, Query(ge=1, le=MAX_COUNT)]


class Strict(BaseModel):
    """A part of a request: no text where a number is expected, and no other names."""

    model_config = ConfigDict(strict=True, extra="forbid")


class VectorQuery(Strict):
    vector: list[Number]


class Item(Strict):
    path: Name = Field(description="name of the item: a relative path or a URL, which is never opened")
    label: Text = Field(description="name of its class")
    vector: list[Number]


class NewItems(Strict):
    items: list[Item] = Field(min_length=1, max_length=MAX_ITEMS)
    model: str = Field(default="", description="id of the network of the vectors, as `embed` returns it")


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str = Field(default=__version__, description="of proxygml")
    items: int
    dim: int = Field(description="length of the vectors")
    model: str = Field(description="id of the network of the vectors; empty if unknown")
    embeds: bool = Field(description="whether images are accepted")
    writable: bool = Field(description="whether items can be added and removed")


class Embedded(BaseModel):
    vector: list[float]
    model: str = Field(description="id of the network")
    width: int = Field(description="of the image, in pixels")
    height: int


class Hit(BaseModel):
    path: str
    label: str = Field(description="name of its class")
    distance: float = Field(description="Euclidean")
    similarity: float = Field(description="cosine")
    id: int


class Results(BaseModel):
    hits: list[Hit] = Field(description="nearest first")


class Candidate(BaseModel):
    label: str
    probability: float = Field(description="that it is the right class, if the index has that")


class Answer(BaseModel):
    label: str | None = Field(description="name of the class; null: unknown")
    score: float = Field(description="similarity of the nearest item, less if the classes of its neighbors disagree")
    candidates: list[Candidate] = Field(description="classes of the nearest items, the likeliest first")
    calibrated: bool = Field(description="whether `proxygml calibrate` has set the threshold; else nothing is unknown")


class Added(BaseModel):
    added: int
    existing: int = Field(description="items with a path that was there already: they stay unchanged")


class Removed(BaseModel):
    removed: int


class Error(BaseModel):
    error: str = Field(description="what was expected, what came, what to do")


IMAGE = {"requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}}
REASONS = {
    400: "not JSON",
    401: "without the token",
    403: "from a page of another site, or under another host name",
    404: "no such item",
    408: "took too long to arrive",
    409: "not here: without a network or labels, read-only, or vectors of another network",
    413: "too large",
    415: "not a readable image",
    422: "not as expected",
    503: "too many requests at once, or the index cannot be read or written",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route: these, and those of all routes."""
    return {status: {"model": Error, "description": REASONS[status]} for status in (*statuses, 401, 403, 422, 503)}


def with_dimension(document: dict[str, Any], dim: int) -> dict[str, Any]:
    """An OpenAPI document that states the length of vectors."""
    for name in ("VectorQuery", "Item", "Embedded"):
        document["components"]["schemas"][name]["properties"]["vector"] |= {"minItems": dim, "maxItems": dim}
    return document
