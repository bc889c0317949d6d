"""Check digits and built-in structure of numbers that people are known by. Pure functions over plain digits.

Sources: ISO/IEC 7812 (Luhn), ISO 13616 (IBAN), GB 11643 (resident id), GB 32100 (unified credit code), NHS data
dictionary, the Spanish, Brazilian and Hong Kong authorities' own descriptions.
"""

from __future__ import annotations

_CREDIT_ALPHABET = "0123456789ABCDEFGHJKLMNPQRTUWXY"
_SPANISH_LETTERS = "TRWAGMYFPDXBNJZSQVHLCKE"
IBAN_LENGTHS = {
    **{
        "AD": 24,
        "AE": 23,
        "AL": 28,
        "AT": 20,
        "AZ": 28,
        "BA": 20,
        "BE": 16,
        "BG": 22,
        "BH": 22,
        "BR": 29,
        "BY": 28,
        "CH": 21,
        "CR": 22,
        "CY": 28,
        "CZ": 24,
    },
    **{
        "DE": 22,
        "DK": 18,
        "DO": 28,
        "EE": 20,
        "EG": 29,
        "ES": 24,
        "FI": 18,
        "FO": 18,
        "FR": 27,
        "GB": 22,
        "GE": 22,
        "GI": 23,
        "GL": 18,
        "GR": 27,
        "GT": 28,
    },
    **{
        "HR": 21,
        "HU": 28,
        "IE": 22,
        "IL": 23,
        "IQ": 23,
        "IS": 26,
        "IT": 27,
        "JO": 30,
        "KW": 30,
        "KZ": 20,
        "LB": 28,
        "LC": 32,
        "LI": 21,
        "LT": 20,
        "LU": 20,
    },
    **{
        "LV": 21,
        "LY": 25,
        "MC": 27,
        "MD": 24,
        "ME": 22,
        "MK": 19,
        "MR": 27,
        "MT": 31,
        "MU": 30,
        "NL": 18,
        "NO": 15,
        "PK": 24,
        "PL": 28,
        "PS": 29,
        "PT": 25,
    },
    **{
        "QA": 29,
        "RO": 24,
        "RS": 22,
        "SA": 24,
        "SC": 31,
        "SD": 18,
        "SE": 24,
        "SI": 19,
        "SK": 24,
        "SM": 27,
        "ST": 25,
        "SV": 28,
        "TL": 23,
        "TN": 24,
        "TR": 26,
    },
    **{"UA": 29, "VA": 22, "VG": 24, "XK": 20},
}


def luhn(digits: str) -> bool:
    total = 0
    for index, char in enumerate(reversed(digits)):
        value = int(char) * (2 if index % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def iban(value: str) -> bool:
    """Letters and digits without blanks, of the country's length."""
    if IBAN_LENGTHS.get(value[:2]) != len(value):
        return False
    return int("".join(str(int(char, 36)) for char in value[4:] + value[:4])) % 97 == 1


def resident_id(value: str) -> bool:
    """Chinese resident id of 18 places; X is the check digit 10."""
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    total = sum(int(char) * weight for char, weight in zip(value[:17], weights, strict=True))
    return "10X98765432"[total % 11] == value[17].upper()


def has_birthday(value: str, start: int, year_digits: int) -> bool:
    """Whether a plausible date (year, month, day) stands at `start`."""
    year = value[start : start + year_digits]
    month, day = value[start + year_digits : start + year_digits + 2], value[start + year_digits + 2 :][:2]
    return 1 <= int(month) <= 12 and 1 <= int(day) <= 31 and (year_digits == 2 or 1880 <= int(year) <= 2099)


def credit_code(value: str) -> bool:
    """Chinese unified social credit code, 18 places."""
    if any(char not in _CREDIT_ALPHABET for char in value):
        return False
    total = sum(_CREDIT_ALPHABET.index(char) * pow(3, index, 31) for index, char in enumerate(value[:17]))
    return _CREDIT_ALPHABET[(31 - total % 31) % 31] == value[17]


def nhs(digits: str) -> bool:
    """British NHS number, ten digits."""
    check = 11 - sum(int(char) * (10 - index) for index, char in enumerate(digits[:9])) % 11
    return check % 11 == int(digits[9]) and check != 10


def spanish_id(value: str) -> bool:
    """DNI and NIE: eight digits, the first perhaps X, Y or Z, and a letter."""
    digits = {"X": "0", "Y": "1", "Z": "2"}.get(value[0], value[0]) + value[1:8]
    return digits.isdigit() and _SPANISH_LETTERS[int(digits) % 23] == value[8]


def cpf(digits: str) -> bool:
    """Brazilian CPF, eleven digits."""
    for length in (9, 10):
        total = sum(int(char) * (length + 1 - index) for index, char in enumerate(digits[:length]))
        if total * 10 % 11 % 10 != int(digits[length]):
            return False
    return len(set(digits)) > 1


def hong_kong_id(value: str) -> bool:
    """One or two letters, six digits, check digit; without brackets."""
    head, digits, check = value[:-7], value[-7:-1], value[-1]
    letters = [36, *(int(char, 36) for char in head)] if len(head) == 1 else [int(char, 36) for char in head]
    total = sum(
        number * weight for number, weight in zip([*letters, *map(int, digits)], range(9, 1, -1), strict=True)
    )
    return "0123456789A"[(11 - total % 11) % 11] == check


def us_social_security(digits: str) -> bool:
    """No area 000 or 666, no group 00, no serial 0000. Areas from 900 on are tax numbers or made up; masked too."""
    return digits[:3] not in ("000", "666") and digits[3:5] != "00" and digits[5:] != "0000"
