"""Runs in these tests draw no plots."""

from tests.run.conftest import quick_picture

__all__ = ["quick_picture"]
