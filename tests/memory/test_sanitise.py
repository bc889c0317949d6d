"""Display names can't deceive and can't be empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.memory.sanitise import filename


@pytest.mark.parametrize(
    ("given_name", "shown"),
    [
        ("report.pdf", "report.pdf"),
        ("src/pkg/__init__.py", "src/pkg/__init__.py"),
        ("../../etc/passwd", "etc/passwd"),
        ("/home/someone/secret/plan.txt", "plan.txt"),
        ("C:\\Users\\me\\plan.docx", "plan.docx"),
        ("a\0b\n.txt", "ab.txt"),
        ("invoice\u202efdp.exe", "invoicefdp.exe"),
        ("", "file"),
        ("../..", "file"),
        ("报告.pdf", "报告.pdf"),
    ],
)
def test_filename(given_name: str, shown: str) -> None:
    assert filename(given_name) == shown


@given(st.text(max_size=600))
def test_any_name(name: str) -> None:
    shown = filename(name)
    assert 0 < len(shown) <= 255
    assert ".." not in shown.split("/")
    assert "\0" not in shown
