"""Collects the notices of a configuration: aliases, keys without effect, and warnings.

A launch line gets one notice per key. A composed configuration of VERL has hundreds of keys, so
many notices about keys of files are combined into one line. `load` uses this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MOST_OF_FILES = 8
"""Maximum number of keys of files that get a notice of their own."""

MOST_NAMED = 12
"""Maximum number of keys in a combined notice."""


class Warned(str):
    """A notice that must be seen: the run does something else than what a setting names."""

    __slots__ = ()


class Notices:
    """The notices of one configuration, without repetitions, in the order in which they came."""

    def __init__(self) -> None:
        self._warnings: dict[str, None] = {}
        self._lines: dict[str, None] = {}
        self._of_files: dict[str, dict[str, str]] = {"aliases": {}, "inert": {}}

    def add(self, texts: Iterable[str], *, in_file: bool = False) -> None:
        """Add notices. Those about values in files count as aliases."""
        for text in texts:
            self._put("aliases", text.partition(" ")[0], text, in_file)

    def warn(self, texts: Iterable[str]) -> None:
        """Add notices that must be seen."""
        self._warnings.update(dict.fromkeys(map(Warned, texts)))

    def alias(self, key: str, ours: str, *, in_file: bool = False) -> None:
        """Add the notice that `key` is another spelling of our key."""
        self._put("aliases", key, f"{key} is an alias of {ours}", in_file)

    def inert(self, key: str, reason: str, *, in_file: bool = False) -> None:
        """Add the notice that `key` has no effect."""
        self._put("inert", key, f"{key} has no effect: {reason}", in_file)

    def _put(self, kind: str, key: str, text: str, in_file: bool) -> None:
        if in_file:
            self._of_files[kind][key] = text
        else:
            self._lines[text] = None

    def lines(self, sections: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield all notices, warnings first; or only those about keys of some sections."""
        yield from (text for text in self._warnings if _is_about(text, sections))
        for kind, found in self._of_files.items():
            notices = {key: text for key, text in found.items() if _is_about(text, sections)}
            if len(notices) <= MOST_OF_FILES:
                yield from notices.values()
                continue
            named = ", ".join(list(notices)[:MOST_NAMED])
            more = len(notices) - MOST_NAMED
            rest = f" and {more} more" if more > 0 else ""
            what = "have other names here" if kind == "aliases" else "have no effect here"
            yield f"{len(notices)} keys of the configuration {what}: {named}{rest}"
        yield from (text for text in self._lines if _is_about(text, sections))


def _is_about(text: str, sections: tuple[str, ...]) -> bool:
    return not sections or text.startswith(sections)
