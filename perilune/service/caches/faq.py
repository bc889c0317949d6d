"""Curated answers: a YAML file of questions and their answers, the same for all tenants, read only by this program.

Knows the file's form. A question is found when it says the same words, whatever its case, width and punctuation; it
is never guessed. A changed file is read again; a broken one leaves the last good one in use and is told in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError
from perilune.service.caches.verify import plain

_log = logging.getLogger(__name__)


class CuratedAnswers:
    """Answers by question. Raises `ConfigError` for a file that can't be read when the program starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._answers = _read(path)

    def find(self, question: str) -> str | None:
        """The curated answer, if the file has this question."""
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._answers = _read(self._path)
            except ConfigError as error:
                _log.warning("The curated answers stay as they were: %s", error.message)
        return self._answers.get(plain(question))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size


def _read(path: Path) -> Mapping[str, str]:
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        raise _refused(path, "can't be read as YAML") from None
    if not isinstance(entries, list):
        raise _refused(path, "must be a list of entries with `questions` and `answer`")
    return {plain(question): answer for entry in entries for question, answer in _entry(path, entry)}


def _entry(path: Path, entry: Any) -> list[tuple[str, str]]:
    questions = entry.get("questions") if isinstance(entry, dict) else None
    answer = entry.get("answer") if isinstance(entry, dict) else None
    if not isinstance(questions, list) or not questions or not isinstance(answer, str) or not answer.strip():
        raise _refused(path, "has an entry without a list of `questions` and an `answer`")
    if not all(isinstance(each, str) and plain(each) for each in questions):
        raise _refused(path, "has a question without words")
    return [(question, answer) for question in questions]


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"The file of curated answers {path.name} {why}.",
        hint="See docs/caches.md for its form.",
        param="answer_cache.faq",
    )
