"""Fixtures: runs in these tests draw no pictures."""

from tests.run.conftest import quick_picture

__all__ = ["quick_picture"]
