"""Which options of the command line set which fields, so that errors about fields name the options."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "coupled_nodes": "nodes",
        "worker_timeout": "worker_timeout_s",
    }
)
"""The field of `LiveOptions` or of the spec that an option sets, where its name is another."""
_NODES: Final = {"PrefillPool.nodes": "prefill_nodes", "DecodePool.nodes": "decode_nodes"}
_FIELD_NAMES: Final = re.compile(
    r"(?<![\w/.-])(?P<kind>(?:LiveOptions|ClusterSpec|PrefillPool|DecodePool|CoupledPool)\.)?(?P<name>[a-z]\w*)(?!\w|[/.]\w)"
)


def by_option(sentence: str, names: Iterable[str]) -> str:
    """A sentence about fields of the spec or of `LiveOptions`, with the names of the options that set them.

    Names of one word are left as they are, unless their class is named too: they are words of English.

    Args:
        sentence: an error message.
        names: of the parameters of the command.
    """
    options = {FIELDS.get(name, name): name for name in names}

    def shown(found: re.Match[str]) -> str:
        name = found["name"]
        option = options.get(_NODES.get(found[0], name))
        if option is None or not (found["kind"] or "_" in name):
            return found[0]
        return f"--{option.replace('_', '-')}"

    return _FIELD_NAMES.sub(shown, sentence)
