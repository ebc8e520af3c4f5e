"""The OpenAPI document, and requests that schemathesis generates from it."""

import pytest
from hypothesis import HealthCheck, given, settings

from proxygml.retrieval import Index
from proxygml.server.items import IndexItems
from proxygml.server.server import create_app
from tests.server.test_api import BEARER, TOKEN, Brightness, points

OPERATIONS = ["GET /v1/health", "GET /v1/search/path", "GET /v1/search/id"]
OPERATIONS += [f"POST /v1/{name}" for name in ("embed", "search/image", "search/vector", "items", "items/image")]
OPERATIONS += [f"POST /v1/classify/{name}" for name in ("image", "vector")]
OPERATIONS += ["DELETE /v1/items"]


@pytest.fixture(scope="module")
def app():
    index = Index.create(None, dim=2, kind="exact")
    index.add(points(0, 0.5, 1, model=""))
    return create_app(IndexItems(index, encoder=Brightness(), writer=index), token=TOKEN, local=False)


def test_document(app) -> None:
    document = app.openapi()
    operations = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    assert sorted(operations) == sorted(OPERATIONS)
    schemas = document["components"]["schemas"]
    for name in ("VectorQuery", "Item", "Embedded"):
        vector = schemas[name]["properties"]["vector"]
        assert (vector["minItems"], vector["maxItems"]) == (2, 2)
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_generated_requests_are_answered_as_documented(app, operation: str) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="not installed: pip install schemathesis")
    headers = BEARER | {"Host": "127.0.0.1"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)
    method, path = operation.split()

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy())
    def check(case) -> None:
        case.call_and_validate(headers=headers)

    check()
