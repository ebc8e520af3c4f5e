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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from proxygml.cli.browse import browse
from proxygml.data import decoding
from proxygml.embeddings import Embeddings
from proxygml.server import connections, guards, responses, server
from proxygml.server import map as maps
from proxygml.server.connections import listen
from proxygml.server.images import SIDES, Thumbnails
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
        about = client.get("/api/space").json()
        assert (about["images"], about["dimensions"], about["classes"]) == (12, 2, ["red", "green", "blue"])
        assert (about["sizes"], about["examples"]) == ([4, 4, 4], [0, 4, 8])
        assert about["unit"]
        assert about["upload"]
        assert about["proxies"] is None
        classes = np.frombuffer(client.get("/api/classes").content, "<i4")
        np.testing.assert_array_equal(classes, np.repeat([0, 1, 2], 4))

    def test_image_with_its_neighbors(self, client: TestClient) -> None:
        answer = client.get("/api/images/3?count=5").json()  # a red one among the green
        assert answer["path"] == "red/3.jpg"
        assert [entry["right"] for entry in answer["nearest"][:3]] == [False] * 3
        assert {entry["class"] for entry in answer["nearest"][:3]} == {1}
        closest = answer["nearest"][0]
        angles = {3: 1.05, 4: 1.0, 5: 1.1, 6: 1.2}
        assert closest["similarity"] == pytest.approx(np.cos(angles[3] - angles[closest["number"]]), abs=1e-5)
        assert len(answer["nearest"]) == 5
        assert answer["subgraph"] is None
        assert len(client.get("/api/images/3").json()["nearest"]) == 11

    def test_list_of_images(self, client: TestClient) -> None:
        assert client.get("/api/images?count=5&start=10").json()["total"] == 12
        assert [e["number"] for e in client.get("/api/images?count=5&start=10").json()["images"]] == [10, 11]
        assert [e["path"] for e in client.get("/api/images?text=green/2").json()["images"]] == ["green/2.jpg"]
        assert client.get("/api/images?class_number=2").json()["total"] == 4
        assert client.get("/api/images?class_number=99").json()["total"] == 0
        for order in ("rank", "fraction"):
            worst = [entry["number"] for entry in client.get(f"/api/images?order={order}").json()["images"]]
            assert set(worst[:2]) == {3, 7}
            of_green = client.get(f"/api/images?order={order}&class_number=1").json()["images"]
            assert of_green[0]["number"] == 7
            assert of_green[0]["first_right"] > 3

    def test_confusions(self, client: TestClient) -> None:
        pairs = client.get("/api/confusions").json()
        assert {(pair["first"], pair["second"]) for pair in pairs[:2]} == {(0, 1), (1, 2)}
        confused = client.get("/api/confusions/0/1").json()
        assert confused["total"] == pairs[0]["count"] == len(confused["pairs"])
        assert pairs[0]["neighbors"] == 2 * 4 * 3
        assert pairs[0]["fraction"] == pytest.approx(pairs[0]["count"] / 24)
        assert {confused["pairs"][0]["image"]["class"], confused["pairs"][0]["neighbor"]["class"]} == {0, 1}
        right = np.frombuffer(client.get("/api/right").content, np.uint8)
        assert client.get("/api/jobs").json()["failures"]["recall_at_1"] == pytest.approx(right.mean())

    def test_map(self, client: TestClient) -> None:
        points = np.frombuffer(client.get("/api/map/pca").content, "<f4").reshape(-1, 2)
        assert points.shape == (12, 2)
        assert np.abs(points).max() == pytest.approx(1)

    def test_tsne_runs_as_a_job(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(maps, "run_in_process", lambda layout, vectors, report: vectors)
        assert client.get("/api/map/tsne").status_code == 409
        assert client.post("/api/jobs/tsne").json()["state"] == "running"
        client.app.state.responses.jobs["tsne"].wait()
        assert client.get("/api/jobs").json()["tsne"]["state"] == "done"
        assert len(client.get("/api/map/tsne").content) == 12 * 8

    def test_upload(self, client: TestClient) -> None:
        answer = client.post("/api/uploads?count=3", content=encoded_image("blue", kind="WEBP")).json()
        assert answer["size"] == [40, 30]
        assert all("right" not in entry for entry in answer["nearest"])
        assert answer["nearest"][0]["path"] == "blue/0.jpg"
        assert len(answer["nearest"]) == 3
        votes = {
            "blue": 4,
            "green": 4,
            "red": 2,
        }  # of the ten nearest; the nearer of equals is first
        assert [(["red", "green", "blue"][v["class"]], v["count"]) for v in answer["votes"]] == list(votes.items())
        assert answer["nearest"][0]["similarity"] == pytest.approx(1, abs=1e-5)

    def test_proxies(self) -> None:
        rng = np.random.default_rng(0)
        rows = Embeddings(rng.normal(size=(8, 4)), np.repeat([5, 6], 4), np.arange(8).astype(str))
        proxies = Proxies(rng.normal(size=(3, 2, 4)).astype(np.float32), tuple("xyz"), np.array([6, 9, 5]), 4, 4.0)
        with TestClient(create_app(Space("s", rows, proxies=proxies)), base_url="http://localhost") as client:
            assert client.get("/api/space").json()["proxies"] == {
                "classes": ["x", "y", "z"],
                "per_class": 2,
                "links": 4,
                "image_classes": [1, -1, 0],
            }
            graph = client.get("/api/images/0").json()["subgraph"]
            assert graph["own_class"] == 2
            assert {4, 5} <= set(graph["linked"])
            assert sum(entry["probability"] for entry in graph["active_classes"]) == pytest.approx(1, abs=1e-5)
            assert sum(entry["links"] for entry in graph["active_classes"]) == 4
            client.app.state.responses.jobs["pca"].wait()
            assert len(client.get("/api/map/pca").content) == (8 + 6) * 8


class TestThumbnails:
    def test_size(self, client: TestClient) -> None:
        for side in SIDES:
            answer = client.get(f"/thumbnails/4?side={side}")
            with Image.open(io.BytesIO(answer.content)) as image:
                assert max(image.size) == min(side, 300)
                assert image.size[0] / image.size[1] == pytest.approx(1.5, abs=0.02)
                assert np.asarray(image.convert("RGB")).mean(axis=(0, 1)).argmax() == 1
            assert answer.headers["content-type"] in ("image/jpeg", "image/png")

    def test_missing_or_damaged_file_is_a_gray_tile(self, client: TestClient, photos: Path) -> None:
        (photos / "photos/red/1.jpg").unlink()
        (photos / "photos/red/2.jpg").write_bytes(b"\xff\xd8 not a photo any more")
        for number, text in [(1, "the file is gone"), (2, "cannot be read")]:
            answer = client.get(f"/thumbnails/{number}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml")
            assert text in answer.text
            assert len(client.get(f"/api/images/{number}").json()["nearest"]) == 11
        (photos / "photos/red/1.jpg").write_bytes(encoded_image("red", kind="JPEG"))
        assert client.get("/thumbnails/1").headers["content-type"] != "image/svg+xml"  # it came back

    @pytest.mark.timeout(20)
    def test_pipe_is_a_gray_tile(self, client: TestClient, photos: Path) -> None:
        (photos / "photos/red/1.jpg").unlink()
        os.mkfifo(photos / "photos/red/1.jpg")  # opening it would block a thread for ever
        assert "cannot be read" in client.get("/thumbnails/1").text

    def test_cache_is_bounded(self, colors: Space) -> None:
        thumbnails = Thumbnails(colors, max_cached=3)
        for number in range(12):
            assert thumbnails.get(number, 96) == thumbnails.get(number, 96)
        info = thumbnails.encoded.cache_info()
        assert (info.hits, info.misses, info.currsize) == (12, 12, 3)
        assert len(thumbnails.get(0, 2048)[0]) == len(thumbnails.get(0, 512)[0])  # it has only 300 pixels
        assert thumbnails.encoded.cache_info().misses == 13  # of the smaller one: full sizes are not kept

    def test_other_sizes_and_numbers_are_rejected(self, client: TestClient) -> None:
        assert client.get("/thumbnails/0?side=100000").status_code == 422
        for number in (12, -1, 10**30):
            assert client.get(f"/thumbnails/{number}").status_code in (404, 422)

    def test_vectors_without_images(self) -> None:
        space = Space("own", Embeddings(np.eye(3), np.arange(3), np.array(["0", "1", "2"])), no_upload="no network")
        with TestClient(create_app(space), base_url="http://127.0.0.1") as client:
            assert not client.get("/api/space").json()["pictures"]
            assert client.get("/thumbnails/0").json() == {"error": "these vectors have no images"}
            rejected = client.post("/api/uploads", content=encoded_image())
            assert (rejected.status_code, rejected.json()) == (409, {"error": "no network"})


class TestInvalidInput:
    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            (b"", "the file is empty"),
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
        answer = client.post("/api/uploads", content=contents)
        assert answer.status_code == 415
        assert message in answer.json()["error"]
        assert "\n" not in answer.json()["error"]
        assert client.post("/api/uploads", content=encoded_image()).status_code == 200

    def test_large_upload_is_rejected_early(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "MAX_UPLOAD_BYTES", 2**20)
        read = []

        def endless() -> object:
            for number in range(1000):
                read.append(number)
                yield b"x" * 2**16

        assert client.post("/api/uploads", content=b"x" * (2**20 + 1)).status_code == 413
        unannounced = client.post("/api/uploads", content=endless())
        assert unannounced.status_code == 413
        assert "larger than 1 MB" in unannounced.json()["error"]

    @pytest.mark.parametrize(
        "path",
        [
            "/api/images/12",
            "/api/images/-1",
            "/api/images/x",
            "/api/images/0?count=0",
            "/api/images/0?count=100000",
            "/api/images?start=-1",
            "/api/images?order=worst",
            f"/api/images?text={'x' * 201}",
            "/api/images?class_number=-1",
            "/api/confusions/0/3",
            "/api/confusions/-1/0",
            "/api/map/nothing",
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
        rejected = client.post("/api/jobs/umap")
        assert (rejected.status_code, rejected.json()["error"]) == (
            409,
            "umap is not installed: pip install umap-learn",
        )

    def test_results_before_the_job_is_done(self, colors: Space) -> None:
        client = TestClient(create_app(colors), base_url="http://127.0.0.1")  # no job has started
        for path in ("/api/images?order=rank", "/api/confusions", "/api/confusions/0/1", "/api/right", "/api/map/pca"):
            assert client.get(path).status_code == 409


class TestLoopback:
    @pytest.mark.parametrize("path", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "red/0.jpg"])
    def test_paths_in_requests_open_no_file(self, client: TestClient, path: str) -> None:
        for prefix in ("/thumbnails/", "/api/images/", "/"):
            answer = client.get(prefix + path)
            assert answer.status_code in (404, 422)
            assert "root:" not in answer.text

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::2]:80"])
    def test_other_host_names_are_rejected(self, client: TestClient, host: str) -> None:
        rejected = client.get("/api/space", headers={"host": host})
        assert rejected.status_code == 403
        assert "only for 127.0.0.1" in rejected.json()["error"]

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8765", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8765"])
    def test_loopback_names_are_accepted(self, client: TestClient, host: str) -> None:
        assert client.get("/api/space", headers={"host": host}).status_code == 200

    def test_other_origins_are_rejected(self, client: TestClient) -> None:
        for origin in ("http://evil.example", "null", "http://127.0.0.1:9999"):
            rejected = client.post("/api/uploads", content=encoded_image(), headers={"origin": origin})
            assert rejected.status_code == 403
        assert client.post("/api/jobs/pca", headers={"origin": "http://127.0.0.1:8765"}).status_code == 200

    def test_security_headers(self, client: TestClient) -> None:
        for path in ("/", "/api/space", "/thumbnails/0", "/nothing"):
            headers = client.get(path).headers
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_other_sites_may_only_link(self, client: TestClient, site: str) -> None:
        seen = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
        for path in ("/thumbnails/0", "/api/space", "/"):
            assert client.get(path, headers=seen).status_code == 403
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
        assert client.get("/", headers=link).status_code == 200
        assert client.get("/thumbnails/0", headers=link).status_code == 403

    @pytest.mark.parametrize("site", ["none", "same-origin"])
    def test_own_requests_are_accepted(self, client: TestClient, site: str) -> None:
        assert client.get("/thumbnails/0", headers={"sec-fetch-site": site}).status_code == 200

    def test_no_api_docs(self, client: TestClient) -> None:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert client.get(path).status_code == 404


