"""The addresses of this host's network interfaces, as the kernel lists them.

Asked without the native library, which the launcher does without. To bind an address tells less: where
net.ipv4.ip_nonlocal_bind is set, every address can be bound.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["has_address"]

# Of linux/netlink.h, rtnetlink.h and if_addr.h.
_HEADER = struct.Struct("=LHHLL")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBL")  # family, bits of the network, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_ERROR, _NLMSG_DONE = 20, 22, 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_READ_BYTES = 1 << 18
_ANSWER_SECONDS = 10.0


def has_address(address: tuple[Any, ...]) -> bool:
    """Whether an interface of this host has an address, as `socket.getaddrinfo` gives it.

    Raises:
        OSError: The kernel does not tell.
    """
    host, scope = str(address[0]).partition("%")[0], address[3] if len(address) == 4 else 0
    wanted = ipaddress.ip_address(host).packed
    return any(own == wanted and scope in (0, interface) for own, interface in _own_addresses())


def _own_addresses() -> Iterator[tuple[bytes, int]]:
    """Each address, and the number of its interface."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        kernel.bind((0, 0))
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        flags = _NLM_F_REQUEST | _NLM_F_DUMP
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _RTM_GETADDR, flags, 1, 0) + body)
        while True:
            for kind, message in _parts(kernel.recv(_READ_BYTES), _HEADER):
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel does not list the addresses of its interfaces")
                if kind == _RTM_NEWADDR:
                    *_, interface = _ADDRESS.unpack_from(message)
                    found = dict(_parts(message[_ADDRESS.size :], _ATTRIBUTE))
                    # Where there is one at the other end of a line as well, this is ours.
                    if own := found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS):
                        yield own, interface


def _parts(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Type and content of each of the parts that follow each other, with gaps for their alignment."""
    while len(data) >= header.size:
        length, kind, *_ = header.unpack_from(data)
        if not header.size <= length <= len(data):
            return
        yield kind, data[header.size : length]
        data = data[-(-length // 4) * 4 :]
