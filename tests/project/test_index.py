"""docs/embeddings.md: the examples of an index are run as they are printed, on petiole-tiny-embed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from petiole.tasks.commands.demos.search import PASSAGES
from tests.project.test_examples import examples
from tests.support.client import printed
from tests.support.site import Site

OF_A_FILE, OF_A_TABLE = 3, 4
MODELS = """
from django.db import models
from pgvector.django import VectorField

class Article(models.Model):
    text = models.TextField()
    vector = VectorField(dimensions=128, null=True)

    class Meta:
        app_label = "help"
"""
PROJECT = """
import sys
import django
from django.conf import settings

host, port, name, asked, *passages = sys.argv[1:]
engine = {"ENGINE": "django.db.backends.postgresql", "HOST": host, "PORT": port, "NAME": name, "USER": "postgres"}
settings.configure(DATABASES={"default": engine}, INSTALLED_APPS=["help"])
django.setup()
from django.db import connection
from help.models import Article
with connection.cursor() as cursor:
    cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
with connection.schema_editor() as editor:
    editor.create_model(Article)
try:
    Article.objects.bulk_create(Article(text=text) for text in passages)
    import petiole
    vectors = petiole.Vectors.of(petiole.embed.delay(texts=[asked], prompt_name="query").get())
    names = {"embed": petiole.embed, "asked": vectors.numpy()}
    exec(open("example.py").read(), names)
    print([article.text for article in names["nearest"]])
    assert not Article.objects.filter(vector=None).exists()
finally:
    with connection.schema_editor() as editor:
        editor.delete_model(Article)
"""


def run(folder: Path, *command: str) -> str:
    """What a producer prints, beside a worker."""
    engine = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}
    with Site(folder, **engine, PETIOLE_MODEL="petiole-tiny-embed") as site:
        site.worker()
        return printed(site, *command, folder=folder)


def test_an_index_of_a_parquet_file_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": list(PASSAGES)}), str(tmp_path / "help.parquet"))
    shown = run(tmp_path, "-c", examples("docs/embeddings.md")[OF_A_FILE])
    assert PASSAGES[0] in shown, "the passage about refunds is among the three that are found"


def test_an_index_of_a_django_table_is_searched(tmp_path: Path) -> None:
    """TEST_POSTGRES: host:port:name of a database with pgvector, of its user postgres."""
    for package in ("django", "pgvector.django", "psycopg"):
        pytest.importorskip(package)
    if not (server := os.environ.get("TEST_POSTGRES")):
        pytest.skip("TEST_POSTGRES names no database")
    (tmp_path / "help").mkdir()
    (tmp_path / "help" / "__init__.py").touch()
    (tmp_path / "help" / "models.py").write_text(MODELS)
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "example.py").write_text(examples("docs/embeddings.md")[OF_A_TABLE])
    shown = run(tmp_path, "project.py", *server.split(":"), "How do I get my money back?", *PASSAGES)
    assert PASSAGES[0] in shown, "the passage about refunds is among the three that are found"
