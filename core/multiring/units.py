"""Sizes, rates and times as people write them."""

from __future__ import annotations

import argparse
import math
import re

__all__ = ["rate", "rate_text", "seconds", "seconds_text", "size", "size_text"]

_BINARY = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def size(text: str) -> int:
    """Bytes of `100M`, `64KiB` or `4096`: powers of 1024 (`MB` is not). Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)\s*(?:b|([kmgt])(?:ib)?)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give bytes, as 4096, 64K or 1MiB")
    return int(match[1]) << _BINARY[match[2] or ""]


def rate(text: str) -> float:
    """Bytes per second of `10gbit` or `500mbit`: decimal factors, bits. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate: give bits per second, as 500mbit or 10gbit"
        )
    return float(match[1]) * _BITS[match[2]] / 8


def seconds(text: str) -> float:
    """Seconds of `20us` or `0.1ms`. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|ms|us|ns)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give it with its unit, as 20us or 0.1ms")
    return float(match[1]) * _TIMES[match[2]]


def size_text(nbytes: float) -> str:
    """Bytes with the unit that suits them, as "64 KiB"."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.0f} B"


def rate_text(bytes_per_second: float) -> str:
    """Bits per second with the unit that suits them, as "10 Gbit/s"."""
    bits = bytes_per_second * 8
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}"
    return f"{bits:.4g} bit/s"


def seconds_text(value: float) -> str:
    """Seconds with the unit that suits them, as "20 us"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return "0 s" if math.isclose(value, 0.0, abs_tol=1e-15) else f"{value / 1e-9:.4g} ns"
