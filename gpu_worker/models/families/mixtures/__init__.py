"""Decoders that exist only with experts."""
