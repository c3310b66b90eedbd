"""Paged attention: one implementation for each kind of device, all behind `models.decoder.Attention`."""
