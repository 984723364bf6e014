"""Pure view functions: a scene and a size in, lines of spans out. No Textual, no clock, no state."""
