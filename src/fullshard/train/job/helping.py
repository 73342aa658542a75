"""Help of commands as plain text: options in groups, whole words at any width."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each ``rich_help_panel`` of its options.

    Rich cuts long options at 80 columns, so apps with such commands disable rich.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options to ``formatter``, in sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                is_option = option.param_type_name == "option"
                panel = getattr(option, "rich_help_panel", None) if is_option else "Arguments"
                sections.setdefault(panel or "Options", []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=26)


class GroupedCommands(TyperGroup):
    """A group of commands, listed with the whole first sentence of each help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands to ``formatter``."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, own.get_short_help_str(200)) for name, own in self.commands.items()]
            )
