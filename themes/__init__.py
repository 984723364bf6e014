"""Palettes: one TOML file per theme. A leaf: no code in here, and nothing imports from it but the screen."""
