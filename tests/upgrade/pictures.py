"""What a version leaves of tasks about images, when its worker dies: `recording` for models that see.

Record it with the version that is about to be released, from the repository:

    python -m tests.upgrade.pictures tests/upgrade/recorded/pictures/VERSION.json

The model has drawn weights, the same in every version, and never ends by itself.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from bench.harness.checkpoints.decoders import write_tokenizer
from tests.support.moondream import weights
from tests.support.site import REPOSITORY, Site, eventually
from tests.upgrade.recording import Recording, dump

SHAPE: dict[str, Any] = {
    "text": {
        "dim": 128,
        "ff_dim": 256,
        "n_layers": 2,
        "vocab_size": 384,
        "n_heads": 2,
        "n_kv_heads": 2,
        "max_context": 512,
    },
    "vision": {
        "enc_dim": 64,
        "enc_n_layers": 2,
        "enc_ff_dim": 96,
        "enc_n_heads": 4,
        "proj_out_dim": 128,
        "proj_inner_dim": 160,
        "crop_size": 126,
        "max_crops": 4,
        "overlap_margin": 2,
    },
    "region": {"dim": 128, "coord_feat_dim": 32, "size_feat_dim": 64, "inner_dim": 96},
    "tokenizer": {
        "templates": {
            "caption": {"short": [1, 20, 2, 21, 3], "normal": [1, 20, 2, 22, 3], "long": [1, 20, 2, 23, 3]},
            "query": {"prefix": [1, 24, 2], "suffix": [3]},
            "detect": {"prefix": [1, 25, 26, 2], "suffix": [3]},
            "point": {"prefix": [1, 27, 2], "suffix": [3]},
        }
    },
}
CALLS: dict[str, dict[str, Any]] = {
    "query": {"question": "How many?", "max_tokens": 60, "temperature": 0.5, "seed": 7},
    "caption": {"length": "long", "max_tokens": 60, "temperature": 0.5, "seed": 7},
    "point": {"object": "car", "max_objects": 30},
    "detect": {"object": "car", "max_objects": 20},
}
SHORT: dict[str, dict[str, Any]] = {
    "query": {"max_tokens": 4},
    "caption": {"max_tokens": 4},
    "point": {"max_objects": 2},
    "detect": {"max_objects": 2},
}
PRODUCER = """
import json, sys
from petiole import caption, detect, point, put_image, query

prefix, calls = sys.argv[1], json.loads(sys.argv[2])
image = open(sys.argv[3], "rb").read()
tasks = {"query": query, "caption": caption, "point": point, "detect": detect}
for name, options in calls.items():
    given = put_image(image) if name in ("caption", "detect") else image
    tasks[name].apply_async(kwargs={"image": given, **options}, task_id=f"{prefix}-{name}")
"""


def write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = weights(SHAPE)
    tensors["text.lm_head.bias"][0] = -1000.0  # the end
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["HfMoondream"], "config": SHAPE}))
    write_tokenizer(SHAPE["text"]["vocab_size"], folder)
    return folder


def image() -> bytes:
    """A PNG file whose bytes follow from no library: they decide under which handle it is kept."""
    size = 60
    rows = b"".join(
        b"\0" + bytes(value for x in range(size) for value in (4 * x, 4 * y, 255 * (x // 20 == y // 20)))
        for y in range(size)
    )
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def seeing_site(folder: Path, **more: Any) -> Site:
    """Leases outlive the recording: no worker takes over what another has left."""
    settings = {
        "PETIOLE_ENGINE_FACTORY": "tests.support.mortal_engine:FallingEngine",
        "FALLS": len(CALLS),
        "PETIOLE_VISIBILITY_TIMEOUT_S": 60,
        "PETIOLE_MODEL": write_model(folder / "model"),
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_DTYPE": "float32",
        "PETIOLE_NUM_PAGES": 4000,
        "PETIOLE_NUM_THREADS": 1,
        "PETIOLE_STREAM_INTERVAL_MS": 0,
    }
    return Site(folder, **settings | more)


def send(site: Site, prefix: str, calls: dict[str, dict[str, Any]] = CALLS) -> None:
    """By a producer of this version: half of the tasks with a handle."""
    path = site.folder / "image.png"
    path.write_bytes(image())
    environment = {**os.environ, **site.environment, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PRODUCER, prefix, json.dumps(calls), str(path)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)


def record(site: Site) -> Recording:
    """All skills: finished, in the middle when their worker dies, and queued behind it."""
    worker = site.worker()
    send(site, "finished", {name: {**CALLS[name], **SHORT[name]} for name in CALLS})
    for name in CALLS:
        site.get(site.app.AsyncResult(f"finished-{name}"))
    eventually(
        lambda: b'"finished":{"' in site.redis.hget("petiole:workers", worker.node), "a report of what ended"
    )
    send(site, "fall")
    eventually(lambda: not worker.alive(), "the worker dies")
    send(site, "queued")
    text = json.dumps(dump(site.redis), ensure_ascii=False).replace(str(site.folder), "folder")
    recording: Recording = json.loads(text)
    return recording


def main(path: str) -> None:
    with tempfile.TemporaryDirectory(prefix="petiole-") as folder, seeing_site(Path(folder)) as site:
        lines = [json.dumps(entry, ensure_ascii=False) for entry in record(site)]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
