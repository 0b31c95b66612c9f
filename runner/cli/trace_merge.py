"""``hvdgloo-run timeline merge``: the traces of several ranks on one clock, in one file."""

from __future__ import annotations

from collections.abc import Sequence

from hvdgloo._observe.merging import merge, origin
from hvdgloo.errors import ConfigError

USAGE = "hvdgloo-run timeline merge OUT FILE FILE ..."


def main(arguments: Sequence[str]) -> str:
    """Run the subcommand.

    Returns:
        the text to print.

    Raises:
        ConfigError: the arguments are wrong, or as for ``merge``.
    """
    if arguments[1:] in (["-h"], ["--help"]):
        return f"usage: {USAGE}\n\nMerge ranks' timelines into OUT, on one clock."
    if len(arguments) < 3 or any(argument.startswith("-") for argument in arguments):
        raise ConfigError(f"timeline: write {USAGE}, where OUT is the file to be written")
    _, out, *paths = arguments
    _refuse_to_overwrite_a_rank_s(out)
    count = merge(paths, out)
    return f"{out}: {count} events of {len(paths)} rank{'s' if len(paths) > 1 else ''}; open it in ui.perfetto.dev"


def _refuse_to_overwrite_a_rank_s(out: str) -> None:
    """Refuse a rank's timeline as OUT: it stands there if the user forgot to name OUT."""
    try:
        _, rank = origin(out)
    except ConfigError:
        return
    raise ConfigError(
        f"{out} is the timeline of rank {rank}, and would be overwritten; write {USAGE}, where OUT is another file"
    )
