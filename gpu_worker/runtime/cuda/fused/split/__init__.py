"""Decode attention over rows that are cut into pieces along their keys. See `attention.split`.

pieces   where rows are cut, and what a launch reads; without Triton
attend   the kernels
"""
