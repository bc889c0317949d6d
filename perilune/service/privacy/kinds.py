"""The kinds of personal identifiers, what may be done with each, and what a finding is. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What was found. `TEXT` is no identifier: text that looks like one of our placeholders, so that putting the
    answer back can't mistake it for one."""

    PERSON = "person"
    PHONE = "phone"
    EMAIL = "email"
    ADDRESS = "address"
    NATIONAL_ID = "national_id"
    PASSPORT = "passport"
    LICENCE = "driving_licence"
    BANK_CARD = "bank_card"
    IBAN = "iban"
    TAX_ID = "tax_id"
    ACCOUNT = "account"
    ORDER = "order"
    IP = "ip"
    MAC = "mac"
    URL_TOKEN = "url_token"  # noqa: S105 - a kind, not a secret
    SECRET = "secret"  # noqa: S105 - a kind, not a secret
    PLATE = "plate"
    BIRTH_DATE = "birth_date"
    CHAT_ID = "chat_id"
    USERNAME = "username"
    STAFF_ID = "staff_id"
    MEDICAL_RECORD = "medical_record"
    GEO = "geo"
    ORGANISATION = "organisation"
    TERM = "term"
    TEXT = "text"


class Treatment(StrEnum):
    """What happens to a kind before text leaves."""

    REPLACE = "replace"  # by a placeholder, which the answer turns back
    DROP = "drop"  # by a mark that says only the kind; the answer can't name it
    REFUSE = "refuse"  # the request doesn't leave at all
    KEEP = "keep"  # it leaves as it is


DEFAULT_TREATMENTS: Mapping[Kind, Treatment] = {Kind.ORGANISATION: Treatment.KEEP}
"""Kinds that stay unless the settings say otherwise. A company's name is rarely personal, and answers need it."""

STRENGTH: tuple[Kind, ...] = (
    *(Kind.TERM, Kind.SECRET, Kind.URL_TOKEN, Kind.EMAIL, Kind.NATIONAL_ID, Kind.IBAN, Kind.TAX_ID),
    *(Kind.BANK_CARD, Kind.MEDICAL_RECORD, Kind.PASSPORT, Kind.LICENCE, Kind.IP, Kind.MAC, Kind.GEO),
    *(Kind.PHONE, Kind.STAFF_ID, Kind.ORDER, Kind.CHAT_ID, Kind.ACCOUNT, Kind.BIRTH_DATE, Kind.PLATE),
    *(Kind.ADDRESS, Kind.USERNAME, Kind.PERSON, Kind.ORGANISATION, Kind.TEXT),
)
"""Which kind gives its name to findings that overlap: the first of these."""

LABELS: Mapping[Kind, str] = {kind: kind.value.upper() for kind in Kind} | {
    Kind.NATIONAL_ID: "ID",
    Kind.LICENCE: "LICENCE",
    Kind.BANK_CARD: "CARD",
    Kind.URL_TOKEN: "TOKEN",
    Kind.MEDICAL_RECORD: "RECORD",
    Kind.GEO: "LOCATION",
}
"""The word in a kind's placeholder. Capitals, one underscore and a small number are what models copy most surely,
in Chinese text too."""


class Found(NamedTuple):
    """Characters `start`:`end` of a text are an identifier of `kind`. A tuple: thousands are made for a request."""

    start: int
    end: int
    kind: Kind
