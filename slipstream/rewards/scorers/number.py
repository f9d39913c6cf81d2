r"""Reads an answer that is one number as people write it: `1,000`, `\$5.00`, `50 \%`, `-\frac12`.

The number may have a sign, a currency, thousands separators, an exponent, a percent sign, a unit,
and markup such as `$...$` or `\text{...}` around it. Everything else is not a number for this
module: `1,2`, `x + 1`, `5 or 6`. Values are exact. Used by the math scorers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_MAX_LENGTH = 1_000
"""Longest text in characters that is read as a number. It bounds the digits of a value."""

_MAX_EXPONENT = 400
"""Largest absolute exponent of ten that is read."""

_MAX_DECIMALS = 50
"""Most decimals with which a value is written without an exponent."""

_MAX_LAYERS = 20
"""Maximum number of nested pieces of markup that are removed."""

_MAX_WRAPPED = 10_000
"""Longest text in characters whose markup is removed, so that this takes little time."""

_EDGE = re.compile(r"\A(?:\s|~|\\[,;:! ])+|(?:\s|~|\\[,;:! ])+\Z")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_STYLE = re.compile(
    r"\\(?:text|textbf|textrm|textit|textnormal|mathrm|mathbf|mathit|mathsf|mbox|boxed|fbox)"
    r"\s*(?=\{)|\\(?:displaystyle|textstyle|bf|rm)(?![A-Za-z])\s*"
)

_FOLDED = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2008", " "),
        "\u2019": "'",
        "\u2044": "/",
        **{
            sign: f"{n}/{d}"
            for sign, n, d in (
                *(("½", 1, 2), ("⅓", 1, 3), ("⅔", 2, 3), ("¼", 1, 4), ("¾", 3, 4)),
                *(("⅕", 1, 5), ("⅖", 2, 5), ("⅗", 3, 5), ("⅘", 4, 5), ("⅙", 1, 6)),
                *(("⅚", 5, 6), ("⅛", 1, 8), ("⅜", 3, 8), ("⅝", 5, 8), ("⅞", 7, 8)),
            )
        },
    }
)
"""Minus signs, spaces and fractions that have a character of their own, and their usual form."""

_UNITS = {
    alias: names.split()[0]
    for names in (
        *("$ \\$ dollar dollars usd us$", "cent cents", "€ euro euros eur", "£ gbp", "¥ yen jpy"),
        *("₹ rupee rupees inr", "mm millimeter millimeters millimetre millimetres"),
        *("cm centimeter centimeters centimetre centimetres", "m meter meters metre metres"),
        *("km kilometer kilometers kilometre kilometres", "in inch inches", "ft foot feet"),
        *("yd yard yards", "mi mile miles", "mg milligram milligrams", "g gram grams gm"),
        *("kg kilogram kilograms", "lb lbs pound pounds", "oz ounce ounces", "ton tons"),
        *("ml milliliter milliliters millilitre millilitres", "l liter liters litre litres"),
        *("gallon gallons", "s sec second seconds", "min minute minutes", "h hr hour hours"),
        *("day days", "week weeks", "month months", "year years", "mph", "km/h kph"),
        *("degree degrees ° \\degree", "rad radian radians"),
    )
    for alias in names.split()
}
"""Units that may follow a number without markup, and the name by which they are compared. Units of
one letter need markup, because `5 m` may also be a product."""

_COUNTED = (
    *("unit", "units", "point", "points", "way", "ways", "people", "student", "students", "digit"),
    *("digits", "square units", "cubic units", "integers", "multiples", "meals", "edges"),
)
"""Words that may also follow a number. They are not compared."""

_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words for powers of ten, and their exponents."""

_NOT_UNITS = frozenset(
    (
        *("or", "and", "to", "not", "less", "more", "than", "least", "most", "about", "if", "is"),
        *("hundred", "dozen", "times", "of", *_SCALES),
        *("pi", "squared", "cubed"),
    )
)
"""Words that change the value of a number before them, so that they are not its unit."""

