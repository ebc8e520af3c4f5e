"""Responses of the server, and requests that it rejects."""

import asyncio
import io
import os
import re
import socket
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

from proxygml.cli.browse import browse
from proxygml.data import decoding
from proxygml.embeddings import Embeddings
from proxygml.server import api, connections, guards, responses
from proxygml.server import map as maps
from proxygml.server.connections import listen
from proxygml.server.images import SIDES, Thumbnails, read_upload
from proxygml.server.server import create_app
from proxygml.server.space import Proxies, Space


def encoded_image(color: str = "green", size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    contents = io.BytesIO()
    Image.new("RGB", size, color).save(contents, kind)
    return contents.getvalue()


def bomb(side: int) -> bytes:
    """A small PNG with a header of `side` x `side` pixels."""

    def chunk(name: bytes, contents: bytes) -> bytes:
        return struct.pack(">I", len(contents)) + name + contents + struct.pack(">I", zlib.crc32(name + contents))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


class TestResponses:
    def test_page_has_no_external_resources(self, client: TestClient) -> None:
        answer = client.get("/")
        assert answer.status_code == 200
        assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert answer.text.count(f'nonce="{nonce}"') == 2
        assert client.get("/").headers["content-security-policy"] != policy

    def test_space(self, client: TestClient) -> None:
        about = client.get("/page/space").json()
        assert (about["images"], about["dimensions"], about["classes"]) == (12, 2, ["red", "green", "blue"])
        assert (about["sizes"], about["examples"]) == ([4, 4, 4], [0, 4, 8])
        assert about["unit"]
        assert about["upload"]
        assert about["proxies"] is None
        classes = np.frombuffer(client.get("/page/classes").content, "<i4")
        np.testing.assert_array_equal(classes, np.repeat([0, 1, 2], 4))

    def test_image_with_its_neighbors(self, client: TestClient) -> None:
        assert client.get("/page/images/3").json()["path"] == "red/3.jpg"
        assert client.get("/page/images/3").json()["subgraph"] is None
        hits = client.get("/v1/search/id?id=3&count=5").json()["hits"]  # a red one among the green
        assert {hit["label"] for hit in hits[:3]} == {"green"}
        angles = {3: 1.05, 4: 1.0, 5: 1.1, 6: 1.2}
        assert hits[0]["similarity"] == pytest.approx(np.cos(angles[3] - angles[hits[0]["id"]]), abs=1e-5)
        assert len(hits) == 5
        others = client.get("/v1/search/path?path=red/3.jpg&count=24").json()["hits"]
        assert sorted(hit["id"] for hit in others) == [0, 1, 2, *range(4, 12)]

    def test_list_of_images(self, client: TestClient) -> None:
        assert client.get("/page/images?count=5&start=10").json()["total"] == 12
        assert [e["number"] for e in client.get("/page/images?count=5&start=10").json()["images"]] == [10, 11]
        assert [e["path"] for e in client.get("/page/images?text=green/2").json()["images"]] == ["green/2.jpg"]
        assert client.get("/page/images?class_number=2").json()["total"] == 4
        assert client.get("/page/images?class_number=99").json()["total"] == 0
        for order in ("rank", "fraction"):
            worst = [entry["number"] for entry in client.get(f"/page/images?order={order}").json()["images"]]
            assert set(worst[:2]) == {3, 7}
            of_green = client.get(f"/page/images?order={order}&class_number=1").json()["images"]
            assert of_green[0]["number"] == 7
            assert of_green[0]["first_right"] > 3

    def test_confusions(self, client: TestClient) -> None:
        pairs = client.get("/page/confusions").json()
        assert {(pair["first"], pair["second"]) for pair in pairs[:2]} == {(0, 1), (1, 2)}
        confused = client.get("/page/confusions/0/1").json()
        assert confused["total"] == pairs[0]["count"] == len(confused["pairs"])
        assert pairs[0]["neighbors"] == 2 * 4 * 3
        assert pairs[0]["fraction"] == pytest.approx(pairs[0]["count"] / 24)
        assert {confused["pairs"][0]["image"]["class"], confused["pairs"][0]["neighbor"]["class"]} == {0, 1}
        right = np.frombuffer(client.get("/page/right").content, np.uint8)
        assert client.get("/page/jobs").json()["failures"]["recall_at_1"] == pytest.approx(right.mean())

    def test_map(self, client: TestClient) -> None:
        points = np.frombuffer(client.get("/page/map/pca").content, "<f4").reshape(-1, 2)
        assert points.shape == (12, 2)
        assert np.abs(points).max() == pytest.approx(1)

    def test_tsne_runs_as_a_job(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(maps, "run_in_process", lambda layout, vectors, report: vectors)
        assert client.get("/page/map/tsne").status_code == 409
        assert client.post("/page/jobs/tsne").json()["state"] == "running"
        client.app.state.responses.jobs["tsne"].wait()
        assert client.get("/page/jobs").json()["tsne"]["state"] == "done"
        assert len(client.get("/page/map/tsne").content) == 12 * 8

    def test_upload(self, client: TestClient) -> None:
        upload = encoded_image("blue", kind="WEBP")
        embedded = client.post("/v1/embed", content=upload).json()
        assert (embedded["width"], embedded["height"]) == (40, 30)
        hits = client.post("/v1/search/image?count=3", content=upload).json()["hits"]
        assert (len(hits), hits[0]["path"]) == (3, "blue/0.jpg")
        assert hits[0]["similarity"] == pytest.approx(1, abs=1e-5)
        vector = {"vector": embedded["vector"]}
        assert client.post("/v1/search/vector?count=3", json=vector).json()["hits"] == hits
        assert client.post("/page/subgraph", json=vector).json() is None

    def test_proxies(self) -> None:
        rng = np.random.default_rng(0)
        rows = Embeddings(rng.normal(size=(8, 4)), np.repeat([5, 6], 4), np.arange(8).astype(str))
        proxies = Proxies(rng.normal(size=(3, 2, 4)).astype(np.float32), tuple("xyz"), np.array([6, 9, 5]), 4, 4.0)
        with TestClient(create_app(Space("s", rows, proxies=proxies)), base_url="http://localhost") as client:
            assert client.get("/page/space").json()["proxies"] == {
                "classes": ["x", "y", "z"],
                "per_class": 2,
                "links": 4,
                "image_classes": [1, -1, 0],
            }
            graph = client.get("/page/images/0").json()["subgraph"]
            assert graph["own_class"] == 2
            assert {4, 5} <= set(graph["linked"])
            assert sum(entry["probability"] for entry in graph["active_classes"]) == pytest.approx(1, abs=1e-5)
            assert sum(entry["links"] for entry in graph["active_classes"]) == 4
            vector = {"vector": rows.vectors[0].tolist()}
            assert client.post("/page/subgraph", json=vector).json()["own_class"] is None
            assert client.post("/page/subgraph", json={"vector": [1, 2]}).status_code == 422
            client.app.state.responses.jobs["pca"].wait()
            assert len(client.get("/page/map/pca").content) == (8 + 6) * 8


class TestThumbnails:
    def test_size(self, client: TestClient) -> None:
        for side in SIDES:
            answer = client.get(f"/page/thumbnails/4?side={side}")
            with Image.open(io.BytesIO(answer.content)) as image:
                assert max(image.size) == min(side, 300)
                assert image.size[0] / image.size[1] == pytest.approx(1.5, abs=0.02)
                assert np.asarray(image.convert("RGB")).mean(axis=(0, 1)).argmax() == 1
            assert answer.headers["content-type"] in ("image/jpeg", "image/png")

    def test_missing_or_damaged_file_is_a_gray_tile(self, client: TestClient, photos: Path) -> None:
        (photos / "photos/red/1.jpg").unlink()
        (photos / "photos/red/2.jpg").write_bytes(b"\xff\xd8 not a photo any more")
        for number, text in [(1, "the file is gone"), (2, "cannot be read")]:
            answer = client.get(f"/page/thumbnails/{number}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml")
            assert text in answer.text
        (photos / "photos/red/1.jpg").write_bytes(encoded_image("red", kind="JPEG"))
        assert client.get("/page/thumbnails/1").headers["content-type"] != "image/svg+xml"  # it came back

    @pytest.mark.timeout(20)
    def test_pipe_is_a_gray_tile(self, client: TestClient, photos: Path) -> None:
        (photos / "photos/red/1.jpg").unlink()
        os.mkfifo(photos / "photos/red/1.jpg")  # opening it would block a thread for ever
        assert "cannot be read" in client.get("/page/thumbnails/1").text

    def test_cache_is_bounded(self, colors: Space) -> None:
        thumbnails = Thumbnails(colors, max_cached=3)
        for number in range(12):
            assert thumbnails.get(number, 96) == thumbnails.get(number, 96)
        info = thumbnails.encoded.cache_info()
        assert (info.hits, info.misses, info.currsize) == (12, 12, 3)
        assert len(thumbnails.get(0, 2048)[0]) == len(thumbnails.get(0, 512)[0])  # it has only 300 pixels
        assert thumbnails.encoded.cache_info().misses == 13  # of the smaller one: full sizes are not kept

    def test_other_sizes_and_numbers_are_rejected(self, client: TestClient) -> None:
        assert client.get("/page/thumbnails/0?side=100000").status_code == 422
        for number in (12, -1, 10**30):
            assert client.get(f"/page/thumbnails/{number}").status_code in (404, 422)

    def test_vectors_without_images(self) -> None:
        space = Space("own", Embeddings(np.eye(3), np.arange(3), np.array(["0", "1", "2"])), no_upload="no network")
        with TestClient(create_app(space), base_url="http://127.0.0.1") as client:
            assert not client.get("/page/space").json()["pictures"]
            assert client.get("/page/thumbnails/0").json() == {"error": "these vectors have no images"}
            rejected = client.post("/v1/embed", content=encoded_image())
            assert (rejected.status_code, rejected.json()) == (409, {"error": "no network"})


class TestInvalidInput:
    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            (b"", "expected an image, got 0 bytes"),
            (b"GIF89a, but no more", "not a readable image"),
            (b"<svg onload='alert(1)'/>", "not a readable image"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable image"),
            (encoded_image(kind="JPEG")[:300], "not a readable image"),
            (bomb(14_200), "more than 200 million pixels"),  # above our limit
            (bomb(15_000), "more than 200 million pixels"),  # Pillow warns
            (bomb(60_000), "more than 200 million pixels"),  # Pillow refuses
        ],
        ids=["empty", "cut", "svg", "eps", "half a jpeg", "large", "larger", "bomb"],
    )
    def test_upload_of_another_file(self, client: TestClient, contents: bytes, message: str) -> None:
        answer = client.post("/v1/embed", content=contents)
        assert answer.status_code == 415
        assert message in answer.json()["error"]
        assert "\n" not in answer.json()["error"]
        assert client.post("/v1/embed", content=encoded_image()).status_code == 200

    def test_large_upload_is_rejected_early(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guards, "MAX_UPLOAD_BYTES", 2**20)
        read = []

        def endless() -> object:
            for number in range(1000):
                read.append(number)
                yield b"x" * 2**16

        assert client.post("/v1/embed", content=b"x" * (2**20 + 1)).status_code == 413
        unannounced = client.post("/v1/embed", content=endless())
        assert unannounced.status_code == 413
        assert "larger than 1 MB" in unannounced.json()["error"]

    @pytest.mark.parametrize(
        "path",
        [
            "/page/images/12",
            "/page/images/-1",
            "/page/images/x",
            "/page/images?count=0",
            "/v1/search/id?id=0&count=100000",
            "/v1/search/id?id=99",
            "/v1/search/path?path=99",
            "/v1/search/id",
            "/v1/search/path?path=",
            "/page/images?start=-1",
            "/page/images?order=worst",
            f"/page/images?text={'x' * 201}",
            "/page/images?class_number=-1",
            "/page/confusions/0/3",
            "/page/confusions/-1/0",
            "/page/map/nothing",
            "/nothing",
        ],
    )
    def test_invalid_request_is_one_line(self, client: TestClient, path: str) -> None:
        answer = client.get(path)
        assert answer.status_code in (404, 422)
        assert set(answer.json()) == {"error"}
        assert "\n" not in answer.json()["error"]

    def test_missing_umap_says_what_to_install(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(responses, "layouts", lambda: {"umap": "pip install umap-learn"})
        rejected = client.post("/page/jobs/umap")
        assert (rejected.status_code, rejected.json()["error"]) == (
            409,
            "umap is not installed: pip install umap-learn",
        )

    def test_results_before_the_job_is_done(self, colors: Space) -> None:
        client = TestClient(create_app(colors), base_url="http://127.0.0.1")  # no job has started
        for path in (
            "/page/images?order=rank",
            "/page/confusions",
            "/page/confusions/0/1",
            "/page/right",
            "/page/map/pca",
        ):
            assert client.get(path).status_code == 409


class TestLoopback:
    @pytest.mark.parametrize("path", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "red/0.jpg"])
    def test_paths_in_requests_open_no_file(self, client: TestClient, path: str) -> None:
        for prefix in ("/page/thumbnails/", "/page/images/", "/"):
            answer = client.get(prefix + path)
            assert answer.status_code in (404, 422)
            assert "root:" not in answer.text

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::2]:80"])
    def test_other_host_names_are_rejected(self, client: TestClient, host: str) -> None:
        rejected = client.get("/page/space", headers={"host": host})
        assert rejected.status_code == 403
        assert "only for 127.0.0.1" in rejected.json()["error"]

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8765", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8765"])
    def test_loopback_names_are_accepted(self, client: TestClient, host: str) -> None:
        assert client.get("/page/space", headers={"host": host}).status_code == 200

    def test_other_origins_are_rejected(self, client: TestClient) -> None:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:9999"):
            rejected = client.post("/v1/embed", content=encoded_image(), headers={"origin": origin})
            assert rejected.status_code == 403
        assert client.post("/page/jobs/pca", headers={"origin": "http://127.0.0.1:8765"}).status_code == 200

    def test_security_headers(self, client: TestClient) -> None:
        for path in ("/", "/page/space", "/page/thumbnails/0", "/nothing"):
            headers = client.get(path).headers
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_other_sites_may_only_link(self, client: TestClient, site: str) -> None:
        seen = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
        for path in ("/page/thumbnails/0", "/page/space", "/"):
            assert client.get(path, headers=seen).status_code == 403
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
        assert client.get("/", headers=link).status_code == 200
        assert client.get("/page/thumbnails/0", headers=link).status_code == 403

    @pytest.mark.parametrize("site", ["none", "same-origin"])
    def test_own_requests_are_accepted(self, client: TestClient, site: str) -> None:
        assert client.get("/page/thumbnails/0", headers={"sec-fetch-site": site}).status_code == 200

    def test_no_pages_with_external_scripts(self, client: TestClient) -> None:
        for path in ("/docs", "/redoc"):
            assert client.get(path).status_code == 404


