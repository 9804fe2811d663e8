"""Conveniences, imported when they are used; no step needs anything from here."""
