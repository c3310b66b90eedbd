"""Rows, before they are tasks. Each line may import what stands below it.

sorting   rows in another order: those that begin alike together, or the longest first
sources   rows of JSONL, CSV and Parquet files and of iterables, read lazily
template  a prompt with columns
"""