TOKEN = "the-token"


@pytest.fixture
def network_client(colors: Space) -> TestClient:
    return TestClient(
        create_app(colors, token=TOKEN, local=False), base_url="http://machine.lan:8765", follow_redirects=False
    )


class TestToken:
    @pytest.mark.parametrize(
        "path", ["/", "/page/space", "/page/thumbnails/0", "/page/images/0", "/nothing", "/?token="]
    )
    def test_missing_token_is_rejected(self, network_client: TestClient, path: str) -> None:
        rejected = network_client.get(path)
        assert (rejected.status_code, list(rejected.json())) == (401, ["error"])
        assert "a token is needed" in rejected.json()["error"]
        assert TOKEN not in rejected.text

    @pytest.mark.parametrize("wrong", ["x", TOKEN[:-1], TOKEN + "x", "caf\u00e9", "%ff"])
    def test_wrong_token_is_rejected(self, network_client: TestClient, wrong: str) -> None:
        rejected = network_client.get(f"/?token={wrong}")
        assert rejected.status_code == 401
        assert not rejected.cookies

    def test_token_becomes_a_cookie(self, network_client: TestClient) -> None:
        answer = network_client.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert network_client.get("/").status_code == 200
        assert network_client.get("/page/thumbnails/0").status_code == 200
        assert network_client.post("/v1/embed", content=encoded_image()).status_code == 200

    def test_token_in_the_url_opens_only_the_page(self, network_client: TestClient) -> None:
        assert network_client.get(f"/page/space?token={TOKEN}").status_code == 401
        assert network_client.post(f"/page/jobs/pca?token={TOKEN}").status_code == 401

    def test_another_server_has_another_cookie(self, network_client: TestClient, colors: Space) -> None:
        network_client.get(f"/?token={TOKEN}")
        other = TestClient(create_app(colors, token=TOKEN, local=False), base_url="http://machine.lan:8766")
        other.cookies = network_client.cookies
        assert other.get("/page/space").status_code == 401

    def test_other_sites_are_rejected_with_the_token(self, network_client: TestClient) -> None:
        network_client.get(f"/?token={TOKEN}")
        assert network_client.post("/page/jobs/pca", headers={"origin": "http://evil.example"}).status_code == 403
        assert network_client.get("/page/space", headers={"sec-fetch-site": "cross-site"}).status_code == 403


