"""Doubles and real servers for the tests."""
