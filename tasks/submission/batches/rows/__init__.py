"""Rows, before they are tasks, and a row's result. Each line may import what stands below it.

sorting   rows in another order: those that begin alike together, or the longest first
row_types  a row's form: the tasks that it becomes
output_lines  a row's result: how its task has ended, and its line in the output
sources   rows of files, tables and iterables, read lazily
template  a prompt with columns
frames    the rows of frames, tables and data sets; values as JSON has them
pages     what the pages of a Parquet file would take in memory
output_files  these lines as JSONL, CSV or Parquet
formats   the formats of files, by their names
"""
