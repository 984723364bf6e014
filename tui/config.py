"""The operator's own settings: theme, refresh interval, remapped keys, themes of their own. Reads files, nothing else.

`$XDG_CONFIG_HOME/schedtop/config.toml` (else `~/.config/...`):

    theme = "light"
    interval_s = 0.25
    [keys]
    abort = "ctrl+x"
"""

import difflib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from schedtop.engine.errors import ConfigError
from schedtop.tui.keys import BY_ID, keys_of, table


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a config file may hold."""

    theme: str | None = None
    interval_s: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 0.25
    """Seconds between refreshes."""
    keys: dict[str, str] = {}
    """Key id -> keys, comma-separated, in place of the table's."""


def config_folder() -> Path:
    """Where the operator's settings and themes lie."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "schedtop"


def load(path: Path) -> Config:
    """The settings in `path`; the defaults when there is no such file.

    Raises `ConfigError` naming the file, the fault and the nearest right name.
    """
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=Config)
    except FileNotFoundError:
        return Config()
    except (OSError, msgspec.MsgspecError, ValueError) as fault:
        raise ConfigError(f"{path}: {_explained(str(fault))}") from None
    for key_id in config.keys:
        if key_id not in BY_ID:
            raise ConfigError(
                f"{path}: no key has the id {key_id!r}{_nearest(key_id, list(BY_ID))}; `?` lists them all"
            )
    _check_clashes(path, config.keys)
    return config


def _check_clashes(path: Path, keymap: dict[str, str]) -> None:
    for keys in (table(is_replay=False), table(is_replay=True)):
        owners: dict[str, str] = {}
        for key in keys:
            for name in keys_of(key, keymap):
                if name in owners:
                    raise ConfigError(
                        f"{path}: key {name!r} is given to both {owners[name]!r} and {key.id!r}; choose another"
                    )
                owners[name] = key.id


def _explained(fault: str) -> str:
    if "unknown field" not in fault:
        return fault
    name = fault.split("`")[1]
    return f"no setting is called {name!r}{_nearest(name, list(Config.__struct_fields__))}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
