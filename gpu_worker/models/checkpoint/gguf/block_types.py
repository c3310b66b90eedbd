"""Types of tensors in GGUF files: their names and the sizes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""ggml's types by number."""


@dataclass(frozen=True, slots=True)
class Type:
    """A block holds this many values in this many bytes."""

    values: int
    n_bytes: int
    quantised: bool = True


TYPES = {
    "F32": Type(1, 4, quantised=False),
    "F16": Type(1, 2, quantised=False),
    "BF16": Type(1, 2, quantised=False),
    "Q4_0": Type(32, 18),
    "Q4_1": Type(32, 20),
    "Q5_0": Type(32, 22),
    "Q5_1": Type(32, 24),
    "Q8_0": Type(32, 34),
    "Q2_K": Type(256, 84),
    "Q3_K": Type(256, 110),
    "Q4_K": Type(256, 144),
    "Q5_K": Type(256, 176),
    "Q6_K": Type(256, 210),
    "IQ1_S": Type(256, 50),
    "IQ1_M": Type(256, 56),
    "IQ2_XXS": Type(256, 66),
    "IQ2_XS": Type(256, 74),
    "IQ2_S": Type(256, 82),
    "IQ3_XXS": Type(256, 98),
    "IQ3_S": Type(256, 110),
    "IQ4_NL": Type(32, 18),
    "IQ4_XS": Type(256, 136),
    "TQ1_0": Type(256, 54),
    "TQ2_0": Type(256, 66),
    "MXFP4": Type(32, 17),
    "NVFP4": Type(64, 36),
}
"""The types that are read."""
