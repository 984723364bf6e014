"""Textual widgets that draw lines made by the view functions."""