TOKEN = "the-token"


@pytest.fixture
def network_client(colors: Space) -> TestClient:
    return TestClient(create_app(colors, token=TOKEN), base_url="http://machine.lan:8765", follow_redirects=False)


class TestToken:
    @pytest.mark.parametrize("path", ["/", "/api/space", "/thumbnails/0", "/api/images/0", "/nothing", "/?token="])
    def test_missing_token_is_rejected(self, network_client: TestClient, path: str) -> None:
        rejected = network_client.get(path)
        assert (rejected.status_code, list(rejected.json())) == (403, ["error"])
        assert "needs its token" in rejected.json()["error"]
        assert TOKEN not in rejected.text

    @pytest.mark.parametrize("wrong", ["x", TOKEN[:-1], TOKEN + "x", "caf\u00e9", "%ff"])
    def test_wrong_token_is_rejected(self, network_client: TestClient, wrong: str) -> None:
        rejected = network_client.get(f"/?token={wrong}")
        assert rejected.status_code == 403
        assert not rejected.cookies

    def test_token_becomes_a_cookie(self, network_client: TestClient) -> None:
        answer = network_client.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert network_client.get("/").status_code == 200
        assert network_client.get("/thumbnails/0").status_code == 200
        assert network_client.post("/api/uploads", content=encoded_image()).status_code == 200

    def test_token_in_the_url_opens_only_the_page(self, network_client: TestClient) -> None:
        assert network_client.get(f"/api/space?token={TOKEN}").status_code == 403
        assert network_client.post(f"/api/jobs/pca?token={TOKEN}").status_code == 403

    def test_another_server_has_another_cookie(self, network_client: TestClient, colors: Space) -> None:
        network_client.get(f"/?token={TOKEN}")
        other = TestClient(create_app(colors, token=TOKEN), base_url="http://machine.lan:8766")
        other.cookies = network_client.cookies
        assert other.get("/api/space").status_code == 403

    def test_other_sites_are_rejected_with_the_token(self, network_client: TestClient) -> None:
        network_client.get(f"/?token={TOKEN}")
        assert network_client.post("/api/jobs/pca", headers={"origin": "http://evil.example"}).status_code == 403
        assert network_client.get("/api/space", headers={"sec-fetch-site": "cross-site"}).status_code == 403


