"""What a cell of a workbook shows: text, numbers, dates, booleans, errors. Knows XLSX's cell types and formats.

Numbers are written as stored, not as formatted, so that none loses digits; dates as ISO 8601.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

S = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_DATE_FORMATS = frozenset((*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)))  # built in
_LITERALS = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]|_.|\*.')
_DATE_LETTERS = re.compile(r"[dmyhs]", re.IGNORECASE)
_COLUMN = re.compile(r"[A-Z]{1,3}")
_MAX_SERIAL = 2_958_466  # the day after 9999-12-31


def date_styles(styles: Any) -> frozenset[int]:
    """Numbers of the cell styles that show a number as a date or time, from a styles part."""
    custom = {int(item.get("numFmtId", "0")): item.get("formatCode", "") for item in styles.iter(f"{S}numFmt")}
    formats = next(styles.iter(f"{S}cellXfs"), None)
    found = set()
    for number, item in enumerate(formats if formats is not None else ()):
        code = int(item.get("numFmtId", "0"))
        if code in _DATE_FORMATS or _DATE_LETTERS.search(_LITERALS.sub("", custom.get(code, ""))):
            found.add(number)
    return frozenset(found)


def column_of(reference: str) -> int | None:
    """0 for "A7", 27 for "AB3"; None where the reference names no column."""
    match = _COLUMN.match(reference)
    if match is None:
        return None
    number = 0
    for letter in match[0]:
        number = 26 * number + ord(letter) - 64
    return number - 1


def shown(cell: Any, shared: Sequence[str], dates: frozenset[int], epoch: datetime) -> str:
    """A cell's text on one line. A formula that was never computed is shown itself."""
    kind = cell.get("t", "n")
    if kind == "inlineStr":
        return one_line(text_of(cell))
    value, formula = cell.findtext(f"{S}v"), cell.findtext(f"{S}f")
    if not value:
        return one_line(f"={formula}") if formula else ""
    if kind == "s":
        number = int(value)
        return shared[number] if 0 <= number < len(shared) else ""
    if kind == "b":
        return "TRUE" if value == "1" else "FALSE"
    if kind == "n" and int(cell.get("s", "0")) in dates:
        return _date(value, epoch)
    return one_line(value)


def text_of(element: Any) -> str:
    """Text of a string item, without the reading aids (phonetics) of East Asian text."""
    texts = (text for text in element.iter(f"{S}t") if text.getparent().tag != f"{S}rPh")
    return "".join(text.text or "" for text in texts)


def one_line(text: str) -> str:
    return " ".join(text.split())


def epoch_of(workbook: Any) -> datetime:
    """Day zero of the workbook's dates."""
    settings: Mapping[str, str] | None = next((item.attrib for item in workbook.iter(f"{S}workbookPr")), None)
    from_1904 = settings is not None and settings.get("date1904") in ("1", "true")
    return datetime(1904, 1, 1) if from_1904 else datetime(1899, 12, 30)


def _date(value: str, epoch: datetime) -> str:
    serial = float(value)
    if not 0 <= serial < _MAX_SERIAL:
        return value
    moment = epoch + timedelta(seconds=round(serial * 86_400))
    if serial < 1:
        return moment.strftime("%H:%M:%S")
    return moment.strftime("%Y-%m-%d" if serial == int(serial) else "%Y-%m-%d %H:%M:%S")
