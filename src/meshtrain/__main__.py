"""The tools: `meshtrain COMMAND` or `python -m meshtrain COMMAND`. Training is `python -m meshtrain.recipes.NAME`.

A command is imported when it is named, so that help, a mistyped flag and quick checks do not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from meshtrain.commands import COMMANDS
from meshtrain.errors import MeshtrainError, Refused
from meshtrain.flags import nearest

USAGE = """usage: meshtrain COMMAND [OPTIONS]

commands:
{commands}

meshtrain COMMAND --help says more. To train: python -m meshtrain.recipes.llama --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    usage = USAGE.format(commands="\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()))
    if given and given[0] in ("-h", "--help"):
        print(usage)
        return 0
    try:
        if not given or given[0] not in COMMANDS:
            name = given[0] if given else ""
            raise Refused(
                (f"unknown command {name!r}{nearest(name, COMMANDS)}" if given else "no command was given")
                + f"\n{usage}"
            )
        module = importlib.import_module(f"meshtrain.commands.{COMMANDS[given[0]][0]}")
        return int(module.main(given[1:]))
    except Refused as error:
        from meshtrain.train.console import refuse

        refuse(str(error))
        return 2
    except (MeshtrainError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
