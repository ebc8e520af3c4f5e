"""The API on an index, which others change meanwhile, and `proxygml serve`."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index
from proxygml.server import connections
from proxygml.server.items import IndexItems
from proxygml.server.opening import open_items
from proxygml.server.server import create_app
from proxygml.server.space import Space
from proxygml.tasks.classify import Calibration, store_calibration
from proxygml.training.run import Run
from tests.server.test_server import encoded_image

TOKEN = "a-token-of-our-own"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def points(*angles: float, start: int = 0, model: str = "m") -> Embeddings:
    """Unit vectors (M, 2) at these angles, of two classes, with paths 0.png, ..."""
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    paths = np.array([f"{start + number}.png" for number in range(len(angles))])
    return Embeddings(vectors, np.arange(len(angles)) % 2, paths, np.array(["even", "odd"]), model)


class Brightness:
    """Embeds images by their mean brightness, 0..1, as an angle."""

    def crop(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.convert("L")).mean() / 255

    def encode_crops(self, crops: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.cos(crops), np.sin(crops)], axis=1).astype(np.float32)


def items_of(location: str | Path) -> IndexItems:
    return IndexItems(Index.open(location), encoder=Brightness(), writer=Index.open(location))


def client_of(items: IndexItems | Space, **options: object) -> TestClient:
    return TestClient(create_app(items, token=TOKEN, **options), base_url="http://127.0.0.1")


def found(client: TestClient, angle: float = 0, count: int = 10) -> list[str]:
    """Paths of the items nearest to an angle."""
    query = {"vector": [float(np.cos(angle)), float(np.sin(angle))]}
    return [hit["path"] for hit in client.post(f"/v1/search/vector?count={count}", json=query).json()["hits"]]


@pytest.fixture
def location(tmp_path: Path) -> Path:
    index = Index.create(tmp_path / "index", dim=2, model="m", kind="exact")
    index.add(points(0, 0.5, 1))
    index.close()
    return tmp_path / "index"


@pytest.fixture
def client(location: Path) -> Iterator[TestClient]:
    with client_of(items_of(location)) as opened:
        yield opened


class TestReading:
    def test_health(self, client: TestClient) -> None:
        health = client.get("/v1/health").json()
        assert health.pop("version")
        expected = {"status": "ok", "items": 3, "dim": 2, "model": "m", "embeds": True, "writable": True}
        assert health == expected

    def test_search_by_vector_item_and_image(self, client: TestClient) -> None:
        assert found(client, 0.4) == ["1.png", "0.png", "2.png"]
        hit = client.post("/v1/search/vector", json={"vector": [np.cos(0.4), np.sin(0.4)]}).json()["hits"][0]
        assert (hit["label"], hit["similarity"]) == ("odd", pytest.approx(np.cos(0.1)))
        assert hit["distance"] == pytest.approx(2 * np.sin(0.05))
        for name in ("path?path=1.png", f"id?id={hit['id']}"):
            hits = client.get(f"/v1/search/{name}&count=2").json()["hits"]
            assert sorted(hit["path"] for hit in hits) == ["0.png", "2.png"]
        image = encoded_image("white")
        assert client.post("/v1/search/image?count=1", content=image).json()["hits"][0]["path"] == "2.png"
        embedded = client.post("/v1/embed", content=image).json()
        assert embedded == {
            "vector": Brightness().encode_crops([1])[0].tolist(),
            "model": "m",
            "width": 40,
            "height": 30,
        }

    def test_classify(self, client: TestClient, location: Path) -> None:
        near = {"vector": [float(np.cos(0.5)), float(np.sin(0.5))]}
        answer = client.post("/v1/classify/vector", json=near).json()
        assert (answer["label"], answer["calibrated"]) == ("odd", False)
        assert [candidate["label"] for candidate in answer["candidates"]] == ["odd", "even"]
        found = client.post("/v1/classify/image", content=encoded_image("white")).json()
        assert (found["label"], 0 < found["score"] < 1) == ("even", True)
        store_calibration(Index.open(location), Calibration(0.99, 0.1, 1.0, 0.01, "m", 3, 2))  # by another process
        answer = client.post("/v1/classify/vector", json=near).json()
        assert (answer["label"], answer["calibrated"]) == (None, True)
        Index.open(location).remove(["0.png", "1.png", "2.png"])
        rejected = client.post("/v1/classify/vector", json=near)
        assert (rejected.status_code, "needs labels" in rejected.json()["error"]) == (409, True)

    def test_concurrent_searches_share_a_call(self, location: Path) -> None:
        items, calls = items_of(location), []
        search = items.search

        def counted(vectors: np.ndarray, count: int) -> list:
            calls.append((len(vectors), count))
            time.sleep(0.05)
            return search(vectors, count)

        items.search = counted
        with client_of(items) as client, ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda count: found(client, 0.4, count), [1, 2, 3] * 4))
        assert answers == [["1.png"], ["1.png", "0.png"], ["1.png", "0.png", "2.png"]] * 4
        assert sum(vectors for vectors, _ in calls) == 12
        assert len(calls) < 8

    def test_changes_of_other_processes_are_found(self, client: TestClient, location: Path) -> None:
        assert found(client) == ["0.png", "1.png", "2.png"]
        other = Index.open(location)
        other.add(points(0.1, start=3))
        other.remove(["1.png"])
        assert found(client) == ["0.png", "3.png", "2.png"]
        assert client.get("/v1/health").json()["items"] == 3

    def test_vectors_of_runs_and_npz_files_do_not_change(self, tmp_path: Path, trained_run: Run) -> None:
        points(0, 1).save(tmp_path / "vectors.npz")
        with client_of(open_items(str(tmp_path / "vectors.npz"), progress=lambda *_: None)) as client:
            assert found(client) == ["0.png", "1.png"]
            assert client.post("/v1/embed", content=encoded_image()).json()["error"].startswith("these vectors came")
            rejected = client.delete("/v1/items?path=0.png", headers=BEARER)
            assert (rejected.status_code, "`proxygml index build`" in rejected.json()["error"]) == (409, True)
        items = open_items(str(trained_run.folder), split="test", progress=lambda *_: None)
        with client_of(items) as client:
            vector = client.post("/v1/embed", content=encoded_image()).json()["vector"]
            assert len(vector) == client.get("/v1/health").json()["dim"] == trained_run.recipe.embedding_dim
            assert client.delete("/v1/items?path=x", headers=BEARER).status_code == 409

    def test_database_that_fails_is_one_line(self, location: Path) -> None:
        items = items_of(location)

        def fail(*_: object) -> list:
            raise OSError("no connection\nto the server")

        items.search = fail
        with client_of(items) as client:
            answer = client.get("/v1/search/path?path=1.png")
        assert (answer.status_code, answer.json()) == (503, {"error": "no connection to the server"})


class TestWriting:
    def test_add_and_remove(self, client: TestClient, location: Path) -> None:
        new = [{"path": f"new/{i}.png", "label": "crow", "vector": [0, 1]} for i in range(2)]
        added = client.post("/v1/items", json={"items": [*new, new[0]], "model": "m"}, headers=BEARER)
        assert added.json() == {"added": 2, "existing": 1}
        assert found(client, np.pi / 2, 2) == ["new/0.png", "new/1.png"]
        assert ("new/1.png", "crow") in Index.open(location).listing()
        removed = client.delete("/v1/items?path=new/0.png&path=1.png", headers=BEARER)
        assert removed.json() == {"removed": 2}
        assert found(client) == ["0.png", "2.png", "new/1.png"]
        missing = client.delete("/v1/items?path=0.png&path=9.png", headers=BEARER)
        assert missing.status_code == 404
        assert "does not contain 1 of 2 paths, first 9.png" in missing.json()["error"]
        assert found(client, 0, 1) == ["0.png"]

    def test_add_image(self, client: TestClient) -> None:
        words = {"path": "https://example.com/white.png", "label": "white"}
        for counts in ({"added": 1, "existing": 0}, {"added": 0, "existing": 1}):
            added = client.post("/v1/items/image", params=words, content=encoded_image("white"), headers=BEARER)
            assert added.json() == counts
        assert set(found(client, 1, 2)) == {"2.png", words["path"]}

    @pytest.mark.parametrize(
        "path", ["/etc/a.png", "../a.png", "a/../../b.png", "a\\..\\b", "~/a.png", "C:\\a.png", "c:/a", "..", "a\0", ""]
    )
    def test_paths_elsewhere_on_the_server_are_rejected(self, client: TestClient, path: str) -> None:
        item = {"path": path, "label": "a", "vector": [0, 1]}
        rejected = client.post("/v1/items", json={"items": [item], "model": "m"}, headers=BEARER)
        assert rejected.status_code == 422
        assert rejected.json()["error"].startswith("items.0.path: ")
        words = {"path": path, "label": "a"}
        image = client.post("/v1/items/image", params=words, content=encoded_image(), headers=BEARER)
        assert image.status_code == 422
        assert client.get("/v1/health").json()["items"] == 3

    @pytest.mark.parametrize("path", ["a.png", "a/b..c/..d.png", "https://example.com/a.png?b", "été/1", "s3://a/b"])
    def test_other_paths_are_names(self, client: TestClient, path: str) -> None:
        item = {"path": path, "label": "a", "vector": [0, 1]}
        added = client.post("/v1/items", json={"items": [item], "model": "m"}, headers=BEARER)
        assert added.json() == {"added": 1, "existing": 0}

    def test_searches_go_on_while_another_process_writes(self, client: TestClient, location: Path) -> None:
        other = Index.open(location).storage.database
        item = {"path": "a", "label": "a", "vector": [0, 1]}
        with ThreadPoolExecutor(1) as pool:
            with other.transaction():
                adding = pool.submit(client.post, "/v1/items", json={"items": [item], "model": "m"}, headers=BEARER)
                time.sleep(0.2)
                assert len(found(client)) == 3
                assert not adding.done()
            assert adding.result().json() == {"added": 1, "existing": 0}
        assert len(found(client)) == 4

    def test_index_in_postgresql(self, new_database: str) -> None:
        Index.create(new_database, dim=2, model="m", kind="exact").add(points(0, 0.5, 1))
        with client_of(items_of(new_database)) as client:
            item = {"path": "new", "label": "odd", "vector": [1, 0]}
            added = client.post("/v1/items", json={"items": [item], "model": "m"}, headers=BEARER)
            assert added.json() == {"added": 1, "existing": 0}
            assert client.get("/v1/search/path?path=new&count=2").json()["hits"][0]["path"] == "0.png"
            assert client.delete("/v1/items?path=0.png", headers=BEARER).json() == {"removed": 1}
            assert client.delete("/v1/items?path=0.png", headers=BEARER).status_code == 404
            assert found(client) == ["new", "1.png", "2.png"]


class TestInvalidInput:
    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ({"vector": [1, 2, 3]}, "expected a vector of 2 numbers, got 3"),
            ({"vector": [1, "2"]}, "vector.1: Input should be a valid number"),
            ({"vector": [1, 1e300]}, "vector.1: Input should be less than"),
            ({"vector": [1, 2], "count": 1}, "count: Extra inputs are not permitted"),
            ({}, "vector: Field required"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_query_is_one_line(self, client: TestClient, query: dict, message: str) -> None:
        answer = client.post("/v1/search/vector", json=query)
        assert answer.status_code == 422
        assert message in answer.json()["error"]
        assert "\n" not in answer.json()["error"]

    @pytest.mark.parametrize(
        ("request_line", "expected"),
        [
            ("POST /v1/search/vector?rerank=100", "only the query parameters count, got 'rerank'"),
            ("POST /v1/search/image?cuont=3", "only the query parameters count, got 'cuont'"),
            ("GET /v1/search/path?path=0.png&expand=1", "only the query parameters path, count, got 'expand'"),
            ("GET /v1/health?verbose=1", "no query parameters, got 'verbose'"),
            ("DELETE /v1/items?path=0.png&all=1", "only the query parameters path, got 'all'"),
        ],
    )
    def test_unknown_parameter_is_refused(self, client: TestClient, request_line: str, expected: str) -> None:
        answer = client.request(*request_line.split(), headers=BEARER)
        assert answer.status_code == 422
        assert answer.json() == {"error": f"expected {expected}"}

    def test_not_json(self, client: TestClient) -> None:
        for body, status in ((b"{", 400), (b'{"vector": [1, NaN]}', 422), (b"", 422)):
            answer = client.post("/v1/search/vector", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, list(answer.json())) == (status, ["error"])

    def test_large_json_is_rejected(self, client: TestClient) -> None:
        for body in (b"[" * (2**22 + 1), iter([b"[" * 2**20] * 5)):  # with its length in the header, and without
            answer = client.post("/v1/search/vector", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, "larger than 4 MB" in answer.json()["error"]) == (413, True)

    def test_vectors_of_another_network(self, client: TestClient) -> None:
        for model, theirs in (("other", "model other"), ("", "an unknown model")):
            new = {"items": [{"path": "a", "label": "a", "vector": [0, 1]}], "model": model}
            rejected = client.post("/v1/items", json=new, headers=BEARER)
            assert rejected.status_code == 409
            assert f"expected vectors of model m, got vectors of {theirs}" in rejected.json()["error"]


class TestToken:
    WRITING = (("POST", "/v1/items"), ("POST", "/v1/items/image?path=a&label=b"), ("DELETE", "/v1/items?path=0.png"))

    @pytest.mark.parametrize("header", [None, "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"])
    def test_writing_needs_the_token(self, client: TestClient, header: str | None) -> None:
        headers = {} if header is None else {"Authorization": header}
        for method, path in self.WRITING:
            rejected = client.request(method, path, headers=headers)
            assert (rejected.status_code, rejected.headers["www-authenticate"]) == (401, "Bearer")
            assert "added and removed with the token" in rejected.json()["error"]
        assert client.get("/v1/health", headers=headers).status_code == 200

    def test_network_needs_the_token_for_everything(self, location: Path) -> None:
        with client_of(items_of(location), local=False) as client:
            for path in ("/v1/health", "/openapi.json", "/v1/search/path?path=0.png", "/nothing", f"/?token={TOKEN}x"):
                assert client.get(path).status_code == 401
            assert client.get("/v1/health", headers=BEARER).status_code == 200
            assert client.get("/v1/health", headers={"Authorization": f"bearer  {TOKEN}"}).status_code == 200

    def test_other_host_name_is_accepted_with_the_token(self, client: TestClient) -> None:
        proxied = {"host": "search.example.com"}  # behind a reverse proxy
        assert client.get("/v1/health", headers=proxied).status_code == 403
        assert client.get("/v1/health", headers=proxied | BEARER).status_code == 200

    def test_pages_of_other_sites_are_rejected_with_the_token(self, client: TestClient) -> None:
        for site in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert client.get("/v1/health", headers=BEARER | site).status_code == 403


def test_page_has_the_api_but_changes_nothing(location: Path) -> None:
    space = Space("some", next(Index.open(location).blocks()))
    with client_of(space) as client:
        assert found(client) == ["0.png", "1.png", "2.png"]
        assert not client.get("/v1/health").json()["writable"]
        rejected = client.delete("/v1/items?path=0.png", headers=BEARER)
        assert (rejected.status_code, "`proxygml serve`" in rejected.json()["error"]) == (409, True)


class TestCommand:
    def start(self, monkeypatch: pytest.MonkeyPatch, *words: object) -> TestClient:
        served: list[FastAPI] = []

        def serve(app: FastAPI, listening: socket.socket, ready: Callable[[], None]) -> None:
            served.append(app)
            ready()

        monkeypatch.setattr(connections, "serve", serve)
        main(["serve", *map(str, words), "--port", "0"])
        return TestClient(served[0], base_url="http://127.0.0.1")

    def test_token_is_printed(
        self, location: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        client = self.start(monkeypatch, location)
        printed = re.fullmatch(
            r"3 vectors of 2 dimensions: http://127\.0\.0\.1:\d+/v1 \(Ctrl-C ends it\)\ntoken: (\S{40,})\n",
            capsys.readouterr().out,
        )
        removed = client.delete("/v1/items?path=0.png", headers={"Authorization": f"Bearer {printed[1]}"})
        assert removed.json() == {"removed": 1}

    def test_token_of_the_environment(
        self, location: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.setenv("PROXYGML_TOKEN", TOKEN)
        client = self.start(monkeypatch, location, "--host", "0.0.0.0")
        assert TOKEN not in capsys.readouterr().out
        assert [client.get("/v1/health", headers=headers).status_code for headers in ({}, BEARER)] == [401, 200]

    @pytest.mark.parametrize(
        "token", ["short", "a token with spaces in it", "ein-ganz-geheimes-wört", "0123456789abcd\n"]
    )
    def test_weak_token_is_one_line(
        self, location: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, token: str
    ) -> None:
        monkeypatch.setenv("PROXYGML_TOKEN", token)
        with pytest.raises(SystemExit):
            main(["serve", str(location)])
        printed = capsys.readouterr().err
        assert "expected 16 or more ASCII characters without spaces in PROXYGML_TOKEN" in " ".join(printed.split())
        assert token not in printed

    def test_port_in_use_is_one_line(self, location: Path, capsys: pytest.CaptureFixture) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
            main(["serve", str(location), "--port", str(taken.getsockname()[1])])
        assert "try another --port" in " ".join(capsys.readouterr().err.split())

    def test_index_of_a_run_embeds_with_its_network(
        self, tmp_path: Path, trained_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        main(["index", "build", str(trained_run.folder), "--split", "test", "--out", str(tmp_path / "index")])
        client = self.start(monkeypatch, tmp_path / "index")
        assert client.get("/v1/health").json()["model"] == trained_run.model_id
        path, _ = Index.open(tmp_path / "index").listing()[0]
        near = client.get("/v1/search/path", params={"path": path}).json()["hits"]
        assert len(near) == 10
        assert (
            len(client.post("/v1/embed", content=encoded_image()).json()["vector"]) == trained_run.recipe.embedding_dim
        )
