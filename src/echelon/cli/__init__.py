"""The command line: one module per command, which imports what it needs when it runs, so that `--help` is quick.

`main` imports the commands themselves, half a second of work, after it has prepared for signals.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes longer than this module's

if TYPE_CHECKING:
    import typer

    app: typer.Typer


def main() -> None:
    """Run the command, and end the process with its status."""
    from echelon.cli import command_process

    command_process.run()


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module 'echelon.cli' has no attribute {name!r}")
    from echelon.cli import commands

    return commands.app
