"""The type of messages about options that have no effect because of other options."""

from __future__ import annotations


class WithoutEffect(str):
    """A message `what has no effect with what; remedy`.

    Slipstream's own commands refuse such an option, so that users notice. The launchers of VERL and
    FastRL accept it with the first part of the message as a notice, as those systems do.
    """

    __slots__ = ()
