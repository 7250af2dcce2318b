"""What a package offers to its users, as values: its names, their members, signatures and words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A method, a property, a field or an enum's value. `signature`: what follows the name, as the language has it."""

    name: str
    signature: str = ""
    says: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A public name. `room`: what it belongs to; `declaration`: its first line, as the language has it."""

    name: str
    room: str
    declaration: str
    says: str
    members: tuple[Member, ...] = ()