async def send_upload(app: FastAPI, receive: Callable) -> list[dict]:
    """The messages of the response to an upload whose parts `receive` returns."""
    headers, sent = [(b"host", b"127.0.0.1"), (b"content-length", b"1000")], []
    scope = {"type": "http", "method": "POST", "path": "/v1/embed", "query_string": b"", "headers": headers}

    async def send(message: dict) -> None:
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), 60)
    return sent


class TestLimits:
    def test_uploads_share_a_forward_pass_within_limits(self, colors: Space, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded, most, batches, lock, encode = 0, 0, [], threading.Lock(), colors.encoder.encode_crops

        def counted(contents: bytes) -> Image.Image:
            nonlocal decoded, most
            with lock:
                decoded += 1
                most = max(most, decoded)
            time.sleep(0.005)
            with lock:
                decoded -= 1
            return read_upload(contents)

        def batched(crops: Sequence[np.ndarray]) -> np.ndarray:
            batches.append(len(crops))
            time.sleep(0.1)
            return encode(crops)

        colors.encoder.encode_crops = batched
        monkeypatch.setattr(api, "read_upload", counted)
        with TestClient(create_app(colors), base_url="http://127.0.0.1") as client, ThreadPoolExecutor(20) as pool:
            sent = [pool.submit(client.post, "/v1/embed", content=encoded_image()) for _ in range(20)]
            assert [each.result().status_code for each in sent] == [200] * 20
        assert most == api.MAX_DECODED
        assert sum(batches) == 20
        assert 2 <= max(batches) <= api.MAX_CROPS

    def test_client_that_goes_away_is_no_error(self, colors: Space) -> None:
        async def receive() -> dict:
            return {"type": "http.disconnect"}

        sent = asyncio.run(send_upload(create_app(colors), receive))
        assert sent[0]["status"] == 400

    def test_upload_that_never_arrives(self, colors: Space, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(api, "UPLOAD_SECONDS", 0.05)
        asked = 0

        async def receive() -> dict:
            nonlocal asked
            asked += 1
            if asked == 1:
                return {"type": "http.request", "body": b"begin", "more_body": True}
            return await asyncio.Event().wait()

        assert asyncio.run(send_upload(create_app(colors), receive))[0]["status"] == 408

    def test_huge_image_is_a_tile(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoding, "MAX_PIXELS", 300 * 200 - 1)
        answer = client.get("/page/thumbnails/4")
        assert answer.headers["content-type"] == "image/svg+xml"
        assert "too large" in answer.text


def test_other_host_needs_the_printed_token(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []

    def serve(app: object, listening: socket.socket, ready: Callable[[], None]) -> None:
        served.append(app)
        ready()

    monkeypatch.setattr(connections, "serve", serve)
    browse(str(photos / "vectors.npz"), data=photos / "photos", host="0.0.0.0", port=0, open=False)
    browse(str(photos / "vectors.npz"), data=photos / "photos", port=0, open=False)
    on_network, local = re.findall(r"http://(\S+)", capsys.readouterr().out)
    host, token = on_network.split("/?token=")
    assert host.startswith("0.0.0.0:")
    assert len(token) >= 40
    assert "token" not in local
    client = TestClient(served[0], base_url=f"http://{host}")
    assert client.get("/page/space").status_code == 401
    assert client.get(f"/?token={token}").status_code == 200
    assert client.get("/page/space").status_code == 200
    assert TestClient(served[1], base_url="http://127.0.0.1").get("/page/space").status_code == 200


def test_token_is_not_in_the_command_line_of_the_browser(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, texts, contents = threading.Event(), [], []

    def open_browser(address: str) -> None:
        texts.append(address)
        file = Path(url2pathname(urlsplit(address).path))
        contents.append((file.read_text(), stat.S_IMODE(file.parent.stat().st_mode), file))
        opened.set()

    def serve(app: object, listening: socket.socket, ready: Callable[[], None]) -> None:
        ready()
        opened.wait(10)

    monkeypatch.setattr(connections, "serve", serve)
    monkeypatch.setattr(guards, "new_token", lambda: TOKEN)
    monkeypatch.setattr("webbrowser.open", open_browser)
    browse(str(photos / "vectors.npz"), host="0.0.0.0", port=0)
    [(text, mode, file)] = contents
    assert TOKEN not in texts[0]
    assert f"/?token={TOKEN}" in text
    assert mode == 0o700
    assert not file.exists()  # it ends with the server


def test_invalid_or_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="try another --port") as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="port from 0 to 65535, got 70000"):
        listen("127.0.0.1", 70000)
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.9"):
        listen("203.0.113.9", 0)