_S = r"(?:[ ~]|\\[,;: ]){0,3}"
_CURRENCY = r"(?:\\?\$|US\$|USD|EUR|GBP|[€£¥₹₩₽₺₫₪₱₴₦฿])"
_WHOLE = (
    r"(?:[1-9][0-9]{0,2}(?P<sep>,|\\[,;: ]|[~' ])[0-9]{3}(?:(?P=sep)[0-9]{3})*(?![0-9])"
    r"|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]+)"
)
_EXPONENT = (
    rf"(?:[eE](?P<e1>[+-]?[0-9]{{1,4}})"
    rf"|{_S}(?:\\times|\\cdot|[\u00d7\u00b7\u22c5*x]){_S}10{_S}\^{_S}(?:\{{{_S}(?P<e2>[+-]?{_S}[0-9]{{1,4}}){_S}\}}|(?P<e3>[+-]?[0-9]{{1,4}})))"
)
_POWER = rf"10{_S}\^{_S}(?:\{{{_S}(?P<e4>[+-]?{_S}[0-9]{{1,4}}){_S}\}}|(?P<e5>[+-]?[0-9]{{1,4}}))"
_DECIMAL = (
    rf"(?:{_POWER}|(?:(?P<whole>{_WHOLE})(?P<part>\.[0-9]*)?|(?P<bare>\.[0-9]+)){_EXPONENT}?)"
)
_QUOTIENT = (
    rf"(?:(?:(?P<m1>[0-9]+)[ ~])?(?P<n1>[0-9]+){_S}/{_S}(?P<d1>[0-9]+)"
    rf"|(?:(?P<m2>[0-9]+){_S})?\\[dtc]?frac{_S}"
    rf"(?:\{{{_S}(?P<n2>[+-]?{_S}[0-9]+){_S}\}}|(?P<n3>[0-9])){_S}"
    rf"(?:\{{{_S}(?P<d2>[+-]?{_S}[0-9]+){_S}\}}|(?P<d3>[0-9])))"
)
_SIGNED = rf"(?P<s1>[+-]?){_S}(?P<c1>{_CURRENCY}?){_S}(?P<s2>[+-]?){_S}"
_SCALE = (
    rf"(?:\\text\s*\{{\s*(?P<w1>{'|'.join(_SCALES)})\s*\}}|(?P<w2>{'|'.join(_SCALES)})(?![A-Za-z]))"
)
_PERCENT = r"(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|percent|per cent)"
_PLAIN_UNIT = "|".join(
    sorted((re.escape(name) for name in (*_UNITS, *_COUNTED) if len(name) > 1), key=len)[::-1]
)
_UNIT = (
    rf"(?:\\(?:text|textrm|textbf|mathrm|mbox)\s*\{{(?P<u1>[^{{}}]*)\}}"
    rf"|(?P<u2>{_CURRENCY}|{_PLAIN_UNIT})(?![A-Za-z])|(?P<u3>°|\^{_S}\{{?{_S}\\circ{_S}\}}?)"
    rf"(?:{_S}(?:[CF]|\\(?:text|mathrm)\{{ ?[CF]\}})(?![A-Za-z]))?)"
    rf"(?:\^{_S}\{{?[23]\}}?)?"
)
_NUMBER = re.compile(
    rf"{_SIGNED}(?:{_QUOTIENT}|{_DECIMAL}){_S}{_SCALE}?{_S}(?P<percent>{_PERCENT}?){_S}(?:{_UNIT})?",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(-?)(?:([0-9]+)|\\[dt]?frac\{([0-9]+)\}\{0*([1-9][0-9]*)\})")
"""An integer or a fraction without anything around it."""

_LEADING = re.compile(rf"{_SIGNED}(?:{_QUOTIENT}|{_DECIMAL})(?![0-9]|[.,'/][0-9])")

_SPACED = re.compile(
    r"(?<![0-9.,])([1-9][0-9]{0,2})(\\[,;: ]|[~ \u00a0\u2009\u202f])([0-9]{3})"
    r"((?:\2[0-9]{3})*)(?![0-9])"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read.

    `text` is its plain notation: sign, digits, decimals, exponent. `quotient` are numerator and
    denominator as they were written, None for decimals. `value` does not include the percent sign.
    `unit` is the name of a known unit or currency, otherwise empty.
    """

    value: Fraction
    text: str
    quotient: tuple[int, int] | None = None
    percent: bool = False
    unit: str = ""

    @property
    def latex(self) -> str:
        """The number in LaTeX: a fraction, or a decimal without leading and trailing zeros.

        A decimal has an exponent only if it would be very long without one.
        """
        if self.quotient is not None:
            text = r"\frac{{{}}}{{{}}}".format(*self.quotient)
        else:
            digits, _, exponent = (_decimal(self.value) or self.text).partition("e")
            text = rf"{digits} \cdot 10^{{{exponent}}}" if exponent else digits
        return text + (r"\%" if self.percent else "")


@lru_cache(maxsize=1024)
def read(text: str) -> Number | None:
    """Return the number that is the whole of a text; None if the text is something else."""
    if len(text) > _MAX_LENGTH:
        return None
    if (number := _plain(text) or _plain(text := unwrapped(text))) is not None:
        return number
    plain = folded(text.replace(r"\!", "").replace("{,}", ","))
    found = _NUMBER.fullmatch(" ".join(plain.split()))
    return None if found is None else _number(found)


def leading(text: str) -> Number | None:
    """Return the number at the beginning of a text; None if there is none.

    Without percent sign and unit. None, too, if the digits continue in another form: `1,2`.
    """
    if (number := _plain(text.rstrip())) is not None and number.quotient is None:
        return number
    found = _LEADING.match(folded(text[:_MAX_LENGTH].replace(r"\!", "").replace("{,}", ",")))
    return None if found is None else _number(found)


def equal(one: Number, other: Number, *, by_value: bool = False) -> bool:
    """Return whether two numbers are the same answer.

    `50%` equals both 50 and 0.5. Known units must agree if both numbers have one. A mixed number
    equals its fraction. Two fractions must have the same numerator and denominator, and a fraction
    does not equal an integer, unless `by_value` is set.
    """
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if not by_value and one.quotient is not None and other.quotient is not None:
        return one.quotient == other.quotient
    values = {(one.value, other.value)}
    if one.percent != other.percent:
        values.add((_share(one), _share(other)))
    fraction = one.quotient is not None or other.quotient is not None
    return any(a == b and (by_value or not fraction or a.denominator > 1) for a, b in values)


def same(one: str, other: str, *, by_value: bool = False) -> bool:
    """Return whether two texts are numbers that are the same answer (see `equal`)."""
    a, b = read(one), read(other)
    return a is not None and b is not None and equal(a, b, by_value=by_value)


def folded(text: str) -> str:
    """Replace minus signs, spaces and fractions that are single characters by their usual form."""
    return text.translate(_FOLDED)


def joined(text: str) -> str:
    r"""Remove spaces that separate thousands, everywhere in a text: `1\,000 + x`, `1 000`."""
    return _SPACED.sub(lambda m: m[1] + m[3] + m[4].replace(m[2], ""), text)


def unwrapped(text: str) -> str:
    r"""Remove markup around a whole answer: `$...$`, `\(...\)`, `{...}`, `\text{...}`, a period."""
    for _ in range(_MAX_LAYERS if len(text) <= _MAX_WRAPPED else 0):
        if text[:1].isalnum() and text[-1].isalnum():
            break  # no markup begins with a letter or a digit
        before, text = text, _peeled(_EDGE.sub("", text))
        if text == before:
            break
    return text


def _peeled(text: str) -> str:
    """Remove one layer of markup."""
    if text.endswith(".") and not text.endswith(("..", r"\right.", r"\left.")):
        return text[:-1]
    for opening, closing in _DELIMITERS:
        if not text.startswith(opening) or not text.endswith(closing):
            continue
        inner = text[len(opening) : -len(closing)]
        if (
            len(text) > len(opening) + len(closing)
            and closing not in inner.replace(rf"\{closing}", "")
            and opening not in inner.replace(rf"\{opening}", "")
            and not inner.endswith("\\")
        ):
            return inner
    style = _STYLE.match(text)
    start = style.end() if style else 0
    if text.startswith("{", start) and closing_brace(text, start) == len(text) - 1:
        return text[start + 1 : -1]
    return text[start:] if style and not text.startswith("{", start) else text


def closing_brace(text: str, opening: int) -> int | None:
    r"""Return the position of the brace that closes the one at `opening`; None if it is not closed.

    Escaped braces, `\{` and `\}`, do not count.
    """
    depth, i = 0, opening
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if not depth:
                return i
        i += 1
    return None


def _decimal(value: Fraction) -> str | None:
    """Return a value as a decimal without exponent; None if it is too long."""
    if value.denominator == 1 and abs(value.numerator) < 10**15:
        return str(value.numerator)  # most values, and faster
    scale = 0
    while value.denominator > 1 and scale <= _MAX_DECIMALS:
        value, scale = value * 10, scale + 1
    digits = str(abs(value.numerator)).rjust(scale + 1, "0")
    if value.denominator > 1 or len(digits) > _MAX_LENGTH:
        return None
    sign = "-" if value < 0 else ""
    return sign + (f"{digits[:-scale]}.{digits[-scale:]}" if scale else digits)


def _share(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value


def _plain(text: str) -> Number | None:
    """Return the number for the most common notations; None for all others. Fast."""
    found = _PLAIN.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if found is None:
        return None
    sign, integer, numerator, denominator = found.groups()
    if integer is not None:
        return Number(Fraction(int(text)), text)
    top, bottom = int(sign + numerator), int(denominator)
    return Number(Fraction(top, bottom), f"{top}/{bottom}", (top, bottom))


def _number(found: re.Match[str]) -> Number | None:
    part = {key: value or "" for key, value in found.groupdict().items()}
    if part["s1"] and part["s2"]:
        return None
    sign = -1 if "-" in (part["s1"], part["s2"]) else 1
    unit = _unit(part)
    if unit is None:
        return None
    percent = bool(part.get("percent"))
    numerator = part["n1"] or part["n2"] or part["n3"]
    scale = _SCALES.get((part.get("w1") or part.get("w2") or "").lower(), 0)
    if numerator:
        top = int(_digits(numerator))
        bottom = int(_digits(part["d1"] or part["d2"] or part["d3"]))
        if bottom < 0:
            top, bottom = -top, -bottom
        mixed = part["m1"] or part["m2"]
        if not bottom or scale or (mixed and not 0 < top < bottom):
            return None
        top = sign * (int(mixed or 0) * bottom + top)
        return Number(Fraction(top, bottom), f"{top}/{bottom}", (top, bottom), percent, unit)
    power = part["e4"] or part["e5"]
    whole = "1" if power else re.sub(r"[^0-9]", "", part["whole"])
    decimals = (part["part"] or part["bare"])[1:]
    exponent = int(_digits(power or part["e1"] or part["e2"] or part["e3"]) or 0) + scale
    if abs(exponent) > _MAX_EXPONENT:
        return None
    value = sign * Fraction(int(whole + decimals)) * Fraction(10) ** (exponent - len(decimals))
    text = ("-" if sign < 0 else "") + (whole or "0") + (f".{decimals}" if decimals else "")
    return Number(value, text + (f"e{exponent}" if exponent else ""), None, percent, unit)


def _unit(part: dict[str, str]) -> str | None:
    """Return the name of the unit, empty if there is none; None if the words are not a unit."""
    name = (part.get("u1") or part.get("u2") or part["c1"]).strip().lower()
    if _NOT_UNITS.intersection(re.findall(r"[a-z]+", name)) or any(c.isdigit() for c in name):
        return None
    if part.get("u3"):
        name = "degree"
    if len(name) == 1 and name.isalpha() and name not in _UNITS:
        return None  # a variable, i or e
    return _UNITS.get(name, "")


def _digits(text: str) -> str:
    return re.sub(r"[^0-9+-]", "", text)
