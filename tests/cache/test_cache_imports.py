"""The bottom floor of the house: numpy and xxhash, nothing above."""

import subprocess
import sys

import pytest

from petiole import cache
from petiole.cache import (
    BlockCache,
    CacheValueError,
    NoPrefixCache,
    PageTable,
    RadixPrefixCache,
    build_prefix_cache,
)


def test_the_package_imports_without_torch_celery_or_the_floors_above() -> None:
    program = (
        "import sys; from petiole import cache; "
        "bad = {'torch', 'celery', 'kombu', 'redis', 'gpu_worker', 'tasks', 'pydantic'} & set(sys.modules); "
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_everything_promised_is_there() -> None:
    assert all(hasattr(cache, name) for name in cache.__all__)


def test_the_cache_is_chosen_by_name() -> None:
    assert isinstance(build_prefix_cache("radix", PageTable(10)), RadixPrefixCache)
    assert isinstance(build_prefix_cache("block", PageTable(10, 16)), BlockCache)
    assert isinstance(build_prefix_cache("off", PageTable(10, 5)), NoPrefixCache)
    with pytest.raises(CacheValueError, match="radix, block, off, got 'lru'"):
        build_prefix_cache("lru", PageTable(10))  # type: ignore[arg-type]
