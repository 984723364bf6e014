"""Screens: the main one, and dialogs over it."""
