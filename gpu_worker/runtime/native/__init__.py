"""The CPU's own forward: one C file, compiled on the machine that runs it, and optional everywhere."""
