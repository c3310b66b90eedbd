"""Decoders whose norms take the mean away, with learned positions or with parallel layers."""
