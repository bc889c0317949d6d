"""Invented identifiers for the planted set (`bench.privacy_set`): a maker for each kind and form.

Knows how each identifier looks and how its check digit is made. Takes ranges reserved for fiction or documentation
where such exist (555-01xx, example.com, 192.0.2.0/24, 2001:db8::/32, 00:00:5E:00:53, national insurance numbers
that start with QQ); otherwise values that nobody issues as far as the author knows (resident ids with serial 000,
German bank codes that start with 0). Doesn't know any detector.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random

Maker = Callable[[Random], str]

UPPER_PLATE = "ABCDEFGHJKLMNPQRSTUVWXYZ"
CREDIT_CODE = "0123456789ABCDEFGHJKLMNPQRTUWXY"
AREAS = [
    "110105",
    "310115",
    "440305",
    "510107",
    "330106",
    "420111",
    "610113",
    "320505",
    "370202",
    "500112",
    "210102",
    "350203",
]
WORDS = [
    "maple",
    "otter",
    "cobalt",
    "harbor",
    "pixel",
    "lantern",
    "marble",
    "comet",
    "willow",
    "ember",
    "quartz",
    "falcon",
]


def digits(rng: Random, count: int) -> str:
    return "".join(rng.choice(string.digits) for _ in range(count))


def pick(rng: Random, alphabet: str, count: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(count))


def fill(pattern: str) -> Maker:
    """`#` a digit, `@` a capital letter as plates use it, `~` a small letter or digit; all else as it stands."""
    sets = {"#": string.digits, "@": UPPER_PLATE, "~": string.ascii_lowercase + string.digits}
    return lambda rng: "".join(rng.choice(sets[c]) if c in sets else c for c in pattern)


def one_of(*makers: Maker) -> Maker:
    return lambda rng: rng.choice(makers)(rng)


def luhn_digit(body: str) -> str:
    """The digit that makes `body` + digit pass Luhn (ISO/IEC 7812)."""
    total = 0
    for place, char in enumerate(reversed(body)):
        value = int(char) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


def resident_digit(body: str) -> str:
    """The check character of a mainland-China resident id (GB 11643-1999), from its 17 digits."""
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    return "10X98765432"[sum(int(c) * w for c, w in zip(body, weights, strict=True)) % 11]


def credit_code_digit(body: str) -> str:
    """The check character of a unified social credit code (GB 32100-2015), from its first 17 characters."""
    total = sum(CREDIT_CODE.index(c) * pow(3, place, 31) for place, c in enumerate(body))
    return CREDIT_CODE[-total % 31]


def iban_of(country: str, account: str) -> str:
    """ISO 13616: check digits such that the rearranged number is 1 modulo 97."""
    number = int("".join(str(int(c, 36)) for c in account + country + "00"))
    return f"{country}{98 - number % 97:02d}{account}"


def nhs_number(rng: Random) -> str:
    """An NHS number of the test range 999, check digit modulo 11."""
    while True:
        body = "999" + digits(rng, 6)
        check = 11 - sum(int(c) * (10 - place) for place, c in enumerate(body)) % 11
        if check != 10:
            return f"{body[:3]} {body[3:6]} {body[6:]}{check % 11}"


def hong_kong_id(rng: Random) -> str:
    """One letter, six digits (serials that start with 000), check character modulo 11 in brackets."""
    letter, body = rng.choice(string.ascii_uppercase), "000" + digits(rng, 3)
    values = [36, ord(letter) - 55, *map(int, body)]
    total = sum(value * weight for value, weight in zip(values, range(9, 1, -1), strict=True))
    return f"{letter}{body}({'0123456789A'[-total % 11]})"


def spanish_id(rng: Random) -> str:
    """A DNI that starts with 000: the letter is the number modulo 23."""
    body = "000" + digits(rng, 5)
    return body + "TRWAGMYFPDXBNJZSQVHLCKE"[int(body) % 23]


def brazilian_id(rng: Random) -> str:
    """A CPF that starts with 000: two check digits modulo 11."""
    body = "000" + digits(rng, 6)
    for _ in range(2):
        total = sum(int(c) * weight for c, weight in zip(reversed(body), range(2, 12), strict=False))
        body += str(total * 10 % 11 % 10)
    return f"{body[:3]}.{body[3:6]}.{body[6:9]}-{body[9:]}"


def isbn13(rng: Random) -> str:
    group = rng.choice(["978-7-111", "978-0-306", "978-1-4920", "978-3-16"])
    body = group + "-" + digits(rng, 9 - (len(group.replace("-", "")) - 3))
    plain = body.replace("-", "")
    check = -sum(int(c) * (3 if place % 2 else 1) for place, c in enumerate(plain)) % 10
    return f"{body}-{check}"


def birth(rng: Random) -> tuple[int, int, int]:
    return rng.randint(1948, 2012), rng.randint(1, 12), rng.randint(1, 28)


def birth_date(shape: str) -> Maker:
    months = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ]

    def make(rng: Random) -> str:
        year, month, day = birth(rng)
        return shape.format(y=year, m=month, d=day, mm=f"{month:02d}", dd=f"{day:02d}", M=months[month - 1])

    return make


def card(prefix: str, length: int) -> Maker:
    def make(rng: Random) -> str:
        body = prefix + digits(rng, length - len(prefix) - 1)
        return body + luhn_digit(body)

    return make


def resident_id(rng: Random) -> str:
    year, month, day = birth(rng)
    body = f"{rng.choice(AREAS)}{year}{month:02d}{day:02d}000"
    return body + resident_digit(body)


def credit_code(rng: Random) -> str:
    body = "91" + rng.choice(AREAS) + "MA" + pick(rng, CREDIT_CODE, 7)
    return body + credit_code_digit(body)


def iban(country: str, pattern: str) -> Maker:
    make = fill(pattern)
    return lambda rng: iban_of(country, make(rng))


def geo(rng: Random) -> str:
    return f"{rng.uniform(-55, 60):.5f}, {rng.uniform(-170, 170):.5f}"


def geo_degrees(rng: Random) -> str:
    half = f"{rng.randint(1, 60)}°{rng.randint(10, 59)}'{rng.randint(10, 59)}.{rng.randint(0, 9)}\"N"
    return f"{half} {rng.randint(1, 170)}°{rng.randint(10, 59)}'{rng.randint(10, 59)}.{rng.randint(0, 9)}\"E"


def geo_zh(rng: Random) -> str:
    north, east = rng.randint(18, 52), rng.randint(75, 134)
    a, b, c, d = (rng.randint(10, 59) for _ in range(4))
    return f"北纬{north}°{a}′{b}″，东经{east}°{c}′{d}″"


def amount_en(rng: Random) -> str:
    return rng.choice(["${:,}", "€{:,}", "USD {:,}", "£{:,}.50", "{:,} dollars"]).format(rng.randint(900, 240000))


def amount_zh(rng: Random) -> str:
    form = rng.choice(["{:,}元", "¥{:,}.00", "人民币{}元", "{}块", "{}万元"])
    return form.format(rng.randint(3, 99) if "万" in form else rng.randint(900, 90000))


def address_en(rng: Random) -> str:
    road = rng.choice(
        [
            "Alder",
            "Brookfield",
            "Juniper",
            "Lakeview",
            "Millrace",
            "Orchard",
            "Pinecone",
            "Quarry",
            "Thistle",
            "Wexcombe",
        ]
    )
    kind = rng.choice(["Street", "Avenue", "Lane", "Road", "Drive", "Court"])
    end = rng.choice(
        [
            "Springfield, IL 62701", "Portland, OR 97205", "Apt {n}, Austin, TX 78704", "Leeds LS1 4AP",
            "Flat {n}, Bristol BS1 5TR", "Unit {n}, Toronto, ON M5V 2T6", "Suite {n}00, Denver, CO 80202",
        ]
    )  # fmt: skip
    return f"{rng.randint(2, 989)} {road} {kind}, {end.format(n=rng.randint(2, 48))}"


def address_eu(rng: Random) -> str:
    n = rng.randint(2, 190)
    return rng.choice(
        [f"Lindenallee {n}, 10999 Berlin", f"{n} rue des Tilleuls, 69003 Lyon", f"Via dei Cedri {n}, 20121 Milano",
         f"Korenbloemstraat {n}-2, 1013 AB Amsterdam", f"Calle del Olmo {n}, 3º B, 28012 Madrid"]
    )  # fmt: skip


def address_zh(rng: Random) -> str:
    place = rng.choice(
        [
            "北京市朝阳区",
            "上海市浦东新区",
            "广东省深圳市南山区",
            "四川省成都市武侯区",
            "浙江省杭州市西湖区",
            "武汉市洪山区",
        ]
    )
    road = rng.choice(["望青路", "听松街", "梧桐里大道", "星河东路", "长亭巷", "云栖北街", "百合园路"])
    home = rng.choice(["{a}号", "{a}号{b}栋{c}室", "{a}弄{b}号{c}室", "{a}号晴川花园{b}号楼{b}单元{c}"])
    numbers = {"a": rng.randint(2, 899), "b": rng.randint(1, 19), "c": rng.randint(101, 2804)}
    return place + road + home.format(**numbers)


def address_lines(rng: Random) -> str:
    return address_en(rng).replace(", ", "\n", 1)


def address_pinyin(rng: Random) -> str:
    road = rng.choice(["Wangqing Road", "Tingsong Street", "Wutongli Avenue", "Yunqi North Street"])
    place = rng.choice(["Chaoyang District, Beijing", "Pudong, Shanghai 200120", "Nanshan, Shenzhen, Guangdong"])
    return (
        f"Room {rng.randint(101, 2804)}, Building {rng.randint(1, 19)}, No. {rng.randint(2, 899)} {road}, {place}"
    )


def word_pair(rng: Random) -> str:
    return f"{rng.choice(WORDS)}{rng.choice(['_', '.', ''])}{rng.choice(WORDS)}{rng.randint(1, 999)}"


def mail(shape: str) -> Maker:
    def make(rng: Random) -> str:
        host = rng.choice(["example.com", "example.org", "mail.example.net", "acme.example", "post.example.com"])
        return shape.format(u=word_pair(rng).replace("_", "."), h=host, hd=host.replace(".", " dot "))

    return make


def secret(prefix: str, count: int, alphabet: str = string.ascii_letters + string.digits) -> Maker:
    return lambda rng: prefix + pick(rng, alphabet, count)


def password(rng: Random) -> str:
    return f"{rng.choice(WORDS).title()}{rng.choice('-_!#')}Fake{rng.randint(10, 9999)}{rng.choice('!?%*')}"


def mac(separator: str, upper: bool) -> Maker:
    def make(rng: Random) -> str:
        text = separator.join(["00", "00", "5e", "00", "53", f"{rng.randrange(256):02x}"])
        return text.upper() if upper else text

    return make


def ipv4(rng: Random) -> str:
    net = rng.choice(["192.0.2", "198.51.100", "203.0.113", "10.24.7", "172.16.40", "192.168.31"])
    return f"{net}.{rng.randint(2, 254)}"


def ipv6(rng: Random) -> str:
    part = f"{rng.randrange(1, 65536):x}"
    return rng.choice(
        [f"2001:db8::{part}", f"2001:db8:{part}:12::1", f"2001:0db8:0000:0042:0000:8a2e:0370:{part:0>4}"]
    )


# fmt: off
MAKERS: dict[str, Maker] = {
    "phone.us": one_of(fill("(212) 555-01##"), fill("415-555-01##"), fill("206.555.01##"), fill("303 555 01##")),
    "phone.usi": one_of(fill("+1 617 555 01##"), fill("+1-312-555-01##"), fill("1 (503) 555-01##")),
    "phone.usx": one_of(fill("646-555-01## ext. 4#"), fill("(702) 555-01## x31#")),
    "phone.uri": one_of(fill("tel:+1-917-555-01##"), fill("(+86)1540000####"), fill("+1 (718) 555 01##")),
    "phone.us10": fill("51255501##"),
    "phone.uk": one_of(fill("020 7946 0###"), fill("07700 900###"), fill("01632 960###"), fill("+44 7700 900###")),
    "phone.eu": one_of(
        fill("030 23125###"), fill("+49 30 23125 ###"), fill("01 99 00 ## ##"), fill("+33 6 39 98 ## ##"),
        fill("070-174 06 #7"), fill("+353 20 915 ####"),
    ),
    "phone.asia": one_of(
        fill("+852 5550 01##"), fill("+65 6555 01##"), fill("03-5550-01##"), fill("+886 2 5550 01##"),
        fill("(02) 5550 01##"), fill("+81 3-5550-01##"),
    ),
    "phone.cn": one_of(
        fill("1540000####"), fill("1790001####"), fill("1940002####"), fill("1680003####"), fill("13800138000"),
    ),
    "phone.cnl": one_of(
        fill("010-555001##"), fill("(021)5550 01##"), fill("0755-5550-01##"),
        fill("028 5550 01##转80##"),
    ),
    "phone.cn86": one_of(fill("+86 154 0000 ####"), fill("+86-1790001####"), fill("0086 194 0002 ####")),
    "email.plain": mail("{u}@{h}"),
    "email.plus": mail("{u}+orders@{h}"),
    "email.at": one_of(mail("{u} at {hd}"), mail("{u}[at]{h}"), mail("{u} (at) {hd}")),
    "email.fw": mail("{u}＠{h}"),
    "email.gap": mail("{u} @ {h}"),
    "email.hash": mail("{u}#{h}"),
    "address.en": address_en,
    "address.eu": address_eu,
    "address.zh": address_zh,
    "address.ennl": address_lines,
    "address.zhen": address_pinyin,
    "national_id.hk": hong_kong_id,
    "national_id.es": spanish_id,
    "national_id.br": brazilian_id,
    "national_id.cn": resident_id,
    "national_id.us": fill("987-65-432#"),
    "national_id.uk": one_of(fill("QQ ## ## ## C"), fill("QQ######A")),
    "passport.cn": one_of(fill("E########"), fill("EA#######"), fill("G########")),
    "passport.en": one_of(fill("######0##"), fill("C0#######"), fill("X########")),
    "bank_card.any": one_of(
        card("400000", 16), card("411111", 16), card("555555", 16), card("222300", 16), card("601100", 16)
    ),
    "bank_card.amex": card("378282", 15),
    "bank_card.cn": one_of(card("62000000", 19), card("62000000", 16)),
    "iban.any": one_of(
        iban("DE", "0#################"), iban("GB", "TEST##############"), iban("NL", "TEST##########"),
        iban("FR", "00000#####00000000000##"), iban("ES", "0000################"), iban("AT", "0###############"),
        iban("CH", "00000############"),
    ),
    "tax_id.eu": one_of(
        fill("DE#########"), fill("FR###########"), fill("NL#########B01"), fill("ATU########"),
        fill("IT###########"), fill("PL##########"), fill("ESB########"), fill("IE#######FA"),
    ),
    "tax_id.cn": credit_code,
    "account.any": one_of(fill("00######"), fill("4402-######-##"), fill("AC-########")),
    "account.cn": one_of(fill("8800########"), fill("6600 #### #### ##")),
    "order.any": one_of(fill("ORD-2026-######"), fill("#########-##"), fill("SO########"), fill("#PO-####-@@")),
    "order.cn": one_of(fill("2026########5###"), fill("DD2026########"), fill("SF10########")),
    "ip.v4": ipv4,
    "ip.v6": ipv6,
    "ip.def": lambda rng: ipv4(rng).replace(".", "[.]"),
    "mac.bare": lambda rng: f"00005E0053{rng.randrange(256):02X}",
    "mac.any": one_of(
        mac(":", True), mac(":", False), mac("-", True), lambda rng: f"0000.5e00.53{rng.randrange(256):02x}",
    ),
    "url_token.any": one_of(
        secret("FAKE", 24), secret("fake-", 32, "0123456789abcdef"), secret("tok_FAKE", 18), secret("fk", 22),
    ),
    "secret.any": one_of(
        secret("sk-FAKE", 40), secret("AKIAFAKE", 12, string.ascii_uppercase + "234567"), secret("ghp_FAKE", 32),
        secret("xoxb-0000-FAKE-", 20), secret("glpat-FAKE", 16), secret("hf_FAKE", 30),
        secret("eyJhbGciOiJub25lIn0.eyJzdWIiOiJmYWtlIn0.FAKE", 20),
    ),
    "secret.hex": secret("fa4e", 36, "0123456789abcdef"),
    "secret.password": password,
    "plate.cn": one_of(
        fill("京A·#####"), fill("粤B#@###"), fill("沪AD#####"), fill("川A·@####"), fill("浙A F####"),
    ),
    "plate.en": one_of(fill("@@12 @@@"), fill("7@@@###"), fill("B-@@ ####"), fill("@@-###-@@")),
    "birth_date.en": one_of(
        birth_date("{dd}/{mm}/{y}"), birth_date("{M} {d}, {y}"), birth_date("{d} {M} {y}"),
        birth_date("{y}-{mm}-{dd}"), birth_date("{mm}-{dd}-{y}"), birth_date("{dd}.{mm}.{y}"),
    ),
    "birth_date.zh": one_of(
        birth_date("{y}年{m}月{d}日"), birth_date("{y}-{mm}-{dd}"), birth_date("{y}.{m}.{d}"),
        birth_date("{y}/{mm}/{dd}"),
    ),
    "chat_id.wx": one_of(fill("wxid_~~~~~~~~~~~~~~"), lambda rng: f"{rng.choice(WORDS)}_{digits(rng, 5)}"),
    "chat_id.qq": one_of(fill("10000#####"), fill("2000#####")),
    "username.any": word_pair,
    "staff_id.any": one_of(fill("EMP-00####"), fill("E0#####"), fill("ACM-HR-####"), fill("P-####-0#")),
    "staff_id.cn": one_of(fill("A00###"), fill("GH2021####"), fill("研发-0###"), fill("0####")),
    "medical_record.en": one_of(fill("MRN-00######"), fill("00######"), fill("H-####-####")),
    "medical_record.nhs": nhs_number,
    "medical_record.cn": one_of(fill("ZY2026######"), fill("000#######"), fill("MZ########")),
    "geo.any": geo,
    "geo.zh": geo_zh,
    "geo.tight": lambda rng: geo(rng).replace(" ", ""),
    "geo.dms": geo_degrees,
    "amount.en": amount_en,
    "amount.zh": amount_zh,
    "keep.version": one_of(fill("2.#.1#"), fill("v3.1#.0-rc2"), fill("10.0.1904#.1##"), fill("1.0.#+build.7#")),
    "keep.isbn": isbn13,
    "keep.year": lambda rng: str(rng.randint(1400, 2025)),
    "keep.clause": one_of(fill("4.#.1#"), fill("12.#(b)"), fill("7.#.#.1")),
    "keep.code": one_of(fill("MX-4##0T"), fill("RTX 40#0"), fill("0x8007000#"), fill("SKU-@@-##")),
    "keep.commit": secret("", 8, "0123456789abcdef"),
}
# fmt: on

GROUPS: dict[str, tuple[str, ...]] = {
    "phone.en": ("phone.us", "phone.us", "phone.usi", "phone.uk", "phone.eu", "phone.us10"),
    "phone.zh": ("phone.cn", "phone.cn+sp", "phone.cn+dash", "phone.cn86", "phone.cn"),
    "email.any": ("email.plain", "email.plain", "email.plus"),
    "bank_card.styled": ("bank_card.any+sp", "bank_card.any+dash", "bank_card.any", "bank_card.amex"),
    "bank_card.zh": ("bank_card.cn", "bank_card.cn+sp", "bank_card.cn"),
    "iban.styled": ("iban.any", "iban.any+sp"),
    "ip.any": ("ip.v4", "ip.v4", "ip.v6"),
    "medical_record.any": ("medical_record.en", "medical_record.en", "medical_record.nhs"),
}
