"""Themes: files that give every role a style. Shipped in `schedtop.themes`; an operator's own in the config folder.

A broken theme of the operator's is reported and left out, never fatal.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from rich.errors import StyleSyntaxError
from rich.style import Style

ROLES = (
    "text", "dim", "strong", "title", "title_focus", "border", "focus", "header", "sorted", "key", "greyed",
    "good", "note", "warn", "bad", "down", "prefill", "decode", "draft", "unused", "kv_free", "kv_used", "kv_shared",
    "kv_cached", "kv_held", "kv_pending", "kv_mark", "running", "waiting", "deferred", "preempted", "tag", "knob",
    "staged", "step_time", "cursor", "stale",
)  # fmt: skip
DEFAULT = "dark"
WITHOUT_COLOUR = "mono"


class BadTheme(ValueError):
    """A theme file that can't be used; the message names the file and the fault."""


@dataclass(frozen=True)
class Palette:
    """A theme, ready to draw with."""

    name: str
    label: str
    is_dark: bool
    background: str
    foreground: str
    accent: str
    roles: Mapping[str, Style]

    @cached_property
    def _styles(self) -> dict[tuple[str, bool], Style]:
        return {}

    def style(self, role: str, is_stale: bool = False) -> Style:
        """The style of `role`; `role+cursor` lies on the cursor's background; stale data has one style of its own."""
        known = self._styles.get((role, is_stale))
        if known is None:
            known = self._styles[role, is_stale] = self._made(role, is_stale)
        return known

    def _made(self, role: str, is_stale: bool) -> Style:
        name, _, layer = role.partition("+")
        style = self.roles["text"] + (self.roles["stale"] if is_stale else self.roles.get(name, Style.null()))
        return style + self.roles[layer] if layer else style


def shipped() -> dict[str, Palette]:
    """The themes that come with schedtop, by name."""
    folder = files("schedtop.themes")
    found = [parse(entry.read_text("utf-8"), entry.name) for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {palette.name: palette for palette in sorted(found, key=lambda palette: palette.label)}


def load_all(own_folder: Path) -> tuple[dict[str, Palette], list[str]]:
    """Shipped themes and those in `own_folder`, and what was wrong with the broken ones."""
    palettes, faults = shipped(), []
    for path in sorted(own_folder.glob("*.toml")) if own_folder.is_dir() else []:
        try:
            palette = parse(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError, BadTheme) as fault:
            faults.append(str(fault))
        else:
            palettes[palette.name] = palette
    return palettes, faults


def parse(text: str, source: str) -> Palette:
    """A theme from TOML. Raises `BadTheme` naming `source` and the first fault."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise BadTheme(f"theme {source}: not TOML: {fault}") from None
    missing = [key for key in ("name", "roles") if key not in raw]
    if missing:
        raise BadTheme(f"theme {source}: {missing[0]!r} is missing")
    roles = raw["roles"]
    if unknown := [role for role in roles if role not in ROLES]:
        raise BadTheme(f"theme {source}: no role is called {unknown[0]!r}; roles are {', '.join(ROLES)}")
    if absent := [role for role in ROLES if role not in roles]:
        raise BadTheme(f"theme {source}: role {absent[0]!r} is missing")
    return Palette(
        name=str(raw["name"]),
        label=str(raw.get("label", raw["name"])),
        is_dark=bool(raw.get("dark", True)),
        background=str(raw.get("background", "ansi_default")),
        foreground=str(raw.get("foreground", "ansi_default")),
        accent=str(raw.get("accent", "ansi_default")),
        roles={role: _style(source, role, str(words)) for role, words in roles.items()},
    )


def _style(source: str, role: str, words: str) -> Style:
    try:
        return Style.parse(words)
    except StyleSyntaxError as fault:
        raise BadTheme(f"theme {source}: role {role!r}: {fault}") from None
