"""The type of messages about options that have no effect because of other options."""

from __future__ import annotations


class WithoutEffect(str):
    """A message of the form `OPTION=VALUE has no effect with OTHER=VALUE; remedy`.

    Slipstream's own commands refuse such an option, so that users notice. The launchers of VERL and
    FastRL accept it, as those systems do, and print the part before `;` as a notice.
    """

    __slots__ = ()
