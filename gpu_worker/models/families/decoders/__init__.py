"""Decoders whose layers all attend. Some have siblings with experts, in the same file."""
