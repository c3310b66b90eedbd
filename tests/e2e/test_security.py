"""The least that a worker needs of Redis is enough, and its password is in no log."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path

import pytest
from celery import Celery
from support.fake_engine import expected
from support.site import REPOSITORY, Site, eventually

from tasks.app import configuration
from tasks.connections import connect
from tasks.settings import Settings

SECRET = "s3cret-word"


def documented_acl() -> list[str]:
    """The rules of docs/security.md."""
    text = (REPOSITORY / "docs" / "security.md").read_text()
    rules = text.split("```acl\n")[1].split("```")[0]
    return rules.replace("\\\n", " ").replace("PASSWORD", SECRET).split()[2:]


def test_the_documented_acl_is_enough(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_DRAIN_SECONDS=0, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        site.redis.execute_command("ACL", "SETUSER", "petiole", *documented_acl())
        site.redis.execute_command("ACL", "SETUSER", "default", "off")
        url = f"redis+socket://petiole:{SECRET}@{site.server.socket}?virtual_host=0"
        site.environment["PETIOLE_BROKER_URL"] = url
        site.app = Celery("petiole", set_as_current=False)
        site.app.conf.update(configuration(Settings(broker_url=url)))
        site.redis = connect(url)
        first = site.worker()
        result = site.generate("allowed", max_tokens=400, seed=1)
        site.redis.lpush("petiole", b"garbage")
        eventually(lambda: site.redis.llen("petiole:quarantine"), "quarantined")
        first.signal(signal.SIGTERM)
        first.ended()
        second = site.worker()
        assert site.get(result)["token_ids"] == expected("allowed", 1, 400)
        assert "NOPERM" not in first.output + second.output
        assert SECRET not in first.output + second.output


def test_pickle_is_never_read(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    marker = site.folder / "executed"
    pickled = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    site.redis.lpush(
        "petiole",
        json.dumps(
            {
                "body": base64.b64encode(pickled).decode(),
                "content-type": "application/x-python-serialize",
                "content-encoding": "binary",
                "headers": {"task": "tasks.generate", "id": "pickled"},
                "properties": {
                    "delivery_info": {"exchange": "", "routing_key": "petiole"},
                    "body_encoding": "base64",
                    "delivery_tag": "1",
                },
            }
        ),
    )
    with pytest.raises(ValueError, match="body cannot be decoded"):
        site.get(site.app.AsyncResult("pickled"))
    assert not marker.exists()
    assert worker.alive()
