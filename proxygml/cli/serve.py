"""proxygml serve."""

import os
from pathlib import Path
from typing import Annotated

import tyro

from proxygml.cli.options import AS_TRAINED, Hardware
from proxygml.display import counted, output, show_progress
from proxygml.training.recipe import Split


def serve(
    index: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX|RUN|NPZ")],
    run: Path | None = None,
    split: Split = "all",
    data: Path | None = None,
    hardware: Hardware = AS_TRAINED,
    host: str = "127.0.0.1",
    port: int = 8766,
) -> None:
    """Serve an HTTP API that embeds images, searches, and adds and removes items: `proxygml serve my-index`.

    Every request needs the token in PROXYGML_TOKEN, or else one that is printed; without it, this machine can only
    search. Concurrent requests share a forward pass or a search. Ctrl-C ends the server.

    Args:
        index: An index, by its folder or its address postgresql://...; or a run or an .npz, which do not change.
        run: The run that embeds images, if the index does not contain its network.
        split: Training images, test images or all images of a run.
        data: Folder of the run's images, if they have moved.
        hardware: What embeds images.
        host: Address to listen on, without encryption.
        port: Port to listen on; 0 takes a free one.
    """
    from proxygml.optional import library

    for name in ("fastapi", "uvicorn"):
        library(name, extra="browse", user="serve")
    from proxygml.server.connections import address, listen
    from proxygml.server.connections import serve as serve_app
    from proxygml.server.guards import LOOPBACK, check_token, new_token
    from proxygml.server.opening import open_items
    from proxygml.server.server import create_app

    chosen = os.environ.get("PROXYGML_TOKEN", "")
    token = check_token(chosen) if chosen else new_token()
    with listen(host, port) as listening:
        with show_progress() as progress:
            items = open_items(index, run=run, split=split, data=data, load=hardware.load, progress=progress)

        def ready() -> None:
            vectors = f"{counted(len(items), 'vector')} of {counted(items.dim, 'dimension')}"
            output.print(f"{vectors}: {address(listening)}/v1 (Ctrl-C ends it)")
            if not chosen:
                output.print(f"token: {token}")

        serve_app(create_app(items, token=token, local=host in LOOPBACK), listening, ready)