class TestLimits:
    def test_two_uploads_at_a_time(self, colors: Space) -> None:
        active, most, lock = 0, 0, threading.Lock()
        embed = colors.embed_image

        def counted(image: Image.Image) -> np.ndarray:
            nonlocal active, most
            with lock:
                active += 1
                most = max(most, active)
            time.sleep(0.02)
            with lock:
                active -= 1
            return embed(image)

        colors.embed_image = counted
        with TestClient(create_app(colors), base_url="http://127.0.0.1") as client, ThreadPoolExecutor(6) as pool:
            sent = [pool.submit(client.post, "/api/uploads", content=encoded_image()) for _ in range(6)]
            assert [each.result().status_code for each in sent] == [200] * 6
        assert 1 <= most <= server.MAX_UPLOADS

    def test_upload_that_never_arrives(self, colors: Space, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "UPLOAD_SECONDS", 0.05)
        app, sent = create_app(colors), []
        headers = [(b"host", b"127.0.0.1"), (b"content-length", b"1000")]
        scope = {"type": "http", "method": "POST", "path": "/api/uploads", "query_string": b"", "headers": headers}
        asked = 0

        async def receive() -> dict:
            nonlocal asked
            asked += 1
            if asked == 1:
                return {"type": "http.request", "body": b"begin", "more_body": True}
            return await asyncio.Event().wait()

        async def send(message: dict) -> None:
            sent.append(message)

        asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
        assert sent[0]["status"] == 408

    def test_huge_image_is_a_tile(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoding, "MAX_PIXELS", 300 * 200 - 1)
        answer = client.get("/thumbnails/4")
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
    assert client.get("/api/space").status_code == 403
    assert client.get(f"/?token={token}").status_code == 200
    assert client.get("/api/space").status_code == 200
    assert TestClient(served[1], base_url="http://127.0.0.1").get("/api/space").status_code == 200


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
