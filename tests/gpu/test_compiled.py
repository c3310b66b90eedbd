"""What the compiler makes of the project's Triton kernels for each card: what would be slow or wrong there shows.

The limits are what the kernels need now (Triton 3.6 to 3.9), with some room for another compiler.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trials import rest

if importlib.util.find_spec("triton") is None:  # not imported: another module settles first what it is to do
    pytest.skip("Triton is not installed", allow_module_level=True)

REGISTERS = 65_536
"""Of a multiprocessor."""

SHARED = {80: 164, 86: 100, 89: 100, 90: 228}
"""KiB of a multiprocessor, of which each block takes one more than it asks for."""


WITH_ALL = [(90, "few"), (90, "all"), (80, "few"), (86, "few"), (89, "few")]


@pytest.fixture(scope="module", params=rest([(one,) for one in WITH_ALL]), ids=str)
def compiled(request):
    """The architecture, and what was compiled for it, once for each change: Triton keeps what it has compiled."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("Triton brings its assembler for Linux on x86-64")
    architecture, which = request.param
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiling", "--for", str(architecture), *["--few"] * (which == "few")],
        cwd=Path(__file__).parent.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return architecture, json.loads(run.stdout)[str(architecture)]


@pytest.fixture(scope="module")
def kernels(compiled):
    return compiled[1]


@pytest.fixture(scope="module")
def on_hopper(compiled):
    if compiled[0] < 90:
        pytest.skip("measured on Hopper alone")
    return compiled[1]


def named(kernels, *begin):
    found = {name: kernel for name, kernel in kernels.items() if name.startswith(begin)}
    assert found
    return found


def test_every_kernel_compiles_and_keeps_its_values_in_registers(kernels):
    """But for four, of which some compilers keep a few bytes a thread in the cache."""
    spilled = {name: kernel["stack"] for name, kernel in kernels.items() if kernel["stack"]}
    few = {"pick": 32, "product": 32, "coded_product": 16, "grouped_product": 96}
    assert all(n <= few.get(name.split()[0], 0) for name, n in spilled.items()), spilled


EARLY = (
    *("attend", "merge", "begin", "product", "coded_product"),
    *("add_parts", "add_norm", "likeliest", "rotate_and_store"),
)


def test_a_kernel_that_starts_early_touches_no_memory_before_the_one_before_it_has_ended(on_hopper):
    kernels = on_hopper
    waiting = {name for name, kernel in kernels.items() if kernel["waits"]}
    assert waiting == set(named(kernels, *EARLY))
    assert not [name for name, kernel in kernels.items() if kernel["early"]]


def blocks(kernel):
    """How many of its blocks a multiprocessor holds at a time."""
    registers = -(-kernel["registers"] // 8) * 8 * kernel["threads"]
    return min(REGISTERS // registers, (SHARED[90] << 10) // (kernel["shared"] + 1024), 2048 // kernel["threads"])


@pytest.mark.parametrize(
    ("kernel", "least"),
    [
        ("product added", 2),
        ("product in shares", 1),
        ("product", 1),
        ("coded_product int4, narrow, 1 rows", 4),
        ("coded_product int4, middle", 2),
        ("coded_product", 1),
        ("add_norm", 4),
        ("scan", 4),
        ("pick", 1),
        ("rotate_and_store", 8),
        ("attend", 2),
        ("attend of 16 heads of 128, in eight bits", 3),
        ("attend of 32 heads of 128", 3),
        ("merge", 3),
        ("cut", 8),
        ("shrink", 4),
        ("expand", 8),
        ("convolve", 8),
        ("prepare", 24),
        ("gated_rms_norm", 32),
        ("square", 2),
        ("follow", 2),
        ("grouped_product int4, 1 rows", 5),
        ("grouped_product int4, 64 rows", 2),
    ],
)
def test_a_multiprocessor_holds_several_blocks_at_a_time(kernel, least, on_hopper):
    """But of the widest products one, which keeps as many bytes on their way as two of the others."""
    assert min(blocks(found) for found in named(on_hopper, kernel).values()) >= least


def test_a_block_fits_into_the_card(compiled):
    architecture, kernels = compiled
    most = (SHARED[architecture] - 1) << 10
    assert not {name: kernel["shared"] for name, kernel in kernels.items() if kernel["shared"] > most}


@pytest.mark.parametrize(
    ("kernel", "waits", "barriers", "narrow"),
    [("product", 3, 3, 0), ("grouped_product of experts, few", 3, 3, 0), ("attend", 1, 2, 32)],
)
def test_a_loop_reads_sixteen_bytes_at_a_time_and_seldom_waits(kernel, waits, barriers, narrow, kernels):
    """But for the places of pages, of four bytes each."""
    for name, found in named(kernels, kernel).items():
        loop = found["loop"]
        assert loop["narrow"] <= narrow, name
        assert loop["waits"] <= waits, name
        assert loop["barriers"] <= barriers, name


def test_a_block_of_64_outputs_and_more_is_for_warp_groups(on_hopper):
    """Whose instructions follow one another, with one wait for them and one for copies an iteration."""
    for name, found in named(on_hopper, "product in shares").items():
        loop = found["loop"]
        assert 4 <= loop["products"] <= 8, name
        assert loop["waits"] <= 2, name
        assert loop["barriers"] <= 2, name


WITH_MORE = "coded_product gptq", "coded_product nvfp4"
"""Zeros take a product of their own, and groups of 16 inputs have a wait each."""

OF_BYTES = "coded_product int8", "coded_product fp8"
"""For many rows, the compiler copies eight bytes of codes at a time where warp groups multiply."""


def too_much(loop):
    """Which limits of a loop over codes one exceeds. Only scales, of which a thread has a few bytes, are read in
    fewer than 16 bytes; tensor cores are waited for after at least 32 inputs, which are two instructions of a warp
    group."""
    limits = {"copies": 0, "waits": 3 + loop["products"] // 4, "barriers": 5, "narrow": loop["products"] // 4}
    return {name for name, most in limits.items() if loop[name] > most}


def test_loops_over_codes_copy_sixteen_bytes_at_a_time_and_seldom_wait(compiled):
    """But for today's products of four bits, which those in tiles are to replace: they copy eight bytes at a time,
    and on Hopper wait after each instruction."""
    architecture, kernels = compiled
    for name, found in named(kernels, "coded_product").items():
        if not name.startswith(WITH_MORE) and not (name.startswith(OF_BYTES) and "64 rows" in name):
            assert not too_much(found["loop"]), name
    for name, found in named(kernels, "grouped_product int4, 1 rows", "grouped_product int4, 64 rows").items():
        assert too_much(found["loop"]) >= {"copies", *["waits"] * (architecture >= 90)}, name


def test_what_drawing_a_token_costs(kernels, record_property):
    """Instructions of `_scan`'s three branches for each logit of a thread, and of `_pick`, whose machine code
    should stay small enough for a multiprocessor's cache."""
    for name, kernel in named(kernels, "scan").items():
        each = kernel["instructions"] * kernel["threads"] / 4096
        record_property(f"instructions a logit, {name}", each)
        assert each < 140
    for name, kernel in named(kernels, "pick").items():
        record_property(f"instructions, {name}", kernel["instructions"])
        assert kernel["instructions"] < 4000
