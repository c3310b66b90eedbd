"""docs/batch.md: the nightly job of a Django table is run as it is printed. It is killed, and goes on."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.test_batch import journaled
from tests.project.test_examples import examples
from tests.support.client import environment_of, printed
from tests.support.site import Site, eventually

JOB, DAY, ARTICLES = 2, date(2026, 11, 26), 400
SETTINGS = """
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["shop"]
"""
MODELS = """
from django.db import models

class Article(models.Model):
    day = models.DateField()
    text = models.TextField()
    summary = models.TextField(default="")
"""
FILLED = f"""
import datetime
import django
django.setup()
from shop.models import Article
for day in (datetime.date({DAY.year}, {DAY.month}, {DAY.day}), datetime.date.min):
    Article.objects.bulk_create(Article(day=day, text=f"Article {{i}}") for i in range({ARTICLES}))
"""
SHOWN = """
import django
django.setup()
from shop.models import Article
of_day = Article.objects.filter(day="{day}")
print(of_day.exclude(summary="").count(), Article.objects.exclude(summary="").count())
"""


def test_a_nightly_job_that_is_killed_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("django")
    commands = tmp_path / "shop" / "management" / "commands"
    commands.mkdir(parents=True)
    for folder in (commands, *commands.parents[:2]):
        (folder / "__init__.py").touch()
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "shop" / "models.py").write_text(MODELS)
    (commands / "summarize.py").write_text(examples("docs/batch.md")[JOB])
    output = tmp_path / f"summaries-{DAY}.jsonl"
    with Site(tmp_path, PETIOLE_FAKE_STEP_MS=2) as site:
        site.worker()
        settings = {"DJANGO_SETTINGS_MODULE": "settings"}
        python = partial(printed, site, folder=tmp_path, **settings)
        python("-m", "django", "migrate", "--run-syncdb")
        python("-c", FILLED)
        command = ["-m", "django", "summarize", str(DAY)]
        environment = environment_of(site, tmp_path, **settings)
        with subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environment) as killed:
            try:
                eventually(lambda: journaled(tmp_path, output.name) > 20, "rows have ended")
            finally:
                killed.kill()
        assert journaled(tmp_path, output.name) < ARTICLES
        assert not output.exists()
        python(*command)
        assert len(output.read_text().splitlines()) == ARTICLES
        assert python("-c", SHOWN.format(day=DAY)).split() == [str(ARTICLES)] * 2
